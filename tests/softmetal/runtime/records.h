#pragma once
// The list behind take_dispatches().
#include "softmetal/softmetal.h"

namespace softmetal {
bool recording();
void add_record(DispatchRecord record);
std::string last_finding();  // text of the latest finding, for error messages
}  // namespace softmetal
