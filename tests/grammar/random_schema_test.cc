// Schemas made at random: what a compiled one generates satisfies it, by a validator of its own.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "base/error.h"
#include "grammar/schema.h"
#include "grammar/token_constraint.h"
#include "tests/grammar/generate.h"
#include "tests/grammar/schema_validator.h"

namespace calla {
namespace {

using nlohmann::json;

class SchemaMaker {
 public:
  explicit SchemaMaker(uint64_t seed) : random_(seed) {}

  json make() {
    json schema = value(3);
    if (!schema.is_object()) schema = json{{"anyOf", json::array({schema, {{"type", "null"}}})}};
    schema["$defs"] = {{"leaf", value(0)}, {"tree", value(2)}};
    return schema;
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  std::string name() { return std::vector<std::string>{"a", "ab", "b", "é", "x y"}[static_cast<size_t>(below(5))]; }

  json value(int depth) {
    json schema;
    switch (below(depth > 0 ? 11 : 6)) {
      case 0:
        schema = json{{"type", "boolean"}};
        break;
      case 1:
        schema = number();
        break;
      case 2:
        schema = string();
        break;
      case 3:
        schema = json{{"enum", json::array({below(9), "v", nullptr, name(), json::array({1, below(3)})})}};
        break;
      case 4:
        schema = json{{"const", json{{name(), below(5)}, {"k", json::array()}}}};
        break;
      case 5:
        return below(2) == 0 ? json(true) : json{{"type", json::array({"null", "string", "integer"})}};
      case 6:
        schema = array(depth);
        break;
      case 7:
        schema = object(depth);
        break;
      case 8:
        schema = json{{"$ref", below(2) == 0 ? "#/$defs/leaf" : "#/$defs/tree"}};
        break;
      case 9:
        schema = json{{"anyOf", json::array({value(depth - 1), value(depth - 1), value(depth - 1)})}};
        break;
      default:
        schema = json{{"allOf", json::array({object(depth - 1), object(depth - 1)})}};
        break;
    }
    if (below(6) == 0) schema["description"] = "of no effect";
    return schema;
  }
  json number() {
    json schema{{"type", below(2) == 0 ? "integer" : "number"}};
    const double low = below(400) / 4.0 - 50;
    if (below(2) == 0) schema[below(2) == 0 ? "minimum" : "exclusiveMinimum"] = low;
    if (below(2) == 0) schema[below(2) == 0 ? "maximum" : "exclusiveMaximum"] = low + 1 + below(2000);
    if (below(5) == 0) schema["multipleOf"] = 1 + below(6);
    return schema;
  }
  json string() {
    json schema{{"type", "string"}};
    if (below(3) == 0) schema["minLength"] = below(4);
    if (below(3) == 0) schema["maxLength"] = 4 + below(10);
    if (below(3) == 0) {
      const std::vector<std::string> patterns{"^[a-z]+$", "^(ab|cd){1,3}e?$", "[0-9]", "^\\w*-\\w*$", "^[^\"\\\\]{2}"};
      schema["pattern"] = patterns[static_cast<size_t>(below(5))];
    }
    return schema;
  }
  json array(int depth) {
    json schema{{"type", "array"}};
    if (below(3) > 0) schema["items"] = value(depth - 1);
    if (below(3) == 0) schema["prefixItems"] = json::array({value(depth - 1), value(depth - 1)});
    if (below(3) == 0) schema["minItems"] = below(4);
    if (below(3) == 0) schema["maxItems"] = 3 + below(3);
    return schema;
  }
  json object(int depth) {
    json schema{{"type", "object"}};
    if (below(4) > 0) {
      for (int i = below(4); i >= 0; --i) schema["properties"][name()] = value(depth - 1);
      for (const auto& [key, unused] : schema["properties"].items())
        if (below(2) == 0) schema["required"].push_back(key);
    }
    switch (below(3)) {
      case 0:
        schema["additionalProperties"] = false;
        break;
      case 1:
        schema["additionalProperties"] = value(depth - 1);
        break;
      default:
        break;
    }
    return schema;
  }

  std::mt19937_64 random_;
};

TEST(RandomSchemas, GenerateWhatSatisfiesThem) {
  const TestVocabulary vocabulary = made_up_vocabulary(1200, 3);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  std::mt19937_64 random(17);
  int compiled = 0;
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    const json schema = SchemaMaker(seed).make();
    std::shared_ptr<const Grammar> grammar;
    try {
      grammar = compile_schema(schema.dump());
    } catch (const RequestError&) {
      continue;  // contradictory, or two patterns to combine
    }
    ++compiled;
    for (int round = 0; round < 2; ++round) {
      GrammarConstraint constraint(trie, grammar, std::vector<TokenId>{vocabulary.stop});
      const std::string text = generate(constraint, vocabulary, static_cast<int>(random() % 40), random);
      json value;
      ASSERT_NO_THROW(value = json::parse(text)) << schema << "\n" << text;
      ASSERT_EQ(schema_violation(schema, schema, value), "") << schema << "\n" << text;
    }
  }
  EXPECT_GT(compiled, 1200);
}

}  // namespace
}  // namespace calla
