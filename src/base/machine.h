#pragma once
// The machine in one line, for reports that people paste.
#include <string>

namespace calla {

// "macOS 26.1, Apple M5 Max, 18 cores"; "Linux 6.1.0, Debian GNU/Linux 12 (bookworm), AMD EPYC 9655, 2 cores".
std::string machine_description();

}  // namespace calla
