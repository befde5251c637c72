#include "grammar/schema_algebra.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "base/error.h"

namespace calla {
namespace {

constexpr int kMaxSchemaDepth = 64;
constexpr size_t kMaxAlternatives = 2000;
constexpr size_t kMaxWork = 3'000'000;

constexpr std::array<std::string_view, 7> kTypes = {"object", "array",   "string", "integer",
                                                    "number", "boolean", "null"};

// Keywords that restrict the value. All others (title, default, unknown ones) are annotations by JSON
// Schema's rules.
bool is_constraint(const std::string& key) { return is_supported_keyword(key) || is_unsupported_keyword(key); }

size_t parts_of(const SchemaJson& schema) {
  size_t count = 1;
  if (schema.is_structured())
    for (const SchemaJson& part : schema) count += parts_of(part);
  return count;
}

SchemaJson all_of(const SchemaJson& a, const SchemaJson& b) {
  if (a == SchemaJson(true) || a == SchemaJson::object()) return b;
  if (b == SchemaJson(true) || b == SchemaJson::object() || a == b) return a;
  if (a == SchemaJson(false) || b == SchemaJson(false)) return false;
  return {{"allOf", SchemaJson::array({a, b})}};
}

SchemaJson member_or(const SchemaJson& schema, const char* key, SchemaJson fallback) {
  const auto found = schema.find(key);
  return found == schema.end() ? std::move(fallback) : *found;
}

std::optional<SchemaJson> values_of(const SchemaJson& schema) {
  if (schema.contains("enum")) return schema.at("enum");
  if (schema.contains("const")) return SchemaJson::array({schema.at("const")});
  return std::nullopt;
}

// What `schema` says about a property that it does not list.
SchemaJson unlisted(const SchemaJson& schema) { return member_or(schema, "additionalProperties", true); }

void merge_objects(const SchemaJson& a, const SchemaJson& b, SchemaJson& out) {
  const SchemaJson none = SchemaJson::object();
  const SchemaJson left = member_or(a, "properties", none), right = member_or(b, "properties", none);
  SchemaJson properties = SchemaJson::object();
  for (const auto& [name, schema] : left.items())
    properties[name] = all_of(schema, right.contains(name) ? right.at(name) : unlisted(b));
  for (const auto& [name, schema] : right.items())
    if (!left.contains(name)) properties[name] = all_of(unlisted(a), schema);
  if (!properties.empty()) out["properties"] = std::move(properties);
  if (a.contains("additionalProperties") || b.contains("additionalProperties"))
    out["additionalProperties"] = all_of(unlisted(a), unlisted(b));
  SchemaJson required = SchemaJson::array();
  for (const SchemaJson* side : {&a, &b})
    for (const SchemaJson& name : member_or(*side, "required", SchemaJson::array()))
      if (std::find(required.begin(), required.end(), name) == required.end()) required.push_back(name);
  if (!required.empty()) out["required"] = std::move(required);
}

void merge_arrays(const SchemaJson& a, const SchemaJson& b, SchemaJson& out) {
  const auto tuple = [](const SchemaJson& s) {
    if (s.contains("prefixItems")) return s.at("prefixItems");
    const SchemaJson items = member_or(s, "items", true);
    return items.is_array() ? items : SchemaJson::array();
  };
  const auto rest = [](const SchemaJson& s) {
    const SchemaJson items = member_or(s, "items", true);
    return items.is_array() ? member_or(s, "additionalItems", true) : items;
  };
  const SchemaJson left = tuple(a), right = tuple(b);
  SchemaJson prefix = SchemaJson::array();
  for (size_t i = 0; i < std::max(left.size(), right.size()); ++i)
    prefix.push_back(all_of(i < left.size() ? left[i] : rest(a), i < right.size() ? right[i] : rest(b)));
  if (!prefix.empty()) out["prefixItems"] = std::move(prefix);
  const SchemaJson items = all_of(rest(a), rest(b));
  if (items != SchemaJson(true)) out["items"] = items;
}

}  // namespace

bool is_supported_keyword(const std::string& key) {
  constexpr std::string_view kSupported[] = {"type",
                                             "enum",
                                             "const",
                                             "$ref",
                                             "allOf",
                                             "anyOf",
                                             "oneOf",
                                             "properties",
                                             "required",
                                             "additionalProperties",
                                             "patternProperties",
                                             "propertyNames",
                                             "minProperties",
                                             "maxProperties",
                                             "items",
                                             "prefixItems",
                                             "additionalItems",
                                             "minItems",
                                             "maxItems",
                                             "minLength",
                                             "maxLength",
                                             "pattern",
                                             "format",
                                             "minimum",
                                             "maximum",
                                             "exclusiveMinimum",
                                             "exclusiveMaximum",
                                             "multipleOf"};
  return std::find(std::begin(kSupported), std::end(kSupported), key) != std::end(kSupported);
}

bool is_unsupported_keyword(const std::string& key) {
  constexpr std::string_view kUnsupported[] = {"not",
                                               "if",
                                               "then",
                                               "else",
                                               "dependencies",
                                               "dependentRequired",
                                               "dependentSchemas",
                                               "contains",
                                               "minContains",
                                               "maxContains",
                                               "uniqueItems",
                                               "unevaluatedProperties",
                                               "unevaluatedItems",
                                               "$dynamicRef",
                                               "$recursiveRef"};
  return std::find(std::begin(kUnsupported), std::end(kUnsupported), key) != std::end(kUnsupported);
}

void refuse_schema(const SchemaPath& at, const std::string& problem) {
  throw RequestError("schema at " + at.pointer + ": " + problem);
}

std::vector<std::string> schema_types(const SchemaJson& schema, const SchemaPath& at) {
  const auto found = schema.find("type");
  if (found == schema.end()) return {kTypes.begin(), kTypes.end()};
  std::vector<std::string> types;
  const auto add = [&](const SchemaJson& type) {
    if (!type.is_string() || std::find(kTypes.begin(), kTypes.end(), type.get<std::string>()) == kTypes.end())
      refuse_schema(at / "type", "unknown type " + type.dump());
    types.push_back(type.get<std::string>());
  };
  if (found->is_array())
    for (const SchemaJson& type : *found) add(type);
  else
    add(*found);
  return types;
}

bool has_type(const SchemaJson& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "number") return value.is_number();
  return value.is_number_integer() ||
         (value.is_number_float() && std::trunc(value.get<double>()) == value.get<double>());
}

