#pragma once
// Constrained decoding for a request: response_format and tool_choice, by the grammars of grammar/.
#include <functional>
#include <memory>

#include "grammar/token_trie.h"
#include "server/chat_request.h"
#include "server/service.h"

namespace calla {

// The tree of all tokens that may be generated as text. Costs a good part of a second for a large vocabulary, once.
std::shared_ptr<const TokenTrie> make_token_trie(const Tokenizer& tokenizer);

// Makes one reply's constraint; empty if the request asks for none. Throws RequestError naming what cannot be enforced.
std::function<std::shared_ptr<TokenConstraint>()> constraint_maker(const ServedModel& model,
                                                                   const ChatRequest& request);

}  // namespace calla
