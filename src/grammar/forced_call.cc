#include "grammar/forced_call.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "grammar/json_rules.h"
#include "grammar/raw_text.h"
#include "grammar/regex.h"
#include "grammar/schema_compiler.h"

namespace calla {
namespace {

using NodeId = Grammar::NodeId;

constexpr uint32_t kMaxCalls = 32;
constexpr std::string_view kParameterEnd = "\n</parameter>";

class CallBuilder {
 public:
  explicit CallBuilder(const TokenTrie& trie) : trie_(trie), rules_(grammar_), raw_text_(add_raw_text(grammar_)) {}

  std::shared_ptr<const Grammar> build(std::span<const CallableTool> tools, const ForcedCallOptions& options) {
    // blanks call ("\n" call)*
    constexpr uint32_t kMaxLeadingBlanks = 4;
    const NodeId start = grammar_.add_node(), begin = grammar_.add_node(), end = grammar_.add_accepting_node();
    grammar_.add_repeat(start, rules_.blank(), 0, kMaxLeadingBlanks, begin);
    const NodeId call = call_rule(tools);
    if (options.parallel) {
      const NodeId after = grammar_.add_node(), next = grammar_.add_node(), next_call = grammar_.add_node();
      grammar_.add_call(begin, call, after);
      grammar_.add_repeat(after, next, 0, kMaxCalls - 1, end);
      grammar_.add_literal(next, "\n", next_call);
      grammar_.add_call(next_call, call, grammar_.add_accepting_node());
    } else {
      grammar_.add_call(begin, call, end);
    }
    if (!grammar_.finish(start)) throw RequestError("the parameters of no tool can be satisfied by any value", "tools");
    return std::make_shared<const Grammar>(std::move(grammar_));
  }

 private:
  // A tag that is one token in the real vocabulary.
  void tag(NodeId from, std::string_view text, NodeId to) {
    const TokenId token = trie_.find_markup(text);
    if (token >= 0)
      grammar_.add_token(from, token, to);
    else
      grammar_.add_literal(from, text, to);
  }

  NodeId call_rule(std::span<const CallableTool> tools) {
    const NodeId start = grammar_.add_node(), opened = grammar_.add_node(), functions = grammar_.add_node(),
                 closing = grammar_.add_node();
    tag(start, "<tool_call>", opened);
    grammar_.add_literal(opened, "\n<function=", functions);
    for (size_t i = 0; i < tools.size(); ++i) {
      const std::string field = "tools[" + std::to_string(i) + "].function";
      const std::string& name = tools[i].name;
      if (name.empty() || name.find_first_of("<>\n\"") != std::string::npos)
        throw RequestError("the name of a function is empty or has one of < > \" in it", field + ".name");
      const NodeId named = grammar_.add_node();
      grammar_.add_literal(functions, name + ">\n", named);
      try {
        parameters(tools[i], named, closing);
      } catch (const RequestError& error) {
        throw RequestError("function \"" + name + "\": " + error.what(), field + ".parameters", error.code());
      } catch (const SchemaJson::exception& error) {  // a keyword's value has the wrong type
        throw RequestError("function \"" + name + "\": the schema is malformed: " + error.what(),
                           field + ".parameters");
      }
    }
    const NodeId tag_open = grammar_.add_node();
    grammar_.add_literal(closing, "</function>\n", tag_open);
    tag(tag_open, "</tool_call>", grammar_.add_accepting_node());
    return start;
  }

  void parameters(const CallableTool& tool, NodeId from, NodeId to) {
    if (tool.parameters.empty()) return grammar_.add_epsilon(from, to);
    const SchemaJson root = parse_schema(tool.parameters);
    if (root.is_null()) return grammar_.add_epsilon(from, to);
    SchemaCompiler compiler(root, grammar_, rules_);
    const SchemaPath at;
    for (const SchemaJson& schema : compiler.algebra().alternatives(root, at)) {
      const std::vector<std::string> types = schema_types(schema, at);
      if (std::find(types.begin(), types.end(), "object") == types.end())
        refuse_schema(at, "the parameters of a function must be an object");
      parameter_list(compiler, schema, tool.strict, from, to);
    }
  }

  void parameter_list(SchemaCompiler& compiler, const SchemaJson& schema, bool strict, NodeId from, NodeId to) {
    const SchemaPath at;
    if (strict)
      for (const char* key : {"patternProperties", "propertyNames", "minProperties", "maxProperties", "enum", "const"})
        if (schema.contains(key))
          refuse_schema(at / key, "the keyword \"" + std::string(key) + "\" is not supported for parameters");
    for (const ObjectProperty& property : object_properties(schema, at)) {
      const NodeId value = grammar_.add_node(), after = grammar_.add_node(), next = grammar_.add_node();
      if (property.name.empty() || property.name.find_first_of("<>\n\"") != std::string::npos)
        refuse_schema(property.at, "the name of a parameter is empty or has one of < > \" in it");
      grammar_.add_literal(from, "<parameter=" + property.name + ">\n", value);
      argument(compiler, property.schema, property.at, strict, value, after);
      grammar_.add_literal(after, "\n", next);
      if (!property.required) grammar_.add_epsilon(from, next);
      from = next;
    }
    grammar_.add_epsilon(from, to);
  }

