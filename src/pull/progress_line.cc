#include "pull/progress_line.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace calla {
namespace {

std::string readable_seconds(double seconds) {
  const auto whole = std::lround(std::min(seconds, 359999.0));
  char text[32];
  if (whole >= 3600)
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
  else
    std::snprintf(text, sizeof text, "%ld:%02ld", whole / 60, whole % 60);
  return text;
}

}  // namespace

std::string readable_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 || bytes >= 99.95 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return text;
}

std::string progress_line(const PullProgress& progress, int width) {
  const double share =
      progress.bytes_total == 0
          ? 0
          : std::min(1.0, static_cast<double>(progress.bytes_done) / static_cast<double>(progress.bytes_total));
  char percent[16];
  // Not 100 % before all of it is there.
  std::snprintf(percent, sizeof percent, "%3d%%", static_cast<int>(share * 100));
  std::string text = std::string(percent) + "  " + readable_bytes(static_cast<double>(progress.bytes_done)) + " of " +
                     readable_bytes(static_cast<double>(progress.bytes_total));
  if (progress.bytes_per_second > 0) text += "  " + readable_bytes(progress.bytes_per_second) + "/s";
  if (progress.seconds_left >= 0 && progress.bytes_done < progress.bytes_total)
    text += "  " + readable_seconds(progress.seconds_left) + " left";
  const int room = std::min(width - static_cast<int>(text.size()) - 4, 40);
  if (room >= 8) {
    const auto filled = static_cast<size_t>(share * room);
    std::string bar(static_cast<size_t>(room), ' ');
    std::fill_n(bar.begin(), filled, '=');
    if (filled < bar.size()) bar[filled] = '>';
    text = "[" + bar + "] " + text;
  }
  if (width > 0 && text.size() > static_cast<size_t>(width)) text.resize(static_cast<size_t>(width));
  return text;
}

}  // namespace calla
