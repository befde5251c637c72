#pragma once
// SchemaAlgebra: rewrites a schema as alternatives that are free of $ref, allOf, anyOf and oneOf at their
// top, so that the compiler sees plain keywords only.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace calla {

using SchemaJson = nlohmann::ordered_json;

// Where in the schema we are, for messages and for limits.
struct SchemaPath {
  std::string pointer = "#";
  int depth = 0;
  SchemaPath operator/(const std::string& step) const { return {pointer + "/" + step, depth + 1}; }
};

[[noreturn]] void refuse_schema(const SchemaPath& at, const std::string& problem);

// Keywords that restrict the value, and that the compiler knows / refuses.
bool is_supported_keyword(const std::string& key);
bool is_unsupported_keyword(const std::string& key);

class SchemaAlgebra {
 public:
  explicit SchemaAlgebra(const SchemaJson& root) : root_(root) {}

  // The part of the document that `reference` ("#/$defs/name") names.
  const SchemaJson& resolve(const std::string& reference, const SchemaPath& at) const;

  // Whether only annotations stand beside `keyword`.
  static bool stands_alone(const SchemaJson& schema, const std::string& keyword);

  // The alternatives; none if the schema is unsatisfiable. A schema `true` is an empty object.
  std::vector<SchemaJson> alternatives(const SchemaJson& schema, const SchemaPath& at) const;

  // What satisfies both. Nothing if it is plain that no value does.
  std::optional<SchemaJson> both(const SchemaJson& a, const SchemaJson& b, const SchemaPath& at) const;

 private:
  std::vector<SchemaJson> product(const std::vector<SchemaJson>& left, const std::vector<SchemaJson>& right,
                                  const SchemaPath& at) const;

  const SchemaJson& root_;
  mutable size_t work_ = 0;  // parts of schemas that were copied; combining can multiply them
};

// The types that the schema's `type` allows; every type if it has none. "integer" and "number" are two types.
std::vector<std::string> schema_types(const SchemaJson& schema, const SchemaPath& at);

bool has_type(const SchemaJson& value, const std::string& type);

}  // namespace calla