const SchemaJson& SchemaAlgebra::resolve(const std::string& reference, const SchemaPath& at) const {
  if (reference.empty() || reference[0] != '#' || (reference.size() > 1 && reference[1] != '/'))
    refuse_schema(at / "$ref",
                  "only references into the same schema (\"#/...\") are supported, not \"" + reference + "\"");
  std::string pointer;
  for (size_t i = 1; i < reference.size(); ++i) {  // undo %XX
    const auto hex = [&](size_t k) {
      return k < reference.size() && std::isxdigit(static_cast<unsigned char>(reference[k]));
    };
    if (reference[i] == '%' && hex(i + 1) && hex(i + 2)) {
      pointer.push_back(static_cast<char>(std::stoi(reference.substr(i + 1, 2), nullptr, 16)));
      i += 2;
    } else {
      pointer.push_back(reference[i]);
    }
  }
  try {
    return root_.at(SchemaJson::json_pointer(pointer));
  } catch (const SchemaJson::exception&) {
    refuse_schema(at / "$ref", "nothing is found at \"" + reference + "\"");
  }
}

bool SchemaAlgebra::stands_alone(const SchemaJson& schema, const std::string& keyword) {
  for (const auto& [key, value] : schema.items())
    if (key != keyword && is_constraint(key)) return false;
  return true;
}

std::vector<SchemaJson> SchemaAlgebra::alternatives(const SchemaJson& schema, const SchemaPath& at) const {
  if (at.depth > kMaxSchemaDepth) refuse_schema(at, "nested too deeply, or a reference that leads back to itself");
  if (schema.is_boolean())
    return schema.get<bool>() ? std::vector{SchemaJson(SchemaJson::object())} : std::vector<SchemaJson>{};
  if (!schema.is_object())
    refuse_schema(at, "a schema is an object, true or false, not " + schema.dump().substr(0, 40));
  work_ += parts_of(schema);
  if (work_ > kMaxWork) refuse_schema(at, "its references and combinations multiply to too large a schema");
  SchemaJson base = SchemaJson::object();
  for (const auto& [key, value] : schema.items())
    if (key != "$ref" && key != "allOf" && key != "anyOf" && key != "oneOf" && is_constraint(key)) {
      if (is_unsupported_keyword(key) && !(key == "uniqueItems" && value == SchemaJson(false)))
        refuse_schema(at / key, "the keyword \"" + key + "\" is not supported in constrained output");
      base[key] = value;
    }
  std::vector<SchemaJson> result{std::move(base)};
  if (const auto found = schema.find("$ref"); found != schema.end()) {
    if (!found->is_string()) refuse_schema(at / "$ref", "a reference is a string");
    result = product(result, alternatives(resolve(*found, at), at / "$ref"), at);
  }
  for (const char* keyword : {"allOf", "anyOf", "oneOf"}) {
    const auto found = schema.find(keyword);
    if (found == schema.end()) continue;
    if (!found->is_array() || found->empty()) refuse_schema(at / keyword, "expected a list of schemas");
    std::vector<SchemaJson> any;
    for (size_t i = 0; i < found->size(); ++i) {
      std::vector<SchemaJson> one = alternatives((*found)[i], at / keyword / std::to_string(i));
      if (std::string_view(keyword) == "allOf")
        result = product(result, one, at);
      else
        any.insert(any.end(), std::make_move_iterator(one.begin()), std::make_move_iterator(one.end()));
    }
    if (std::string_view(keyword) != "allOf") result = product(result, any, at);
  }
  return result;
}

