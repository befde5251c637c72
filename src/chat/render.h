#pragma once
// Messages to the prompt text of Qwen3.6's chat template, exactly, in C++.
//
// Where the template refuses what real clients send, Calla goes on instead (and stays inside the format):
//   - `developer` messages are system messages;
//   - a leading run of system messages becomes the one system turn, their texts joined by a blank line;
//   - a later system message becomes a system turn at its place, so that the prefix before it is unchanged.
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat/messages.h"

namespace calla {

// A piece of the prompt. Control tokens (<|im_start|>, <think>, ...) may be recognised only in trusted
// pieces, which the template wrote; text from messages and tools never turns into one. Pieces are cut for
// this reason alone: other than control tokens, tokens may span pieces.
struct PromptPiece {
  std::string text;
  bool trusted = false;
};

struct Prompt {
  std::vector<PromptPiece> pieces;
  // Where later prompts may diverge from this one, as numbers of pieces: after the system turn (which holds
  // the tools) and after each later turn, the generation prompt apart. A control token starts or ends at each
  // of them, so they are token positions too. A think block that the template drops from the history later
  // comes right after such a place, but for the turn's header.
  std::vector<size_t> boundaries;
  bool starts_in_thinking = false;  // the reply begins inside an open think block

  // Assistant turns that keep their think block: the pieces [begin, end) from the block to before the end of the turn,
  // with control tokens at both ends. The model may have written them itself (replay.h).
  struct Reply {
    size_t begin = 0, end = 0;  // pieces
    size_t message = 0;         // index into the messages
  };
  std::vector<Reply> replies;

  std::string text() const;
};

struct RenderOptions {
  bool enable_thinking = true;
  bool preserve_thinking = false;  // keep the reasoning of turns before the last user message
  bool add_generation_prompt = true;
};

// An assistant message's reasoning and content, stripped. Without `reasoning_content`, content that holds a closing
// think tag is divided there, as the template does.
struct AssistantText {
  std::string_view reasoning;
  std::string_view content;
};
AssistantText split_assistant_text(const Message& message);

// Throws RequestError when there is nothing to answer: no messages, or no user message among them.
Prompt render_prompt(std::span<const Message> messages, std::span<const ToolDefinition> tools,
                     const RenderOptions& options);

}  // namespace calla
