#include "server/fields.h"

#include <cmath>
#include <utility>

#include "base/error.h"

namespace calla {
namespace {

// An integer beyond 64 bits is beyond every range here.
std::string found_number(const Json& value) {
  constexpr size_t kMost = 40;
  const std::string text = compact_json(value);
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

std::string range_text(double min, double max) { return compact_json(Json(min)) + " to " + compact_json(Json(max)); }

}  // namespace

Fields::Fields(const Json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {
  if (object_.is_object()) return;
  const std::string name = prefix_.empty() ? "the request" : prefix_.substr(0, prefix_.size() - 1);
  throw RequestError(name + " must be a JSON object, found " + json_type(object_), name);
}

const Json* Fields::find(const char* name) const {
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void Fields::refuse(const char* name, const std::string& why) const {
  throw RequestError(place(name) + " " + why, place(name));
}

std::optional<bool> Fields::boolean(const char* name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) refuse(name, "must be true or false, found " + json_type(*value));
  return value->get<bool>();
}

std::optional<std::string> Fields::string(const char* name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse(name, "must be a string, found " + json_type(*value));
  return value->get<std::string>();
}

std::optional<double> Fields::number(const char* name, double min, double max) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (is_big_integer(*value)) refuse(name, "must be from " + range_text(min, max) + ", found " + found_number(*value));
  if (!value->is_number()) {
    refuse(name, "must be a number from " + range_text(min, max) + ", found " + json_type(*value));
  }
  const double number = value->get<double>();
  if (!(number >= min && number <= max)) {
    refuse(name, "must be from " + range_text(min, max) + ", found " + compact_json(*value));
  }
  return number;
}

std::optional<int64_t> Fields::integer(const char* name, int64_t min, int64_t max) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  const std::string range = std::to_string(min) + " to " + std::to_string(max);
  if (is_big_integer(*value)) refuse(name, "must be from " + range + ", found " + found_number(*value));
  const bool too_large = value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const bool whole = value->is_number_float() && std::trunc(value->get<double>()) == value->get<double>() &&
                     std::abs(value->get<double>()) < 0x1p53;
  if (!value->is_number_integer() && !whole) {
    const std::string found = value->is_number() ? compact_json(*value) : json_type(*value);
    refuse(name, "must be a whole number from " + range + ", found " + found);
  }
  const int64_t number = too_large ? INT64_MAX : value->get<int64_t>();
  if (too_large || number < min || number > max) {
    refuse(name, "must be from " + range + ", found " + compact_json(*value));
  }
  return number;
}

std::optional<Fields> Fields::object(const char* name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  return Fields(*value, place(name) + ".");
}

}  // namespace calla