std::vector<SchemaJson> SchemaAlgebra::product(const std::vector<SchemaJson>& left,
                                               const std::vector<SchemaJson>& right, const SchemaPath& at) const {
  if (left.size() * right.size() > kMaxAlternatives)
    refuse_schema(at, "anyOf and allOf combine to more than " + std::to_string(kMaxAlternatives) + " alternatives");
  std::vector<SchemaJson> result;
  for (const SchemaJson& a : left)
    for (const SchemaJson& b : right)
      if (std::optional<SchemaJson> merged = both(a, b, at)) result.push_back(std::move(*merged));
  return result;
}

std::optional<SchemaJson> SchemaAlgebra::both(const SchemaJson& a, const SchemaJson& b, const SchemaPath& at) const {
  work_ += parts_of(a) + parts_of(b);
  if (work_ > kMaxWork) refuse_schema(at, "its references and combinations multiply to too large a schema");
  if (a.empty()) return b;
  if (b.empty()) return a;
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)})
    if (one->contains("patternProperties") &&
        (other->contains("properties") || other->contains("additionalProperties") ||
         other->contains("patternProperties")))
      refuse_schema(at / "patternProperties", "cannot be combined with another schema of an object");
  SchemaJson out = SchemaJson::object();
  if (a.contains("type") || b.contains("type")) {
    const std::vector<std::string> left = schema_types(a, at), right = schema_types(b, at);
    const auto allows = [](const std::vector<std::string>& types, const std::string& type) {
      return std::find(types.begin(), types.end(), type) != types.end() ||
             (type == "integer" && std::find(types.begin(), types.end(), "number") != types.end());
    };
    SchemaJson types = SchemaJson::array();
    for (const std::string_view type : kTypes)
      if (allows(left, std::string(type)) && allows(right, std::string(type))) types.push_back(type);
    if (types.empty()) return std::nullopt;
    out["type"] = std::move(types);
  }
  const std::optional<SchemaJson> left_values = values_of(a), right_values = values_of(b);
  if (left_values && right_values) {
    SchemaJson common = SchemaJson::array();
    for (const SchemaJson& value : *left_values)
      if (std::find(right_values->begin(), right_values->end(), value) != right_values->end()) common.push_back(value);
    if (common.empty()) return std::nullopt;
    out["enum"] = std::move(common);
  } else if (left_values || right_values) {
    out["enum"] = left_values ? *left_values : *right_values;
  }
  merge_objects(a, b, out);
  merge_arrays(a, b, out);

  const auto is_done = [](const std::string& key) {
    constexpr std::string_view kDone[] = {"type",     "enum",  "const",       "properties",     "additionalProperties",
                                          "required", "items", "prefixItems", "additionalItems"};
    return std::find(std::begin(kDone), std::end(kDone), key) != std::end(kDone);
  };
  for (const SchemaJson* side : {&a, &b})
    for (const auto& [key, value] : side->items()) {
      if (is_done(key)) continue;
      const auto existing = out.find(key);
      if (existing == out.end()) {
        out[key] = value;
        continue;
      }
      if (*existing == value) continue;
      const bool is_lower = key.rfind("min", 0) == 0 || key == "exclusiveMinimum";
      const bool is_upper = key.rfind("max", 0) == 0 || key == "exclusiveMaximum";
      if ((!is_lower && !is_upper) || !value.is_number() || !existing->is_number())
        refuse_schema(at, "two different values of \"" + key + "\" cannot be combined");
      if (is_lower ? *existing < value : value < *existing) *existing = value;
    }
  return out;
}

}  // namespace calla
