#include "chat/replay.h"

#include <utility>

#include "chat/render.h"

namespace calla {
namespace {

// With the keys of objects sorted: clients reorder them.
nlohmann::json sorted(const Json& value) {
  if (is_big_integer(value)) return compact_json(value);
  if (value.is_object()) {
    nlohmann::json result = nlohmann::json::object();
    for (const auto& [name, member] : value.items()) result[name] = sorted(member);
    return result;
  }
  if (value.is_array()) {
    nlohmann::json result = nlohmann::json::array();
    for (const Json& element : value) result.push_back(sorted(element));
    return result;
  }
  return value;
}

std::string key_of(const Message& message) {
  const auto [reasoning, content] = split_assistant_text(message);
  nlohmann::json parts = {reasoning, content};
  for (const ToolCall& call : message.tool_calls) parts.push_back({call.name, sorted(call.arguments)});
  return parts.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void ReplayStore::add(const Message& reply, std::vector<TokenId> body) {
  std::string key = key_of(reply);
  const std::lock_guard lock(mutex_);
  if (const auto known = by_key_.find(key); known != by_key_.end()) {
    n_tokens_ -= known->second->body.size();
    entries_.erase(known->second);
    by_key_.erase(known);
  }
  n_tokens_ += body.size();
  entries_.push_front({key, std::move(body)});
  by_key_.emplace(std::move(key), entries_.begin());
  while (n_tokens_ > max_tokens_) {
    n_tokens_ -= entries_.back().body.size();
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
}

std::vector<TokenId> ReplayStore::find(const Message& message) {
  const std::string key = key_of(message);
  const std::lock_guard lock(mutex_);
  const auto known = by_key_.find(key);
  if (known == by_key_.end()) return {};
  entries_.splice(entries_.begin(), entries_, known->second);
  return known->second->body;
}

}  // namespace calla
