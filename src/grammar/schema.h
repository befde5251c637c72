#pragma once
// JSON schema -> Grammar, for response_format json_object and json_schema.
//
// Enforced: type (one or a list), properties, required, additionalProperties, minProperties/maxProperties
// (maps only), patternProperties (one pattern, maps only), propertyNames (maps only), items, prefixItems, minItems/maxItems, enum,
// const, anyOf, oneOf, allOf, $ref into the same document (recursive too), minLength/maxLength, pattern,
// format (date, time, date-time, uuid, ipv4, email), minimum/maximum and their exclusive forms, for integers also
// multipleOf. Any other keyword that would restrict the value is refused, with its place. Annotations (title,
// description, default, ...) are ignored.
//
// What is generated always satisfies the schema, but not every text that satisfies it can be generated:
// properties come in the schema's order, blank space and digits are limited (json_rules.h), strings under a
// pattern are written without needless escapes, and keywords without a type mean that type. oneOf is treated
// as anyOf.
#include <memory>
#include <string>
#include <string_view>

#include "grammar/grammar.h"

namespace calla {

// A grammar of any JSON object. `field` is the request's parameter to blame, such as "response_format".
std::shared_ptr<const Grammar> json_object_grammar();

// Throws RequestError naming the place in the schema and the keyword, if the schema is not valid JSON, uses
// an unsupported keyword, is too large, or cannot be satisfied.
std::shared_ptr<const Grammar> compile_schema(std::string_view schema_json,
                                              const std::string& field = "response_format");

}  // namespace calla
