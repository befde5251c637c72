#include "chat/argument_types.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "chat/text.h"

namespace calla {
namespace {

using Types = ArgumentTypes;

constexpr int kMaxSchemaDepth = 16;  // of references and alternatives

Types named_type(const Json& name) {
  static constexpr std::array<std::pair<std::string_view, Types::Type>, 7> kNames = {{{"string", Types::kString},
                                                                                      {"integer", Types::kInteger},
                                                                                      {"number", Types::kNumber},
                                                                                      {"boolean", Types::kBoolean},
                                                                                      {"object", Types::kObject},
                                                                                      {"array", Types::kArray},
                                                                                      {"null", Types::kNull}}};
  if (!name.is_string()) return {};
  for (const auto& [text, type] : kNames) {
    if (name.get_ref<const std::string&>() == text) return type;
  }
  return {};
}

Types type_of_value(const Json& value) {
  if (value.is_string()) return Types::kString;
  if (value.is_number_integer() || is_big_integer(value)) return Types::kInteger;
  if (value.is_number()) return Types::kNumber;
  if (value.is_boolean()) return Types::kBoolean;
  if (value.is_object()) return Types::kObject;
  if (value.is_array()) return Types::kArray;
  return Types::kNull;
}

const Json* follow_reference(const Json& root, const std::string& reference) {
  if (!reference.starts_with("#")) return nullptr;
  try {
    const Json::json_pointer pointer(reference.substr(1));
    return root.contains(pointer) ? &root.at(pointer) : nullptr;
  } catch (const Json::exception&) {
    return nullptr;  // no JSON pointer
  }
}

Types schema_types(const Json& schema, const Json& root, int depth) {
  Types types;
  if (!schema.is_object() || depth > kMaxSchemaDepth) return types;
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_array()) {
      for (const Json& name : *type) types.add(named_type(name));
    } else {
      types.add(named_type(*type));
    }
  }
  if (const auto reference = schema.find("$ref");
      types.empty() && reference != schema.end() && reference->is_string()) {
    const Json* target = follow_reference(root, reference->get_ref<const std::string&>());
    if (target) types.add(schema_types(*target, root, depth + 1));
  }
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const auto options = schema.find(key);
    if (!types.empty() || options == schema.end() || !options->is_array()) continue;
    for (const Json& option : *options) types.add(schema_types(option, root, depth + 1));
  }
  if (const auto values = schema.find("enum"); types.empty() && values != schema.end() && values->is_array()) {
    for (const Json& value : *values) types.add(type_of_value(value));
  }
  if (const auto value = schema.find("const"); types.empty() && value != schema.end()) {
    types.add(type_of_value(*value));
  }
  if (types.empty() && schema.contains("properties")) types.add(Types::kObject);
  if (types.empty() && schema.contains("items")) types.add(Types::kArray);
  if (const auto nullable = schema.find("nullable"); nullable != schema.end() && *nullable == true && !types.empty()) {
    types.add(Types::kNull);
  }
  return types;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_markup_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_markup_space(text.back())) text.remove_suffix(1);
  return text;
}

std::string quoted(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

std::optional<bool> as_boolean(std::string_view text, bool exact) {
  if (text == "true") return true;
  if (text == "false") return false;
  if (exact) return std::nullopt;
  if (text == "True" || text == "TRUE") return true;
  if (text == "False" || text == "FALSE") return false;
  return std::nullopt;
}

// The digits of an integer written as 42, 42.0 or 4.2e1. Digits are never sent through a double unless it is
// exact.
std::optional<std::string> as_integer(std::string_view text) {
  const Json value = try_parse_json(text);
  if (value.is_number_integer() || is_big_integer(value)) return std::string(text);
  if (!value.is_number_float()) return std::nullopt;
  const size_t point = text.find('.');
  if (point != std::string_view::npos && text.find_first_not_of('0', point + 1) == std::string_view::npos) {
    return std::string(text.substr(0, point));
  }
  const double number = value.get<double>();
  if (number != std::trunc(number) || std::abs(number) > 0x1p53) return std::nullopt;
  return std::to_string(static_cast<int64_t>(number));
}

}  // namespace

ArgumentTypes argument_types(const Json& parameters, std::string_view name) {
  if (!parameters.is_object()) return {};
  const auto properties = parameters.find("properties");
  if (properties == parameters.end() || !properties->is_object()) return {};
  const auto property = properties->find(std::string(name));
  if (property == properties->end()) return {};
  return schema_types(*property, parameters, 0);
}

std::optional<std::string> argument_json(std::string_view raw, ArgumentTypes types) {
  const std::string_view text = trim(raw);
  const bool may_be_string = types.has(Types::kString);
  if (types == Types(Types::kString)) return quoted(raw);
  if (text.empty() && !types.empty() && !may_be_string) return std::nullopt;

  if (types.has(Types::kNull) && text == "null") return "null";
  if (types.has(Types::kBoolean)) {
    if (const auto value = as_boolean(text, may_be_string)) return *value ? "true" : "false";
  }
  if (types.has(Types::kInteger)) {
    if (auto digits = as_integer(text)) return digits;
  }
  if (types.has(Types::kNumber)) {
    const Json value = try_parse_json(text);
    if (value.is_number() || is_big_integer(value)) return std::string(text);
  }
  if (types.has(Types::kObject) || types.has(Types::kArray) || types.empty()) {
    const Json value = try_parse_json(text);
    if ((value.is_object() && (types.empty() || types.has(Types::kObject))) ||
        (value.is_array() && (types.empty() || types.has(Types::kArray)))) {
      return compact_json(value);
    }
  }
  return quoted(raw);
}

}  // namespace calla
