#pragma once
// Options, findings and injected errors: the process-wide state behind softmetal.h.
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "softmetal/softmetal.h"

namespace softmetal {

// Reports a finding (once per fault, kernel and place), on stderr too, with the seed.
// True if it was new.
bool report_finding(Finding finding);
std::string last_finding();  // text of the latest finding, for error messages

// file:line of a code address, by way of the module's debug information.
std::string place_of(const void* pc);
std::string place_of(const std::source_location& at);

// Is this the moment for an injected failure? Counts down and consumes it.
bool injected(Failure failure);
bool device_is_lost();
void lose_device();

uint64_t options_version();  // changes with every set_options
uint64_t next_seed();        // a fresh seed derived from Options::seed

}  // namespace softmetal
