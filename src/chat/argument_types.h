#pragma once
// The XML form of a tool call carries no types; they come from the tool's JSON schema.
#include <optional>
#include <string>
#include <string_view>

#include "chat/json.h"

namespace calla {

// A set of JSON types. Empty: the schema does not say.
class ArgumentTypes {
 public:
  enum Type : unsigned {
    kString = 1,
    kInteger = 2,
    kNumber = 4,
    kBoolean = 8,
    kObject = 16,
    kArray = 32,
    kNull = 64,
  };
  constexpr ArgumentTypes() = default;
  constexpr ArgumentTypes(Type type) : bits_(type) {}  // NOLINT: a type is a set of one
  constexpr void add(ArgumentTypes other) { bits_ |= other.bits_; }
  constexpr bool has(Type type) const { return (bits_ & type) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool operator==(const ArgumentTypes&) const = default;

 private:
  unsigned bits_ = 0;
};

// The types that the schema of parameter `name` allows. `parameters` is the schema of the tool's whole
// arguments.
ArgumentTypes argument_types(const Json& parameters, std::string_view name);

// The JSON text of an argument that the model wrote as `raw`; nothing if the parameter counts as absent
// (blank, and no string). What does not fit the types is passed on as a string, for the tool to refuse.
std::optional<std::string> argument_json(std::string_view raw, ArgumentTypes types);

}  // namespace calla
