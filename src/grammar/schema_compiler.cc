#include "grammar/schema_compiler.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "base/error.h"
#include "grammar/number_range.h"
#include "grammar/regex.h"

namespace calla {

using NodeId = Grammar::NodeId;

namespace {

constexpr int kMaxJsonDepth = 128;
constexpr size_t kMaxBoundDigits = 40;

// The formats that are enforced, as patterns; empty for others. February has 28 days here, so that every date
// exists in every year.
std::string format_pattern(const std::string& format) {
  const std::string date =
      "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-"
      "9]|2[0-8]))";
  const std::string time =
      "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
  const std::string octet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
  if (format == "date") return "^" + date + "$";
  if (format == "time") return "^" + time + "$";
  if (format == "date-time") return "^" + date + "T" + time + "$";
  if (format == "uuid") return "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$";
  if (format == "email") {
    const std::string label = "[A-Za-z0-9]+(-[A-Za-z0-9]+)*";
    return "^[A-Za-z0-9_%+-]+(\\.[A-Za-z0-9_%+-]+)*@(" + label + "\\.)+[A-Za-z]{2,}$";
  }
  if (format == "ipv4") return "^(" + octet + "\\.){3}" + octet + "$";
  return "";
}

Decimal decimal_of(const SchemaJson& number, const SchemaPath& at) {
  std::string text;
  if (number.is_number_float()) {
    char buffer[512];
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, number.get<double>(), std::chars_format::fixed);
    text.assign(buffer, end.ptr);
  } else if (number.is_number()) {
    text = number.dump();
  } else {
    refuse_schema(at, "expected a number, not " + number.dump().substr(0, 40));
  }
  Decimal result;
  if (text[0] == '-') {
    result.negative = true;
    text.erase(0, 1);
  }
  const size_t point = text.find('.');
  result.whole = text.substr(0, point);
  if (point != std::string::npos) result.fraction = text.substr(point + 1);
  while (!result.fraction.empty() && result.fraction.back() == '0') result.fraction.pop_back();
  if (result.whole == "0" && result.fraction.empty()) result.negative = false;
  if (result.whole.size() > kMaxBoundDigits || result.fraction.size() > kMaxBoundDigits)
    refuse_schema(at, "a bound of more than " + std::to_string(kMaxBoundDigits) + " digits is not supported");
  return result;
}

// JSON text of a scalar as the model is to write it.
std::string literal_of(const SchemaJson& value) { return value.dump(); }

bool is_scalar(const SchemaJson& value) { return !value.is_object() && !value.is_array(); }

bool any_key(const SchemaJson& schema, std::initializer_list<const char*> keys) {
  return std::any_of(keys.begin(), keys.end(), [&](const char* key) { return schema.contains(key); });
}

struct Bounds {
  uint32_t min = 0, max = Grammar::kUnbounded;
};

Bounds bounds(const SchemaJson& schema, const char* min_key, const char* max_key, const SchemaPath& at) {
  const auto read = [&](const char* key, uint32_t fallback) {
    const auto found = schema.find(key);
    if (found == schema.end()) return fallback;
    const bool is_count = found->is_number() && found->get<double>() >= 0 && found->get<double>() <= 1e9 &&
                          std::trunc(found->get<double>()) == found->get<double>();
    if (!is_count) refuse_schema(at / key, "expected a whole number from 0 to 1e9, not " + found->dump().substr(0, 40));
    return static_cast<uint32_t>(found->get<double>());
  };
  return {read(min_key, 0), read(max_key, Grammar::kUnbounded)};
}

}  // namespace

SchemaJson parse_schema(std::string_view text) {
  const SchemaJson::parser_callback_t limit_depth = [](int depth, SchemaJson::parse_event_t, SchemaJson&) {
    if (depth > kMaxJsonDepth) throw RequestError("the schema is nested deeper than " + std::to_string(kMaxJsonDepth));
    return true;
  };
  try {
    return SchemaJson::parse(text, limit_depth);
  } catch (const SchemaJson::exception& error) {
    throw RequestError(std::string("the schema is not valid JSON: ") + error.what());
  }
}

