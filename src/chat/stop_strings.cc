#include "chat/stop_strings.h"

#include <algorithm>
#include <utility>

namespace calla {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase(stops_, "");
  std::stable_sort(stops_.begin(), stops_.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
  found_ = stops_.size();
}

std::string StopStrings::push(std::string_view text) {
  if (found()) return "";
  held_ += text;
  size_t best_end = std::string::npos;
  for (size_t i = 0; i < stops_.size(); i++) {
    const size_t begin = held_.find(stops_[i]);
    if (begin == std::string::npos || begin + stops_[i].size() >= best_end) continue;
    best_end = begin + stops_[i].size();
    found_ = i;
  }
  if (found()) return std::exchange(held_, "").substr(0, best_end - found()->size());

  size_t n_held = 0;  // the longest tail that begins a stop string
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > n_held; n--) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) n_held = n;
    }
  }
  std::string passed = held_.substr(0, held_.size() - n_held);
  held_.erase(0, passed.size());
  return passed;
}

std::string StopStrings::finish() { return std::exchange(held_, ""); }

}  // namespace calla
