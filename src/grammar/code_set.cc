#include "grammar/code_set.h"

#include <algorithm>
#include <string>

#include "grammar/characters.h"

namespace calla {
namespace {

// Edges for the byte strings between `low` and `high`, which have the same length and differ freely from `at`
// on. Continuation bytes are shared: `tails[n]` takes any n continuation bytes to `to`.
class RangeWriter {
 public:
  RangeWriter(Grammar& grammar, Grammar::NodeId to) : grammar_(grammar) { tails_.push_back(to); }

  void write(Grammar::NodeId from, const std::string& low, const std::string& high, size_t at) {
    const auto first = static_cast<uint8_t>(low[at]);
    const auto last = static_cast<uint8_t>(high[at]);
    const size_t left = low.size() - at - 1;
    if (left == 0) return grammar_.add_bytes(from, first, last, tails_[0]);
    if (first == last) {
      if (is_lowest(low, at + 1) && is_highest(high, at + 1)) return grammar_.add_bytes(from, first, first, tail(left));
      const Grammar::NodeId next = grammar_.add_node();
      grammar_.add_bytes(from, first, first, next);
      return write(next, low, high, at + 1);
    }
    uint8_t free_first = first, free_last = last;
    if (!is_lowest(low, at + 1)) {
      std::string top = low;
      std::fill(top.begin() + static_cast<ptrdiff_t>(at) + 1, top.end(), '\xbf');
      write(from, low, top, at);
      ++free_first;
    }
    if (!is_highest(high, at + 1)) {
      std::string bottom = high;
      std::fill(bottom.begin() + static_cast<ptrdiff_t>(at) + 1, bottom.end(), '\x80');
      write(from, bottom, high, at);
      --free_last;
    }
    if (free_first <= free_last) grammar_.add_bytes(from, free_first, free_last, tail(left));
  }

 private:
  static bool is_lowest(const std::string& bytes, size_t at) {
    return std::all_of(bytes.begin() + static_cast<ptrdiff_t>(at), bytes.end(), [](char c) { return c == '\x80'; });
  }
  static bool is_highest(const std::string& bytes, size_t at) {
    return std::all_of(bytes.begin() + static_cast<ptrdiff_t>(at), bytes.end(), [](char c) { return c == '\xbf'; });
  }
  Grammar::NodeId tail(size_t length) {
    while (tails_.size() <= length) {
      const Grammar::NodeId node = grammar_.add_node();
      grammar_.add_bytes(node, 0x80, 0xbf, tails_.back());
      tails_.push_back(node);
    }
    return tails_[length];
  }

  Grammar& grammar_;
  std::vector<Grammar::NodeId> tails_;
};

// Where the length of the UTF-8 form changes; surrogates are cut out.
constexpr CodeSet::Range kSameLength[] = {{0, 0x7f},        {0x80, 0x7ff},    {0x800, 0xfff},
                                          {0x1000, 0xd7ff}, {0xe000, 0xffff}, {0x10000, 0x10ffff}};

}  // namespace

void CodeSet::add(char32_t low, char32_t high) {
  if (low > high) return;
  std::vector<Range> merged;
  merged.reserve(ranges_.size() + 1);
  for (const Range& range : ranges_) {
    if (range.high + 1 < low || range.low > high + 1) {
      merged.push_back(range);
    } else {
      low = std::min(low, range.low);
      high = std::max(high, range.high);
    }
  }
  merged.insert(std::find_if(merged.begin(), merged.end(), [&](const Range& r) { return r.low > high; }), {low, high});
  ranges_ = std::move(merged);
}

void CodeSet::add(const CodeSet& other) {
  for (const Range& range : other.ranges_) add(range.low, range.high);
}

void CodeSet::remove(char32_t low, char32_t high) {
  std::vector<Range> kept;
  for (const Range& range : ranges_) {
    if (range.low < low) kept.push_back({range.low, std::min(range.high, static_cast<char32_t>(low - 1))});
    if (range.high > high) kept.push_back({std::max(range.low, static_cast<char32_t>(high + 1)), range.high});
    if (range.low >= low && range.high <= high) continue;
  }
  std::erase_if(kept, [](const Range& r) { return r.low > r.high; });
  ranges_ = std::move(kept);
}

CodeSet CodeSet::complement() const {
  CodeSet result{{0, kMax}};
  for (const Range& range : ranges_) result.remove(range.low, range.high);
  result.remove(0xd800, 0xdfff);
  return result;
}

bool CodeSet::contains(char32_t code_point) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const Range& r) { return r.low <= code_point && code_point <= r.high; });
}

void CodeSet::add_edges(Grammar& grammar, Grammar::NodeId from, Grammar::NodeId to) const {
  RangeWriter writer(grammar, to);
  for (const Range& range : ranges_)
    for (const Range& block : kSameLength) {
      const char32_t low = std::max(range.low, block.low);
      const char32_t high = std::min(range.high, block.high);
      if (low > high) continue;
      std::string first, last;
      append_character(low, first);
      append_character(high, last);
      writer.write(from, first, last, 0);
    }
}

}  // namespace calla
