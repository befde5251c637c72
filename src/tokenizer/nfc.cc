#include "tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <iterator>
#include <memory>
#include <vector>

#include "base/check.h"
#include "tokenizer/unicode_ranges.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

constexpr char32_t kCodePoints = 0x110000;
constexpr char32_t kFirstActive = 0x300;  // below, all characters are in NFC and none is a mark
constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
constexpr int kMaxDecomposition = 32;  // code points; the longest canonical one has 4

// Characters that nothing moves across and nothing joins: those newer than the reference, and U+11A7, one
// before the first final jamo, which utf8proc 2.8 takes for one and drops.
bool is_inert(char32_t code_point) {
  if (code_point == 0x11a7) return true;
  const auto* range = std::lower_bound(std::begin(unicode::kUnknownToNfc), std::end(unicode::kUnknownToNfc), code_point,
                                       [](const unicode::CodeRange& r, char32_t c) { return r.last < c; });
  return range != std::end(unicode::kUnknownToNfc) && range->first <= code_point;
}

int decompose(char32_t code_point, utf8proc_int32_t* out) {
  int boundary = 0;
  const auto n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point), out, kMaxDecomposition,
                                         UTF8PROC_DECOMPOSE, &boundary);
  check(n > 0 && n <= kMaxDecomposition, "a decomposition of one to 32 code points");
  return static_cast<int>(n);
}

int combining_class(utf8proc_int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

// The code points that may make a text differ from its NFC: marks, characters that decompose for good, and
// characters that may compose with the one before. A superset is harmless, it only costs time.
class ActiveSet {
 public:
  ActiveSet() : active_(std::make_unique<std::bitset<kCodePoints>>()) {
    for (char32_t c = kFirstActive; c < kCodePoints; ++c) {
      if (c == 0xac00) c = 0xd7a4;  // Hangul syllables are composed; their parts are handled below
      if (c == 0xd800) c = 0xe000;
      if (is_inert(c)) continue;
      if (combining_class(static_cast<utf8proc_int32_t>(c)) != 0) active_->set(c);
      utf8proc_int32_t parts[kMaxDecomposition];
      const int n = decompose(c, parts);
      if (n == 1 && static_cast<char32_t>(parts[0]) == c) continue;
      for (int i = 1; i < n; ++i) active_->set(static_cast<size_t>(parts[i]));
      const auto composed = utf8proc_normalize_utf32(parts, n, kCompose);
      if (composed != 1 || static_cast<char32_t>(parts[0]) != c) active_->set(c);
    }
    for (char32_t c = kFirstVowel; c <= kLastFinal; ++c) active_->set(c);
  }
  bool contains(char32_t code_point) const { return active_->test(code_point); }

 private:
  static constexpr char32_t kFirstVowel = 0x1160, kLastFinal = 0x11ff;  // Hangul medial and final jamo
  std::unique_ptr<std::bitset<kCodePoints>> active_;
};

// Normalises and appends the code points of one stretch that has no inert character.
void flush(std::vector<utf8proc_int32_t>& points, std::string& out) {
  // Sort each run of marks by class. (utf8proc's own sorting takes quadratic time on long runs.)
  for (size_t i = 0; i < points.size();) {
    if (combining_class(points[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < points.size() && combining_class(points[end]) != 0) ++end;
    std::stable_sort(points.begin() + static_cast<ptrdiff_t>(i), points.begin() + static_cast<ptrdiff_t>(end),
                     [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    i = end;
  }
  const auto n = utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()), kCompose);
  check(n >= 0, "utf8proc composes valid code points");
  for (utf8proc_ssize_t i = 0; i < n; ++i) append_utf8(static_cast<char32_t>(points[static_cast<size_t>(i)]), out);
  points.clear();
}

std::string compose(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = decode_valid(text.data() + i);
    i += static_cast<size_t>(c.bytes);
    if (is_inert(c.value)) {
      flush(points, out);
      append_utf8(c.value, out);
      continue;
    }
    utf8proc_int32_t parts[kMaxDecomposition];
    points.insert(points.end(), parts, parts + decompose(c.value, parts));
  }
  flush(points, out);
  return out;
}

bool surely_nfc(std::string_view text) {
  static const ActiveSet active;
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    if (lead < 0x80) {
      i += ascii_prefix(text.substr(i));
    } else if (lead < 0xcc) {  // below kFirstActive
      i += 2;
    } else {
      const CodePoint c = decode_valid(text.data() + i);
      if (active.contains(c.value)) return false;
      i += static_cast<size_t>(c.bytes);
    }
  }
  return true;
}

}  // namespace

std::string_view to_nfc(std::string_view text, std::string& buffer) {
  if (surely_nfc(text)) return text;
  buffer = compose(text);
  return buffer;
}

}  // namespace calla
