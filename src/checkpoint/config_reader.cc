#include "checkpoint/config_reader.h"

#include <cstdio>
#include <utility>

#include "base/error.h"
#include "checkpoint/describe.h"

namespace calla {
namespace {

std::string show_number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

constexpr const char* kGetAgain = "; get the file again, it was changed or is another model's";

}  // namespace

FieldReader::FieldReader(const nlohmann::json& object, std::string file, std::string path)
    : object_(&object), file_(std::move(file)), path_(std::move(path)) {
  if (!object.is_object())
    throw CheckpointError(file_ + ": " + (path_.empty() ? "the file" : path_.substr(0, path_.size() - 1)) +
                          ": expected an object, found " + show(object) + kGetAgain);
}

void FieldReader::fail(const std::string& name, const std::string& what) const {
  throw CheckpointError(file_ + ": " + path_ + name + ": " + what);
}

void FieldReader::fail_as_damaged(const std::string& name, const std::string& what) const {
  fail(name, what + kGetAgain);
}

std::string FieldReader::show(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_string()) return "\"" + describe_name(value.get_ref<const std::string&>()) + "\"";
  return describe_name(value.dump());
}

bool FieldReader::has(const char* name) const {
  const auto found = object_->find(name);
  return found != object_->end() && !found->is_null();
}

const nlohmann::json& FieldReader::at(const char* name) const {
  if (!has(name)) fail_as_damaged(name, "missing");
  return *object_->find(name);
}

int FieldReader::integer(const char* name, int least, int most) const {
  const nlohmann::json& value = at(name);
  const bool fits = value.is_number_unsigned()  ? value.get<uint64_t>() <= static_cast<uint64_t>(INT32_MAX)
                    : value.is_number_integer() ? value.get<int64_t>() >= INT32_MIN
                                                : false;
  if (!fits || value.get<int64_t>() < least || value.get<int64_t>() > most)
    fail_as_damaged(name, "expected an integer from " + std::to_string(least) + " to " + std::to_string(most) +
                              ", found " + show(value));
  return value.get<int>();
}

int FieldReader::integer_or(const char* name, int fallback, int least, int most) const {
  return has(name) ? integer(name, least, most) : fallback;
}

double FieldReader::number(const char* name, double least, double most) const {
  const nlohmann::json& value = at(name);
  // Written so that NaN, which JSON cannot spell but a library might, is refused too.
  if (!value.is_number() || !(value.get<double>() >= least && value.get<double>() <= most))
    fail_as_damaged(
        name, "expected a number from " + show_number(least) + " to " + show_number(most) + ", found " + show(value));
  return value.get<double>();
}

std::optional<double> FieldReader::optional_number(const char* name, double least, double most) const {
  if (!has(name)) return std::nullopt;
  return number(name, least, most);
}

bool FieldReader::boolean_or(const char* name, bool fallback) const {
  if (!has(name)) return fallback;
  const nlohmann::json& value = at(name);
  if (!value.is_boolean()) fail_as_damaged(name, "expected true or false, found " + show(value));
  return value.get<bool>();
}

std::string FieldReader::text_or(const char* name, const std::string& fallback) const {
  if (!has(name)) return fallback;
  const nlohmann::json& value = at(name);
  if (!value.is_string()) fail_as_damaged(name, "expected a string, found " + show(value));
  return value.get<std::string>();
}

FieldReader FieldReader::object(const char* name) const { return {at(name), file_, path_ + name + "."}; }

void FieldReader::require_integer(const char* name, int supported) const {
  const int value = integer(name, 0, INT32_MAX);
  if (value != supported)
    fail(name, std::to_string(value) + " is not supported: Calla's kernels are made for " + std::to_string(supported));
}

void FieldReader::require_boolean(const char* name, bool fallback, bool supported) const {
  if (boolean_or(name, fallback) != supported)
    fail(name, std::string(supported ? "false" : "true") + " is not supported: Calla implements " +
                   (supported ? "true" : "false"));
}

}  // namespace calla
