#pragma once
// A plain JSON Schema validator for the keywords that the compiler supports, written from the specification
// and sharing no code with it.
#include <nlohmann/json.hpp>
#include <string>

namespace calla {

// Empty if `value` satisfies `schema`, else why not.
std::string schema_violation(const nlohmann::json& schema, const nlohmann::json& root, const nlohmann::json& value);

}  // namespace calla