std::vector<ObjectProperty> object_properties(const SchemaJson& schema, const SchemaPath& at) {
  const SchemaJson properties = schema.contains("properties") ? schema.at("properties") : SchemaJson::object();
  if (!properties.is_object()) refuse_schema(at / "properties", "expected an object");
  const SchemaJson names = schema.contains("required") ? schema.at("required") : SchemaJson::array();
  if (!names.is_array()) refuse_schema(at / "required", "expected a list of names");
  std::unordered_set<std::string> required;
  for (const SchemaJson& name : names) {
    if (!name.is_string()) refuse_schema(at / "required", "expected a list of names");
    required.insert(name.get<std::string>());
  }
  std::vector<ObjectProperty> all;
  for (const auto& [name, one] : properties.items())
    all.push_back({name, one, required.erase(name) > 0, at / "properties" / name});
  const SchemaJson unlisted =
      schema.contains("additionalProperties") ? schema.at("additionalProperties") : SchemaJson(true);
  for (const SchemaJson& name : names)
    if (required.erase(name.get<std::string>()) > 0)
      all.push_back({name.get<std::string>(), unlisted, true, at / "additionalProperties"});
  return all;
}

StringLimits string_limits(const SchemaJson& schema, const SchemaPath& at) {
  const Bounds length = bounds(schema, "minLength", "maxLength", at);
  StringLimits limits{length.min, length.max, {}};
  if (const auto found = schema.find("pattern"); found != schema.end()) {
    if (!found->is_string()) refuse_schema(at / "pattern", "expected a string");
    limits.pattern = found->get<std::string>();
  }
  if (const auto found = schema.find("format"); found != schema.end()) {
    if (!found->is_string()) refuse_schema(at / "format", "expected a string");
    // Other formats are annotations, as JSON Schema has it by default.
    std::string enforced = format_pattern(found->get<std::string>());
    if (!enforced.empty() && !limits.pattern.empty())
      refuse_schema(at / "format", "the keyword \"format\" beside pattern is not supported");
    if (!enforced.empty()) limits.pattern = std::move(enforced);
  }
  return limits;
}

void SchemaCompiler::value(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to) {
  if (schema.is_object()) {
    // The common shapes keep their structure: a reference becomes a call (it may be recursive), a choice a
    // branch.
    if (schema.contains("$ref") && SchemaAlgebra::stands_alone(schema, "$ref")) {
      if (!schema.at("$ref").is_string()) refuse_schema(at / "$ref", "a reference is a string");
      return grammar_.add_call(from, reference(schema.at("$ref"), at), to);
    }
    for (const char* keyword : {"anyOf", "oneOf"})
      if (schema.contains(keyword) && schema.at(keyword).is_array() && !schema.at(keyword).empty() &&
          SchemaAlgebra::stands_alone(schema, keyword)) {
        size_t index = 0;
        for (const SchemaJson& one : schema.at(keyword)) value(one, at / keyword / std::to_string(index++), from, to);
        return;
      }
  }
  for (const SchemaJson& alternative : algebra_.alternatives(schema, at)) plain_value(alternative, at, from, to);
}

NodeId SchemaCompiler::reference(const std::string& target, const SchemaPath& at) {
  const auto [found, is_new] = references_.try_emplace(target, Grammar::kNone);
  if (!is_new) return found->second;
  const NodeId start = grammar_.add_node();
  found->second = start;  // before compiling, so that the schema can refer to itself
  const SchemaJson& schema = algebra_.resolve(target, at);
  value(schema, {target, 0}, start, grammar_.add_accepting_node());
  return start;
}

