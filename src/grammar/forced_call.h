#pragma once
// A grammar that makes the model call tools, for tool_choice "required" or a named function:
//   <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n...</function>\n</tool_call>
// with a known NAME, declared parameters in the schema's order, all required ones among them. A VALUE whose
// schema allows a string is text as it is (raw_text.h), any other is JSON that satisfies the schema.
//
// Parameters that are not declared are never written, even where additionalProperties would allow them.
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "grammar/grammar.h"
#include "grammar/token_trie.h"

namespace calla {

struct CallableTool {
  std::string name;
  std::string parameters;  // JSON schema of the arguments; empty: none are taken
  // Refuse a schema that cannot be enforced. Otherwise such a parameter only gets a value of its JSON type,
  // and the length limits of strings are not enforced.
  bool strict = false;
};

struct ForcedCallOptions {
  bool parallel = true;  // more calls may follow the first (at most 32 in all)
};

// `trie` says which tokens <tool_call> and </tool_call> are; without such tokens they are spelled out. Throws
// RequestError: no tools, a name or schema that cannot be used.
std::shared_ptr<const Grammar> forced_call_grammar(std::span<const CallableTool> tools, const TokenTrie& trie,
                                                   const ForcedCallOptions& options = {});

}  // namespace calla
