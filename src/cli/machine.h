#pragma once
// What machine this is, for reports.
#include <string>

namespace calla {

// "AMD EPYC 9V74, 2 cores, Linux 6.1.0 x86_64": processor, cores that this process may use, system.
std::string describe_machine();

}  // namespace calla
