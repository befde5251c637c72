#pragma once
// What the next turn of a chat will begin with. The template drops the reasoning of an answered question from the
// history, so the state at the end of a reply is of no use to the next turn: the answer has to be read again without it.
// That is done ahead, while the user reads (Scheduler::prepare).
#include <vector>

#include "server/chat_request.h"
#include "server/reply_run.h"
#include "server/service.h"

namespace calla {

// The tokens up to where the user's next message begins. Empty if that cannot be told or is known to be in the cache:
// after a tool call or an empty or failed reply, or when the request does not use the cache.
std::vector<TokenId> next_turn_prefix(const ServedModel& model, const ChatRequest& request,
                                      const CollectedReply& reply);

}  // namespace calla
