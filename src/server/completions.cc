#include "server/completions.h"

#include <utility>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace calla::openai {
namespace {

constexpr size_t kMaxPrompts = 64;

bool is_token_list(const Json& value) { return value.is_array() && !value.empty() && value.front().is_number(); }

std::vector<TokenId> read_tokens(const Json& list, const ServedModel& model) {
  std::vector<TokenId> tokens;
  for (const Json& item : list) {
    if (!item.is_number_integer() || item.get<int64_t>() < 0 || item.get<int64_t>() >= model.vocabulary) {
      throw RequestError("prompt holds " + compact_json(item) + ", which is no token from 0 to " +
                             std::to_string(model.vocabulary - 1),
                         "prompt");
    }
    tokens.push_back(item.get<TokenId>());
  }
  return tokens;
}

void add_prompt(const Json& prompt, const ServedModel& model, CompletionRequest& request) {
  PromptTokens tokens;
  if (prompt.is_string()) {
    tokens.tokens = model.tokenizer->encode(prompt.get_ref<const std::string&>(), AddedTokens::kRecognise);
    request.prompt_texts.push_back(prompt.get<std::string>());
  } else if (is_token_list(prompt)) {
    tokens.tokens = read_tokens(prompt, model);
    request.prompt_texts.push_back(model.tokenizer->decode(tokens.tokens, false));
  } else {
    throw RequestError("prompt must be a string, a list of strings, or a list of tokens", "prompt");
  }
  request.prompts.push_back(std::move(tokens));
}

Json logprobs_json(const std::vector<TokenLogprobs>& tokens) {
  Json result = {{"tokens", Json::array()}, {"token_logprobs", Json::array()}, {"top_logprobs", Json::array()}};
  for (const TokenLogprobs& token : tokens) {
    result["tokens"].push_back(repair_utf8(token.bytes));
    result["token_logprobs"].push_back(token.logprob);
    Json top = Json::object();
    for (const auto& [bytes, logprob] : token.top) top[repair_utf8(bytes)] = logprob;
    result["top_logprobs"].push_back(std::move(top));
  }
  return result;
}

}  // namespace

CompletionRequest parse_completion_request(const Json& body, const ServedModel& model) {
  const Fields fields(body);
  CompletionRequest request;
  request.settings = parse_settings(fields, model.sampling_defaults);
  // OpenAI's default; a raw prompt rarely ends by itself.
  if (request.settings.max_tokens == 0) request.settings.max_tokens = 16;
  if (const auto logprobs = fields.integer("logprobs", 0, 20)) {
    request.settings.top_logprobs = static_cast<int>(*logprobs);
  }
  request.echo = fields.boolean("echo").value_or(false);
  if (request.echo && request.settings.top_logprobs >= 0) {
    fields.refuse("echo", "with logprobs is not supported: those of the prompt are not computed");
  }
  if (fields.string("suffix").value_or("") != "") fields.refuse("suffix", "is not supported");
  if (fields.integer("best_of", 1, 128).value_or(request.settings.n) != request.settings.n) {
    fields.refuse("best_of", "other than n is not supported");
  }
  const Json* prompt = fields.find("prompt");
  if (!prompt) fields.refuse("prompt", "is missing");
  if (prompt->is_array() && !is_token_list(*prompt)) {
    if (prompt->empty() || prompt->size() > kMaxPrompts) {
      fields.refuse("prompt", "must hold 1 to " + std::to_string(kMaxPrompts) + " prompts");
    }
    for (const Json& item : *prompt) add_prompt(item, model, request);
  } else {
    add_prompt(*prompt, model, request);
  }
  return request;
}

Json completion_response(const AnswerHead& head, const CompletionRequest& request,
                         const std::vector<CollectedReply>& replies) {
  Json choices = Json::array();
  std::vector<ReplySummary> summaries;
  for (const CollectedReply& reply : replies) {
    const size_t prompt = choices.size() / static_cast<size_t>(request.settings.n);
    const std::string before = request.echo ? request.prompt_texts[prompt] : "";
    choices.push_back({{"index", choices.size()},
                       {"text", before + reply.content},
                       {"logprobs", request.settings.top_logprobs >= 0 ? logprobs_json(reply.logprobs) : Json()},
                       {"finish_reason", finish_reason(reply.summary.end)}});
    summaries.push_back(reply.summary);
  }
  return {{"id", head.id},
          {"object", "text_completion"},
          {"created", head.created},
          {"model", head.model},
          {"choices", std::move(choices)},
          {"usage", usage(summaries, request.settings.n)},
          {"timings", timings(summaries, request.settings.n)},
          {"seed", request.settings.sampling.seed}};
}

Json CompletionDialect::chunk(int choice, const std::string& text) const {
  Json result = {{"id", head_.id}, {"object", "text_completion"}, {"created", head_.created}, {"model", head_.model}};
  result["choices"] = Json::array();
  if (choice >= 0) {
    result["choices"].push_back({{"index", choice}, {"text", text}, {"logprobs", nullptr}, {"finish_reason", nullptr}});
  }
  if (request_.settings.include_usage) result["usage"] = nullptr;
  return result;
}

std::string CompletionDialect::begin(int choices) {
  finished_.resize(static_cast<size_t>(choices));
  std::string text;
  for (int i = 0; request_.echo && i < choices; i++) {
    const auto prompt = static_cast<size_t>(i / request_.settings.n);
    text += sse_event(compact_json(chunk(i, request_.prompt_texts[prompt])));
  }
  return text;
}

std::string CompletionDialect::update(const ReplyUpdate& update) {
  std::string piece;
  for (const ReplyEvent& event : update.events) piece += event.text;
  const bool finished = update.kind == ReplyUpdate::Kind::kFinished;
  if (piece.empty() && update.logprobs.empty() && !finished) return "";
  Json json = chunk(update.choice, piece);
  Json& choice = json["choices"][0];
  if (!update.logprobs.empty()) choice["logprobs"] = logprobs_json(update.logprobs);
  if (finished) {
    finished_[static_cast<size_t>(update.choice)] = update.summary;
    choice["finish_reason"] = finish_reason(update.summary.end);
    json["timings"] = timings({update.summary}, 1);
    json["seed"] = request_.settings.sampling.seed;
  }
  return sse_event(compact_json(json));
}

std::string CompletionDialect::end() {
  std::string text;
  if (request_.settings.include_usage) {
    Json last = chunk(-1, "");
    last["usage"] = usage(finished_, request_.settings.n);
    last["timings"] = timings(finished_, request_.settings.n);
    text += sse_event(compact_json(last));
  }
  return text + sse_event("[DONE]");
}

std::string CompletionDialect::failure(const std::string& message) {
  return sse_event(compact_json(error(message, "server_error")));
}

}  // namespace calla::openai
