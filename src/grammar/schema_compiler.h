#pragma once
// SchemaCompiler: turns schemas into grammar nodes. Used for response formats and for the parameters of tool
// calls.
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"
#include "grammar/json_rules.h"
#include "grammar/schema_algebra.h"

namespace calla {

// Parses the text of a schema; RequestError if it is not JSON or nested deeper than any schema needs.
SchemaJson parse_schema(std::string_view text);

struct ObjectProperty {
  std::string name;
  SchemaJson schema;
  bool required = false;
  SchemaPath at;
};

// The properties of an object schema in their order; required ones that are not listed come last.
std::vector<ObjectProperty> object_properties(const SchemaJson& schema, const SchemaPath& at);

struct StringLimits {
  uint32_t min = 0, max = Grammar::kUnbounded;  // characters
  std::string pattern;                          // of `pattern` or `format`; empty: none
};

StringLimits string_limits(const SchemaJson& schema, const SchemaPath& at);

class SchemaCompiler {
 public:
  using NodeId = Grammar::NodeId;

  // All three must outlive the compiler.
  SchemaCompiler(const SchemaJson& root, Grammar& grammar, JsonRules& rules)
      : algebra_(root), grammar_(grammar), rules_(rules) {}

  // JSON text of every value that satisfies `schema` leads from `from` to `to`.
  void value(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);

  const SchemaAlgebra& algebra() const { return algebra_; }

 private:
  // `schema` is free of references and combinations.
  void plain_value(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);
  void listed_values(const SchemaJson& values, const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);
  void constant(const SchemaJson& value, NodeId from, NodeId to);
  void object(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);
  void map(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);
  void array(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);
  void string(const SchemaJson& schema, const SchemaPath& at, NodeId from, NodeId to);
  void number(const SchemaJson& schema, bool is_integer, const SchemaPath& at, NodeId from, NodeId to);
  NodeId reference(const std::string& target, const SchemaPath& at);
  NodeId rule(const SchemaJson& schema, const SchemaPath& at);  // a sub-automaton for `schema`, to be called

  SchemaAlgebra algebra_;
  Grammar& grammar_;
  JsonRules& rules_;
  std::map<std::string, NodeId> references_;
};

}  // namespace calla
