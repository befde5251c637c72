#pragma once
// The list behind take_dispatches().
#include "softmetal/softmetal.h"

namespace softmetal {
bool recording();
void add_record(DispatchRecord record);
}  // namespace softmetal
