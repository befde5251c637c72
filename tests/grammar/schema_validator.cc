#include "tests/grammar/schema_validator.h"

#include <cmath>
#include <regex>

namespace calla {
namespace {

using nlohmann::json;

size_t characters(const std::string& text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0u) != 0x80;
  return count;
}

bool is_of_type(const json& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "number") return value.is_number();
  return value.is_number_integer() ||
         (value.is_number_float() && value.get<double>() == std::floor(value.get<double>()));
}

}  // namespace

std::string schema_violation(const json& schema, const json& root, const json& value) {
  if (schema.is_boolean()) return schema.get<bool>() ? "" : "the schema is false";
  const auto fail = [&](const std::string& why) { return why + " is violated by " + value.dump(); };
  const auto check_all = [&](const json& inner, const json& part) { return schema_violation(inner, root, part); };
  if (schema.contains("$ref")) {
    const std::string target = schema.at("$ref").get<std::string>().substr(1);
    if (std::string why = check_all(root.at(json::json_pointer(target)), value); !why.empty()) return why;
  }
  if (schema.contains("type")) {
    const json types = schema.at("type").is_array() ? schema.at("type") : json::array({schema.at("type")});
    bool any = false;
    for (const json& type : types) any = any || is_of_type(value, type.get<std::string>());
    if (!any) return fail("type");
  }
  if (schema.contains("const") && value != schema.at("const")) return fail("const");
  if (schema.contains("enum")) {
    bool any = false;
    for (const json& one : schema.at("enum")) any = any || one == value;
    if (!any) return fail("enum");
  }
  for (const char* keyword : {"anyOf", "oneOf"})
    if (schema.contains(keyword)) {
      bool any = false;
      for (const json& one : schema.at(keyword)) any = any || check_all(one, value).empty();
      if (!any) return fail(keyword);
    }
  if (schema.contains("allOf"))
    for (const json& one : schema.at("allOf"))
      if (std::string why = check_all(one, value); !why.empty()) return why;

  if (value.is_number()) {
    const double x = value.get<double>();
    if (schema.contains("minimum") && x < schema.at("minimum").get<double>()) return fail("minimum");
    if (schema.contains("maximum") && x > schema.at("maximum").get<double>()) return fail("maximum");
    if (schema.contains("exclusiveMinimum") && x <= schema.at("exclusiveMinimum").get<double>())
      return fail("exclusiveMinimum");
    if (schema.contains("exclusiveMaximum") && x >= schema.at("exclusiveMaximum").get<double>())
      return fail("exclusiveMaximum");
    if (schema.contains("multipleOf") && std::fmod(x, schema.at("multipleOf").get<double>()) != 0)
      return fail("multipleOf");
  }
  if (value.is_string()) {
    const std::string text = value.get<std::string>();
    if (schema.contains("minLength") && characters(text) < schema.at("minLength").get<size_t>())
      return fail("minLength");
    if (schema.contains("maxLength") && characters(text) > schema.at("maxLength").get<size_t>())
      return fail("maxLength");
    if (schema.contains("pattern") && !std::regex_search(text, std::regex(schema.at("pattern").get<std::string>())))
      return fail("pattern");
  }
  if (value.is_array()) {
    if (schema.contains("minItems") && value.size() < schema.at("minItems").get<size_t>()) return fail("minItems");
    if (schema.contains("maxItems") && value.size() > schema.at("maxItems").get<size_t>()) return fail("maxItems");
    const json prefix = schema.contains("prefixItems") ? schema.at("prefixItems") : json::array();
    for (size_t i = 0; i < value.size(); ++i) {
      const json inner = i < prefix.size() ? prefix[i] : schema.contains("items") ? schema.at("items") : json(true);
      if (std::string why = check_all(inner, value[i]); !why.empty()) return why;
    }
  }
  if (value.is_object()) {
    if (schema.contains("required"))
      for (const json& name : schema.at("required"))
        if (!value.contains(name.get<std::string>())) return fail("required " + name.dump());
    if (schema.contains("minProperties") && value.size() < schema.at("minProperties").get<size_t>())
      return fail("minProperties");
    if (schema.contains("maxProperties") && value.size() > schema.at("maxProperties").get<size_t>())
      return fail("maxProperties");
    for (const auto& [name, member] : value.items()) {
      bool known = false;
      if (schema.contains("properties") && schema.at("properties").contains(name)) {
        known = true;
        if (std::string why = check_all(schema.at("properties").at(name), member); !why.empty()) return why;
      }
      if (schema.contains("patternProperties"))
        for (const auto& [pattern, inner] : schema.at("patternProperties").items())
          if (std::regex_search(name, std::regex(pattern))) {
            known = true;
            if (std::string why = check_all(inner, member); !why.empty()) return why;
          }
      if (!known && schema.contains("additionalProperties"))
        if (std::string why = check_all(schema.at("additionalProperties"), member); !why.empty()) return why;
    }
  }
  return "";
}

}  // namespace calla
