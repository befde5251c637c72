#include "chat/json.h"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/error.h"

namespace calla {
namespace {

constexpr uint64_t kBigIntegerSubtype = 1;

bool all_digits(std::string_view text) {
  if (!text.empty() && text[0] == '-') text.remove_prefix(1);
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// Builds the value like nlohmann's own parser, plus the depth limit and the exact big integers.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(int max_depth) : max_depth_(max_depth) {}

  Json take() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool number_float(number_float_t value, const string_t& text) override {
    if (!all_digits(text)) return put(value);
    return put(Json::binary(std::vector<uint8_t>(text.begin(), text.end()), kBigIntegerSubtype));
  }

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    slot_ = &(*open_.back())[name];  // a repeated key keeps its first place and its last value
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& why) override {
    std::string_view what = why.what();
    if (const size_t colon = what.find(": "); colon != std::string_view::npos) what.remove_prefix(colon + 2);
    if (const size_t name = what.find("] "); what.starts_with('[') && name != std::string_view::npos)
      what.remove_prefix(name + 2);                   // the library's own, of the error
    what = what.substr(0, what.find("; last read"));  // that would be the text itself, in which bytes may be broken
    error_ = "byte " + std::to_string(position) + ": " + std::string(what);
    return false;
  }

 private:
  template <typename T>
  Json* place(T&& value) {
    if (open_.empty()) {
      root_ = std::forward<T>(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::forward<T>(value));
      return &open_.back()->back();
    }
    *slot_ = std::forward<T>(value);
    return slot_;
  }

  template <typename T>
  bool put(T&& value) {
    place(std::forward<T>(value));
    return true;
  }

  bool open(Json empty) {
    if (static_cast<int>(open_.size()) >= max_depth_) {
      error_ = "nested deeper than " + std::to_string(max_depth_) + " levels";
      return false;
    }
    open_.push_back(place(std::move(empty)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  const int max_depth_;
  Json root_;
  std::vector<Json*> open_;  // containers being filled, outermost first; a container does not move while it is open
  Json* slot_ = nullptr;     // where the next member's value goes
  std::string error_;
};

void append_float(std::string& out, double value) {
  if (!std::isfinite(value)) {  // JSON text cannot hold one; only arithmetic could make it
    out += std::isnan(value) ? "NaN" : value < 0 ? "-Infinity" : "Infinity";
    return;
  }
  // The shortest digits that read back as `value`, laid out as Python's repr does.
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  if (text[0] == '-') {
    out += '-';
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits(text.substr(0, 1));
  if (e > 2) digits += text.substr(2, e - 2);
  int exponent = 0;
  const char* exponent_begin = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(exponent_begin, text.data() + text.size(), exponent);

  const int n = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (n > 1) out.append(".").append(digits, 1);
    const int magnitude = std::abs(exponent);
    out += exponent < 0 ? "e-" : "e+";
    if (magnitude < 10) out += '0';
    out += std::to_string(magnitude);
  } else if (exponent < 0) {
    out.append("0.").append(static_cast<size_t>(-exponent - 1), '0').append(digits);
  } else if (n <= exponent + 1) {
    out.append(digits).append(static_cast<size_t>(exponent + 1 - n), '0').append(".0");
  } else {
    out.append(digits, 0, static_cast<size_t>(exponent + 1)).append(".");
    out.append(digits, static_cast<size_t>(exponent + 1));
  }
}

struct Separators {
  std::string_view item;
  std::string_view key;
};

void append_value(std::string& out, const Json& value, const Separators& separators) {
  switch (value.type()) {
    case Json::value_t::object: {
      out += '{';
      bool first = true;
      for (const auto& [name, member] : value.items()) {
        if (!std::exchange(first, false)) out += separators.item;
        append_json_string(out, name);
        out += separators.key;
        append_value(out, member, separators);
      }
      out += '}';
      return;
    }
    case Json::value_t::array: {
      out += '[';
      bool first = true;
      for (const Json& element : value) {
        if (!std::exchange(first, false)) out += separators.item;
        append_value(out, element, separators);
      }
      out += ']';
      return;
    }
    case Json::value_t::string:
      append_json_string(out, value.get_ref<const std::string&>());
      return;
    case Json::value_t::boolean:
      out += value.get<bool>() ? "true" : "false";
      return;
    case Json::value_t::number_integer:
      out += std::to_string(value.get<int64_t>());
      return;
    case Json::value_t::number_unsigned:
      out += std::to_string(value.get<uint64_t>());
      return;
    case Json::value_t::number_float:
      append_float(out, value.get<double>());
      return;
    case Json::value_t::binary: {
      const auto& digits = value.get_binary();
      out.append(digits.begin(), digits.end());
      return;
    }
    case Json::value_t::null:
    case Json::value_t::discarded:
      out += "null";
      return;
  }
}

Json parse(std::string_view text, int max_depth, std::string& error) {
  Builder builder(max_depth);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    error = builder.error();
    return Json(Json::value_t::discarded);
  }
  return builder.take();
}

}  // namespace

Json parse_json(std::string_view text, int max_depth) {
  std::string error;
  Json value = parse(text, max_depth, error);
  if (value.is_discarded()) throw RequestError("not valid JSON: " + error, "", "invalid_json");
  return value;
}

Json try_parse_json(std::string_view text, int max_depth) {
  std::string error;
  return parse(text, max_depth, error);
}

bool is_big_integer(const Json& value) {
  return value.is_binary() && value.get_binary().has_subtype() && value.get_binary().subtype() == kBigIntegerSubtype;
}

std::string json_type(const Json& value) { return is_big_integer(value) ? "number" : value.type_name(); }

void append_json_escaped(std::string& out, std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += "\\u00";
          out += kHex[c >> 4];
          out += kHex[c & 15];
        } else {
          out += c;
        }
    }
  }
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  append_json_escaped(out, text);
  out += '"';
}

std::string python_json(const Json& value) {
  std::string out;
  append_value(out, value, {", ", ": "});
  return out;
}

std::string compact_json(const Json& value) {
  std::string out;
  append_value(out, value, {",", ":"});
  return out;
}

}  // namespace calla
