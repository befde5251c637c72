#pragma once
// Unicode normalisation form C, as the reference tokenizer does it.
#include <string>
#include <string_view>

namespace calla {

// The NFC form of valid UTF-8. Text that is surely in NFC already (ASCII, most text of most languages) is
// returned as it is, without a copy; otherwise the result is built in `buffer`, which the returned view may
// point into. Marks that came after the reference's Unicode version are left alone, as the reference does, so
// ids do not depend on the installed library. Time is O(n log n) also for endless runs of marks.
std::string_view to_nfc(std::string_view text, std::string& buffer);

}  // namespace calla
