#include "grammar/number_range.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

namespace calla {
namespace {

constexpr size_t kMaxWhole = 18;        // digits before the point, unless a bound has more
constexpr size_t kMaxFraction = 12;     // digits after it
constexpr size_t kMaxSignificant = 15;  // so that two different texts are two different doubles

// Unsigned numbers whose whole part has `length` digits, between two bounds that may be absent.
class MagnitudeWriter {
 public:
  MagnitudeWriter(Grammar& grammar, Grammar::NodeId to, const std::optional<NumberBound>& low,
                  const std::optional<NumberBound>& high, const NumberRange& range, size_t length)
      : grammar_(grammar), to_(to), length_(length), multiple_of_(range.multiple_of) {
    if (!range.is_integer) {
      fraction_ = length < kMaxSignificant ? std::min(kMaxFraction, kMaxSignificant - length) : 0;
      for (const auto* bound : {&low, &high})
        if (*bound) fraction_ = std::max(fraction_, (*bound)->value.fraction.size());
    }
    // A bound with fewer or more whole digits than `length` is met or missed by the length alone.
    if (low) {
      if (low->value.whole.size() > length) return;
      if (low->value.whole.size() == length) low_ = *low;
    }
    if (high) {
      if (high->value.whole.size() < length) return;
      if (high->value.whole.size() == length) high_ = *high;
    }
    possible_ = true;
  }

  void write(Grammar::NodeId from) {
    if (possible_) grammar_.add_epsilon(from, node({0, low_.has_value(), high_.has_value(), 0}));
    while (!pending_.empty()) {
      const Key key = pending_.back();
      pending_.pop_back();
      extend(key);
    }
  }

 private:
  // Digits written so far; whether they equal the bound's; the remainder modulo multiple_of.
  struct Key {
    size_t digits;
    bool on_low, on_high;
    uint32_t remainder;
    auto operator<=>(const Key&) const = default;
  };

  Grammar::NodeId node(const Key& key) {
    const auto [at, is_new] = nodes_.try_emplace(key, Grammar::kNone);
    if (is_new) {
      at->second = grammar_.add_node();
      pending_.push_back(key);
    }
    return at->second;
  }

  static int digit_of(const NumberBound& bound, size_t index) {
    const std::string& whole = bound.value.whole;
    const std::string& fraction = bound.value.fraction;
    if (index < whole.size()) return whole[index] - '0';
    index -= whole.size();
    return index < fraction.size() ? fraction[index] - '0' : 0;
  }
  // Whether the bound has a digit other than 0 from `index` on.
  static bool has_more(const NumberBound& bound, size_t index) {
    for (; index < bound.value.whole.size() + bound.value.fraction.size(); ++index)
      if (digit_of(bound, index) != 0) return true;
    return false;
  }

  bool may_end(const Key& key) const {
    if (key.digits < length_ || key.remainder != 0) return false;
    if (key.on_low && (low_->exclusive || has_more(*low_, key.digits))) return false;
    return !(key.on_high && high_->exclusive && !has_more(*high_, key.digits));
  }

  void extend(const Key& key) {
    Grammar::NodeId from = nodes_.at(key);
    if (may_end(key)) grammar_.add_epsilon(from, to_);
    if (key.digits == length_ + fraction_) return;
    if (key.digits == length_) {
      const Grammar::NodeId point = grammar_.add_node();
      grammar_.add_bytes(from, '.', '.', point);
      from = point;
    }
    for (int digit = 0; digit <= 9; ++digit) {
      if (digit == 0 && key.digits == 0 && length_ > 1) continue;
      if (key.on_low && digit < digit_of(*low_, key.digits)) continue;
      if (key.on_high && digit > digit_of(*high_, key.digits)) continue;
      const Key next{key.digits + 1, key.on_low && digit == digit_of(*low_, key.digits),
                     key.on_high && digit == digit_of(*high_, key.digits),
                     (key.remainder * 10 + static_cast<uint32_t>(digit)) % multiple_of_};
      const auto byte = static_cast<uint8_t>('0' + digit);
      grammar_.add_bytes(from, byte, byte, node(next));
    }
  }

  Grammar& grammar_;
  Grammar::NodeId to_;
  size_t length_;
  size_t fraction_ = 0;
  uint32_t multiple_of_;
  std::optional<NumberBound> low_, high_;
  bool possible_ = false;
  std::map<Key, Grammar::NodeId> nodes_;
  std::vector<Key> pending_;
};

}  // namespace

void NumberRange::add_edges(Grammar& grammar, Grammar::NodeId from, Grammar::NodeId to) const {
  size_t longest = multiple_of == 1 ? kMaxWhole : kMaxSignificant;
  for (const auto* bound : {&low, &high})
    if (*bound) longest = std::max(longest, (*bound)->value.whole.size());
  const auto magnitudes = [&](Grammar::NodeId start, const std::optional<NumberBound>& least,
                              const std::optional<NumberBound>& most) {
    for (size_t length = 1; length <= longest; ++length)
      MagnitudeWriter(grammar, to, least, most, *this, length).write(start);
  };
  const NumberBound zero{};
  // From zero up: the lower bound counts if it is not negative.
  if (!high || !high->value.negative) magnitudes(from, low && !low->value.negative ? low : std::optional(zero), high);
  // Below zero the bounds change places; minus zero is left out.
  if (!low || low->value.negative) {
    const Grammar::NodeId minus = grammar.add_node();
    grammar.add_bytes(from, '-', '-', minus);
    std::optional<NumberBound> least = NumberBound{.value = {}, .exclusive = true}, most = low;
    if (high && high->value.negative) least = high;
    magnitudes(minus, least, most);
  }
}

}  // namespace calla
