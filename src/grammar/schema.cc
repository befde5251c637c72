#include "grammar/schema.h"

#include "base/error.h"
#include "grammar/json_rules.h"
#include "grammar/schema_compiler.h"

namespace calla {
namespace {

// document := blanks value line-break?, the blanks being what may follow a think block
std::shared_ptr<const Grammar> finish_document(Grammar& grammar, JsonRules& rules, Grammar::NodeId value) {
  constexpr uint32_t kMaxLeadingBlanks = 4;
  const Grammar::NodeId start = grammar.add_node(), begin = grammar.add_node();
  const Grammar::NodeId end = grammar.add_accepting_node();
  grammar.add_repeat(start, rules.blank(), 0, kMaxLeadingBlanks, begin);
  grammar.add_call(begin, value, end);
  grammar.add_bytes(end, '\n', '\n', grammar.add_accepting_node());
  if (!grammar.finish(start)) throw RequestError("the schema cannot be satisfied by any value (of bounded depth)");
  return std::make_shared<const Grammar>(std::move(grammar));
}

}  // namespace

std::shared_ptr<const Grammar> json_object_grammar() {
  Grammar grammar;
  JsonRules rules(grammar);
  return finish_document(grammar, rules, rules.object());
}

std::shared_ptr<const Grammar> compile_schema(std::string_view schema_json, const std::string& field) {
  try {
    const SchemaJson schema = parse_schema(schema_json);
    Grammar grammar;
    JsonRules rules(grammar);
    SchemaCompiler compiler(schema, grammar, rules);
    const Grammar::NodeId value = grammar.add_node();
    compiler.value(schema, SchemaPath{}, value, grammar.add_accepting_node());
    return finish_document(grammar, rules, value);
  } catch (const RequestError& error) {
    throw RequestError(error.what(), field, error.code());
  } catch (const SchemaJson::exception& error) {  // a keyword's value has the wrong type
    throw RequestError(std::string("the schema is malformed: ") + error.what(), field);
  }
}

}  // namespace calla
