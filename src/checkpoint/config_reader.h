#pragma once
// FieldReader: typed, range-checked access to the fields of one JSON object; messages name file and field.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace calla {

class FieldReader {
 public:
  // `path` is where `object` stands in the file: "" or "text_config.". Throws if it is not an object.
  FieldReader(const nlohmann::json& object, std::string file, std::string path);

  bool has(const char* name) const;                  // present and not null
  const nlohmann::json& at(const char* name) const;  // throws if missing

  int integer(const char* name, int least, int most) const;
  int integer_or(const char* name, int fallback, int least, int most) const;
  double number(const char* name, double least, double most) const;
  std::optional<double> optional_number(const char* name, double least, double most) const;
  bool boolean_or(const char* name, bool fallback) const;
  std::string text_or(const char* name, const std::string& fallback) const;
  FieldReader object(const char* name) const;

  // Throws unless the field, if present, has the one value that Calla implements.
  void require_integer(const char* name, int supported) const;
  void require_boolean(const char* name, bool fallback, bool supported) const;

  // `what` says what would be supported, or what to do.
  [[noreturn]] void fail(const std::string& name, const std::string& what) const;
  // For a value that no sound file has: the message goes on with what to do.
  [[noreturn]] void fail_as_damaged(const std::string& name, const std::string& what) const;
  // A value as it stands in the file, short.
  static std::string show(const nlohmann::json& value);

 private:
  const nlohmann::json* object_;
  std::string file_;
  std::string path_;
};

}  // namespace calla
