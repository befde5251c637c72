#pragma once
// Reading the fields of a request's JSON object. A field that is absent or null has no value; one of the wrong type or
// out of range is a RequestError that names it.
#include <cstdint>
#include <optional>
#include <string>

#include "chat/json.h"

namespace calla {

class Fields {
 public:
  // `object` must outlive this. `prefix` stands before names in messages ("stream_options."). Throws RequestError if it
  // is no object.
  explicit Fields(const Json& object, std::string prefix = "");

  const Json* find(const char* name) const;  // null: absent
  bool has(const char* name) const { return find(name) != nullptr; }

  std::optional<bool> boolean(const char* name) const;
  std::optional<std::string> string(const char* name) const;
  std::optional<double> number(const char* name, double min, double max) const;
  std::optional<int64_t> integer(const char* name, int64_t min, int64_t max) const;
  // The object under this name.
  std::optional<Fields> object(const char* name) const;

  std::string place(const char* name) const { return prefix_ + name; }
  // Throws RequestError about the field.
  [[noreturn]] void refuse(const char* name, const std::string& why) const;

 private:
  const Json& object_;
  std::string prefix_;
};

}  // namespace calla
