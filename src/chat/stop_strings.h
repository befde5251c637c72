#pragma once
// Stop strings in streamed text.
#include <string>
#include <string_view>
#include <vector>

namespace calla {

// Passes text on up to the first stop string that is complete, and holds back only what may be the beginning of one.
// The result does not depend on how the text is cut into chunks. Of stop strings that end at the same byte, the longest
// counts.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);  // empty ones are ignored

  // The text that may be passed on. After a stop string there is none.
  std::string push(std::string_view text);
  // What was held back, if no stop string came.
  std::string finish();

  // The stop string that ended the text, or null.
  const std::string* found() const { return found_ < stops_.size() ? &stops_[found_] : nullptr; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  size_t found_;  // index into stops_; its size: none
};

}  // namespace calla
