#include "checkpoint/describe.h"

#include <array>
#include <cstdio>

namespace calla {

std::string describe_name(std::string_view name) {
  constexpr size_t kLongest = 120;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : name) {
    if (out.size() >= kLongest) return out + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    }
  }
  return out;
}

std::string describe_shape(std::span<const uint64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

std::string describe_bytes(uint64_t bytes) {
  if (bytes < 10'000) return std::to_string(bytes) + " bytes";
  constexpr std::array kUnits = {"kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes) / 1e3;
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1e3;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), value < 99.95 ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text.data();
}

}  // namespace calla
