#pragma once
// ReplayStore: the tokens of the model's own replies, for when a client sends them back as history.
//
// A reply that comes back is rendered from what the parser made of it, and may then differ in a blank, in the order or
// the spelling of a call's arguments, or in how the text is cut into tokens. Each such difference would end the prefix
// that the cache knows. So an equivalent message is given the tokens that the model wrote.
#include <cstddef>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "chat/messages.h"
#include "model/shape.h"

namespace calla {

class ReplayStore {
 public:
  // Keeps about so many tokens; the replies that were least recently used go first.
  explicit ReplayStore(size_t max_tokens = size_t{1} << 20) : max_tokens_(max_tokens) {}

  // `reply` as the client got it; `body` is its turn from the think block on, without the end of the turn.
  void add(const Message& reply, std::vector<TokenId> body);
  // The body for an equivalent message (reasoning, content and calls, ids apart); empty if there is none.
  std::vector<TokenId> find(const Message& message);

 private:
  struct Entry {
    std::string key;
    std::vector<TokenId> body;
  };

  const size_t max_tokens_;
  std::mutex mutex_;
  size_t n_tokens_ = 0;
  std::list<Entry> entries_;  // the most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
};

}  // namespace calla