  // The value of a parameter and the closing tag.
  void argument(SchemaCompiler& compiler, const SchemaJson& schema, const SchemaPath& at, bool strict, NodeId from,
                NodeId to) {
    try {
      for (const SchemaJson& one : compiler.algebra().alternatives(schema, at)) {
        const std::vector<std::string> types = schema_types(one, at);
        const bool allows_string = std::find(types.begin(), types.end(), "string") != types.end();
        if (allows_string && (one.contains("type") || one.empty() || says_string(one)))
          string_argument(one, at, strict, from, to);
        if (SchemaJson other = without_strings(one, types, at); !other.is_null()) {
          const NodeId close = grammar_.add_node();
          compiler.value(other, at, from, close);
          grammar_.add_literal(close, kParameterEnd, to);
        }
      }
    } catch (const RequestError&) {
      if (strict) throw;
      loose_argument(schema, from, to);
    }
  }

  static bool says_string(const SchemaJson& schema) {
    for (const char* key : {"enum", "const", "pattern", "minLength", "maxLength", "format"})
      if (schema.contains(key)) return true;
    return false;
  }

  // The schema's values that are not strings; null if there are none, or if raw text stands for them as well.
  static SchemaJson without_strings(const SchemaJson& schema, const std::vector<std::string>& types,
                                    const SchemaPath&) {
    if (schema.empty()) return nullptr;
    SchemaJson rest = schema;
    if (schema.contains("enum") || schema.contains("const")) {
      SchemaJson values = SchemaJson::array();
      for (const SchemaJson& value :
           schema.contains("enum") ? schema.at("enum") : SchemaJson::array({schema.at("const")}))
        if (!value.is_string()) values.push_back(value);
      if (values.empty()) return nullptr;
      rest.erase("const");
      rest["enum"] = std::move(values);
      return rest;
    }
    if (!schema.contains("type")) return says_string(schema) ? SchemaJson(nullptr) : rest;
    SchemaJson kept = SchemaJson::array();
    for (const std::string& type : types)
      if (type != "string") kept.push_back(type);
    if (kept.empty()) return nullptr;
    rest["type"] = std::move(kept);
    return rest;
  }

  void string_argument(const SchemaJson& schema, const SchemaPath& at, bool strict, NodeId from, NodeId to) {
    if (schema.contains("enum") || schema.contains("const")) {
      std::vector<std::string> literals;
      for (const SchemaJson& value :
           schema.contains("enum") ? schema.at("enum") : SchemaJson::array({schema.at("const")}))
        if (value.is_string()) {
          const auto& text = value.get_ref<const std::string&>();
          if (text.find("</parameter>") != std::string::npos) refuse_schema(at, "a value has </parameter> in it");
          literals.push_back(text + std::string(kParameterEnd));
        }
      return rules_.one_of(from, std::move(literals), to);
    }
    const StringLimits limits = string_limits(schema, at);
    if (!limits.pattern.empty()) {
      const NodeId close = grammar_.add_node();
      Pattern(limits.pattern).add_edges(grammar_, from, close, limits.min, limits.max, Pattern::Encoding::kRaw);
      return grammar_.add_literal(close, kParameterEnd, to);
    }
    if (!strict || (limits.min == 0 && limits.max == Grammar::kUnbounded))
      return grammar_.add_call(from, raw_text_, to);
    // Counted text has no line breaks, so that its end is never in doubt.
    const NodeId close = grammar_.add_node();
    Pattern("^[^<\\n\\r]*$").add_edges(grammar_, from, close, limits.min, limits.max, Pattern::Encoding::kRaw);
    grammar_.add_literal(close, kParameterEnd, to);
  }

  // What cannot be enforced keeps its type at least.
  void loose_argument(const SchemaJson& schema, NodeId from, NodeId to) {
    std::vector<std::string> types;
    try {
      types = schema.is_object() ? schema_types(schema, {}) : std::vector<std::string>{"string"};
    } catch (const RequestError&) {
      types = {"string"};
    }
    if (std::find(types.begin(), types.end(), "string") != types.end()) return grammar_.add_call(from, raw_text_, to);
    const NodeId close = grammar_.add_node();
    for (const std::string& type : types) {
      if (type == "object") grammar_.add_call(from, rules_.object(), close);
      if (type == "array") grammar_.add_call(from, rules_.array(), close);
      if (type == "number") grammar_.add_call(from, rules_.number(), close);
      if (type == "integer") grammar_.add_call(from, rules_.integer(), close);
      if (type == "boolean") rules_.one_of(from, {"true", "false"}, close);
      if (type == "null") rules_.one_of(from, {"null"}, close);
    }
    grammar_.add_literal(close, kParameterEnd, to);
  }

  const TokenTrie& trie_;
  Grammar grammar_;
  JsonRules rules_;
  NodeId raw_text_;
};

}  // namespace

std::shared_ptr<const Grammar> forced_call_grammar(std::span<const CallableTool> tools, const TokenTrie& trie,
                                                   const ForcedCallOptions& options) {
  if (tools.empty()) throw RequestError("a tool call is required but there are no tools", "tool_choice");
  return CallBuilder(trie).build(tools, options);
}

}  // namespace calla