NodeId SchemaCompiler::rule(const SchemaJson& schema, const SchemaPath& at) {
  const NodeId start = grammar_.add_node();
  value(schema, at, start, grammar_.add_accepting_node());
  return start;
}

void SchemaCompiler::plain_value(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to) {
  if (schema.contains("enum") || schema.contains("const")) {
    if (schema.contains("enum") && !schema.at("enum").is_array())
      refuse_schema(at / "enum", "expected a list of values");
    SchemaJson values = schema.contains("enum") ? schema.at("enum") : SchemaJson::array({schema.at("const")});
    if (schema.contains("enum") && schema.contains("const")) {
      const SchemaJson& only = schema.at("const");
      const bool listed = std::find(values.begin(), values.end(), only) != values.end();
      values = listed ? SchemaJson::array({only}) : SchemaJson::array();
    }
    return listed_values(values, schema, at, from, to);
  }
  std::vector<std::string> types = schema_types(schema, at);
  if (!schema.contains("type")) {
    // Keywords of a type, without the type, mean the type.
    std::vector<std::string> meant;
    if (any_key(schema, {"properties", "required", "additionalProperties", "patternProperties", "propertyNames",
                         "minProperties", "maxProperties"}))
      meant.push_back("object");
    if (any_key(schema, {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"}))
      meant.push_back("array");
    if (any_key(schema, {"minLength", "maxLength", "pattern", "format"})) meant.push_back("string");
    if (any_key(schema, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}))
      meant.push_back("number");
    if (meant.empty()) return grammar_.add_call(from, rules_.value(), to);
    types = std::move(meant);
  }
  const auto allows = [&](const char* type) { return std::find(types.begin(), types.end(), type) != types.end(); };
  if (allows("object")) object(schema, at, from, to);
  if (allows("array")) array(schema, at, from, to);
  if (allows("string")) string(schema, at, from, to);
  if (allows("number") || allows("integer")) number(schema, !allows("number"), at, from, to);
  std::vector<std::string> words;
  if (allows("boolean")) words.insert(words.end(), {"true", "false"});
  if (allows("null")) words.push_back("null");
  rules_.one_of(from, std::move(words), to);
}

void SchemaCompiler::listed_values(const SchemaJson& values, const SchemaJson& schema, const SchemaPath& at,
                                   NodeId from, NodeId to) {
  for (const auto& [key, unused] : schema.items())
    if (key != "enum" && key != "const" && key != "type")
      refuse_schema(at / key, "the keyword \"" + key + "\" beside enum or const is not supported");
  const std::vector<std::string> types = schema_types(schema, at);
  std::vector<std::string> literals;
  for (const SchemaJson& value : values) {
    if (std::none_of(types.begin(), types.end(), [&](const std::string& type) { return has_type(value, type); }))
      continue;
    if (is_scalar(value))
      literals.push_back(literal_of(value));
    else
      constant(value, from, to);
  }
  rules_.one_of(from, std::move(literals), to);
}

void SchemaCompiler::constant(const SchemaJson& value, NodeId from, NodeId to) {
  if (is_scalar(value)) return grammar_.add_literal(from, literal_of(value), to);
  const bool is_object = value.is_object();
  const NodeId opened = grammar_.add_node();
  NodeId at = grammar_.add_node();
  grammar_.add_literal(from, is_object ? "{" : "[", opened);
  grammar_.add_call(opened, rules_.space(), at);
  bool first = true;
  for (const auto& [key, member] : value.items()) {
    if (!first) {
      const NodeId comma = grammar_.add_node(), next = grammar_.add_node();
      grammar_.add_literal(at, ",", comma);
      grammar_.add_call(comma, rules_.space(), next);
      at = next;
    }
    first = false;
    if (is_object) {
      const NodeId colon = grammar_.add_node(), next = grammar_.add_node();
      grammar_.add_literal(at, literal_of(key) + ":", colon);
      grammar_.add_call(colon, rules_.space(), next);
      at = next;
    }
    const NodeId after = grammar_.add_node();
    constant(member, at, after);
    at = after;
  }
  if (!first) {
    const NodeId closing = grammar_.add_node();
    grammar_.add_call(at, rules_.space(), closing);
    at = closing;
  }
  grammar_.add_literal(at, is_object ? "}" : "]", to);
}

void SchemaCompiler::object(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to) {
  const SchemaJson additional =
      schema.contains("additionalProperties") ? schema.at("additionalProperties") : SchemaJson(true);
  const bool is_closed = additional == SchemaJson(false);
  const std::vector<ObjectProperty> all = object_properties(schema, at);
  const auto n_required =
      static_cast<uint32_t>(std::count_if(all.begin(), all.end(), [](const auto& p) { return p.required; }));
  const Bounds count = bounds(schema, "minProperties", "maxProperties", at);
  if (all.empty() && (!is_closed || schema.contains("patternProperties"))) return map(schema, at, from, to);
  for (const char* key : {"patternProperties", "propertyNames"})
    if (schema.contains(key))
      refuse_schema(at / key,
                    "the keyword \"" + std::string(key) + "\" beside properties or required is not supported");
  if (count.min > n_required)
    refuse_schema(at / "minProperties", "the keyword \"minProperties\" beside properties is not supported");
  if (count.max < all.size() || (count.max != Grammar::kUnbounded && !is_closed))
    refuse_schema(at / "maxProperties", "the keyword \"maxProperties\" beside properties is not supported");

  // For each property two places: nothing was written yet (no comma needed), or something was.
  const NodeId opened = grammar_.add_node();
  NodeId first = grammar_.add_node(), later = grammar_.add_node();
  grammar_.add_literal(from, "{", opened);
  grammar_.add_call(opened, rules_.space(), first);
  for (const ObjectProperty& property : all) {
    const NodeId key = grammar_.add_node(), comma = grammar_.add_node(), colon = grammar_.add_node(),
                 before = grammar_.add_node(), next_first = grammar_.add_node(), next_later = grammar_.add_node();
    grammar_.add_epsilon(first, key);
    grammar_.add_literal(later, ",", comma);
    grammar_.add_call(comma, rules_.space(), key);
    grammar_.add_literal(key, literal_of(property.name) + ":", colon);
    grammar_.add_call(colon, rules_.space(), before);
    value(property.schema, property.at, before, next_later);
    if (!property.required) {
      grammar_.add_epsilon(first, next_first);
      grammar_.add_epsilon(later, next_later);
    }
    first = next_first;
    later = next_later;
  }
  if (!is_closed) {
    const NodeId key = grammar_.add_node(), comma = grammar_.add_node(), colon = grammar_.add_node(),
                 after_key = grammar_.add_node(), before = grammar_.add_node();
    grammar_.add_epsilon(first, key);
    grammar_.add_literal(later, ",", comma);
    grammar_.add_call(comma, rules_.space(), key);
    std::vector<std::string> taken;
    for (const ObjectProperty& property : all) taken.push_back(property.name);
    rules_.other_key(key, taken, after_key);
    grammar_.add_literal(after_key, ":", colon);
    grammar_.add_call(colon, rules_.space(), before);
    value(additional, at / "additionalProperties", before, later);
  }
  const NodeId closing = grammar_.add_node();
  grammar_.add_literal(first, "}", to);
  grammar_.add_call(later, rules_.space(), closing);
  grammar_.add_literal(closing, "}", to);
}

void SchemaCompiler::map(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to) {
  const Bounds count = bounds(schema, "minProperties", "maxProperties", at);
  if (count.min > 1) refuse_schema(at / "minProperties", "above 1 it is not supported, since a key could be repeated");
  // member := key ":" value
  const NodeId member = grammar_.add_node(), after_key = grammar_.add_node(), colon = grammar_.add_node(),
               before = grammar_.add_node();
  const NodeId member_end = grammar_.add_accepting_node();
  SchemaJson member_schema =
      schema.contains("additionalProperties") ? schema.at("additionalProperties") : SchemaJson(true);
  SchemaPath member_at = at / "additionalProperties";
  if (const auto patterns = schema.find("patternProperties"); patterns != schema.end()) {
    if (!patterns->is_object() || patterns->size() != 1)
      refuse_schema(at / "patternProperties", "expected an object with exactly one pattern; more are not supported");
    if (schema.contains("propertyNames"))
      refuse_schema(at / "propertyNames", "the keyword \"propertyNames\" beside patternProperties is not supported");
    const std::string pattern = patterns->begin().key();
    const NodeId open = grammar_.add_node(), close = grammar_.add_node();
    grammar_.add_literal(member, "\"", open);
    Pattern(pattern).add_edges(grammar_, open, close, 0, Grammar::kUnbounded, Pattern::Encoding::kJson);
    grammar_.add_literal(close, "\"", after_key);
    member_schema = SchemaJson(patterns->begin().value());
    member_at = at / "patternProperties" / pattern;
  } else if (const auto names = schema.find("propertyNames"); names != schema.end()) {
    value({{"allOf", SchemaJson::array({{{"type", "string"}}, *names})}}, at / "propertyNames", member, after_key);
  } else {
    rules_.string(member, 0, Grammar::kUnbounded, after_key);
  }
  grammar_.add_literal(after_key, ":", colon);
  grammar_.add_call(colon, rules_.space(), before);
  value(member_schema, member_at, before, member_end);
  // "{" blank ( member ( "," blank member )* blank )? "}"
  const NodeId opened = grammar_.add_node(), inside = grammar_.add_node(), after_first = grammar_.add_node(),
               after_all = grammar_.add_node(), closing = grammar_.add_node();
  grammar_.add_literal(from, "{", opened);
  grammar_.add_call(opened, rules_.space(), inside);
  if (count.min == 0) grammar_.add_literal(inside, "}", to);
  if (count.max == 0) return;
  grammar_.add_call(inside, member, after_first);
  const NodeId next = grammar_.add_node(), next_member = grammar_.add_node();
  grammar_.add_literal(next, ",", next_member);
  const NodeId before_member = grammar_.add_node();
  grammar_.add_call(next_member, rules_.space(), before_member);
  grammar_.add_call(before_member, member, grammar_.add_accepting_node());
  grammar_.add_repeat(after_first, next, 0, count.max == Grammar::kUnbounded ? count.max : count.max - 1, after_all);
  grammar_.add_call(after_all, rules_.space(), closing);
  grammar_.add_literal(closing, "}", to);
}

void SchemaCompiler::array(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to) {
  if (schema.contains("uniqueItems") && schema.at("uniqueItems") != SchemaJson(false))
    refuse_schema(at / "uniqueItems", "the keyword \"uniqueItems\" is not supported in constrained output");
  const Bounds count = bounds(schema, "minItems", "maxItems", at);
  // The older spelling has the tuple under "items" and the rest under "additionalItems".
  const SchemaJson items = schema.contains("items") ? schema.at("items") : SchemaJson(true);
  const SchemaJson prefix = schema.contains("prefixItems") ? schema.at("prefixItems")
                            : items.is_array()             ? items
                                                           : SchemaJson::array();
  if (!prefix.is_array()) refuse_schema(at / "prefixItems", "expected a list of schemas");
  const SchemaJson rest = !items.is_array()                    ? items
                          : schema.contains("prefixItems")     ? SchemaJson(true)
                          : schema.contains("additionalItems") ? schema.at("additionalItems")
                                                               : SchemaJson(true);
  const auto n_prefix = static_cast<uint32_t>(prefix.size());
  const NodeId opened = grammar_.add_node();
  NodeId here = grammar_.add_node();  // after `i` items, before a comma or the end
  const NodeId closing = grammar_.add_node(), close = grammar_.add_node();
  grammar_.add_literal(from, "[", opened);
  grammar_.add_call(opened, rules_.space(), here);
  if (count.min == 0) grammar_.add_literal(here, "]", to);
  grammar_.add_call(closing, rules_.space(), close);
  grammar_.add_literal(close, "]", to);

  uint32_t i = 0;
  for (; i < n_prefix && i < count.max; ++i) {
    NodeId item = here;
    if (i > 0) {
      const NodeId comma = grammar_.add_node();
      item = grammar_.add_node();
      grammar_.add_literal(here, ",", comma);
      grammar_.add_call(comma, rules_.space(), item);
    }
    const NodeId after = grammar_.add_node();
    value(prefix[i], at / "prefixItems" / std::to_string(i), item, after);
    here = after;
    if (i + 1 >= count.min) grammar_.add_epsilon(here, closing);
  }
  if (i >= count.max || rest == SchemaJson(false)) return;
  const NodeId item = rule(rest, at / "items");
  if (i == 0) {
    const NodeId after = grammar_.add_node();
    grammar_.add_call(here, item, after);
    here = after;
    ++i;
  }
  const NodeId next = grammar_.add_node(), comma = grammar_.add_node(), before = grammar_.add_node();
  grammar_.add_literal(next, ",", comma);
  grammar_.add_call(comma, rules_.space(), before);
  grammar_.add_call(before, item, grammar_.add_accepting_node());
  grammar_.add_repeat(here, next, count.min > i ? count.min - i : 0,
                      count.max == Grammar::kUnbounded ? count.max : count.max - i, closing);
}

void SchemaCompiler::string(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to) {
  const StringLimits limits = string_limits(schema, at);
  if (limits.pattern.empty()) return rules_.string(from, limits.min, limits.max, to);
  const NodeId open = grammar_.add_node(), close = grammar_.add_node();
  grammar_.add_literal(from, "\"", open);
  try {
    Pattern(limits.pattern).add_edges(grammar_, open, close, limits.min, limits.max, Pattern::Encoding::kJson);
  } catch (const RequestError& error) {
    refuse_schema(at / "pattern", error.what());
  }
  grammar_.add_literal(close, "\"", to);
}

void SchemaCompiler::number(const SchemaJson& schema, bool is_integer, const SchemaPath& at, NodeId from, NodeId to) {
  NumberRange range{.low = {}, .high = {}, .is_integer = is_integer};
  const auto tighten = [&](std::optional<NumberBound>& bound, const char* key, bool exclusive, bool is_low) {
    const auto found = schema.find(key);
    if (found == schema.end()) return;
    const NumberBound candidate{decimal_of(*found, at / key), exclusive};
    const double old_value = bound ? schema.at(is_low ? "minimum" : "maximum").get<double>() : 0;
    const double new_value = found->get<double>();
    if (!bound || (is_low ? new_value >= old_value : new_value <= old_value)) bound = candidate;
  };
  tighten(range.low, "minimum", false, true);
  tighten(range.low, "exclusiveMinimum", true, true);
  tighten(range.high, "maximum", false, false);
  tighten(range.high, "exclusiveMaximum", true, false);
  if (const auto found = schema.find("multipleOf"); found != schema.end()) {
    const Decimal step = decimal_of(*found, at / "multipleOf");
    if (!step.fraction.empty() || step.negative || step.is_zero() || step.whole.size() > 4)
      refuse_schema(at / "multipleOf", "only whole numbers from 1 to 9999 are supported");
    range.multiple_of = static_cast<uint32_t>(std::stoul(step.whole));
    range.is_integer = true;
  }
  if (!range.low && !range.high && range.multiple_of == 1)
    return grammar_.add_call(from, range.is_integer ? rules_.integer() : rules_.number(), to);
  range.add_edges(grammar_, from, to);
}

}  // namespace calla
