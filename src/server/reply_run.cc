#include "server/reply_run.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/check.h"
#include "base/error.h"
#include "server/constraints.h"

namespace calla {

struct ReplyRun::Queue {
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<ReplyUpdate> updates;

  void push(ReplyUpdate update) {
    const std::lock_guard lock(mutex);
    updates.push_back(std::move(update));
    ready.notify_one();
  }
};

// Lives on the engine's thread.
class ReplyRun::Sink : public GenerationSink {
 public:
  Sink(const Tokenizer& tokenizer, ReplyOptions options, int choice, bool one_call, std::shared_ptr<Queue> queue,
       bool logprobs)
      : tokenizer_(tokenizer),
        stream_(tokenizer, std::move(options)),
        choice_(choice),
        one_call_(one_call),
        logprobs_(logprobs),
        queue_(std::move(queue)) {}

  void on_prompt_progress(int done, int total) override {
    ReplyUpdate update = make(ReplyUpdate::Kind::kProgress);
    update.done = done;
    update.total = total;
    queue_->push(std::move(update));
  }

  bool on_token(const TokenEvent& event) override {
    ReplyUpdate update = make(ReplyUpdate::Kind::kEvents);
    bool going = true;
    summary_.tokens.push_back(event.token);
    if (!event.is_stop) {
      if (logprobs_ && stream_.in_content()) update.logprobs.push_back(logprobs_of(event));
      if (stream_.in_reasoning()) summary_.reasoning_tokens++;
      going = stream_.push(event.token, update.events);
      note_calls(update.events);
    }
    if (first_ || !update.events.empty() || !update.logprobs.empty()) queue_->push(std::move(update));
    first_ = false;
    return going && !(one_call_ && n_calls_ > 0);
  }

  void on_finished(const GenerationResult& result) override {
    ReplyUpdate update = make(ReplyUpdate::Kind::kFinished);
    const bool ended_by_itself = result.reason == FinishReason::kStopToken || result.reason == FinishReason::kSink;
    if (!(one_call_ && n_calls_ > 0)) {
      stream_.finish(!ended_by_itself, update.events);
      note_calls(update.events);
    }
    summary_.result = result;
    summary_.end = end(result.reason);
    if (stream_.stop_string()) summary_.stop_string = *stream_.stop_string();
    update.summary = summary_;
    queue_->push(std::move(update));
  }

 private:
  ReplyUpdate make(ReplyUpdate::Kind kind) const {
    ReplyUpdate update;
    update.kind = kind;
    update.choice = choice_;
    return update;
  }

  void note_calls(std::vector<ReplyEvent>& events) {
    for (size_t i = 0; i < events.size(); i++) {
      if (events[i].kind != ReplyEvent::Kind::kCallEnd) continue;
      n_calls_++;
      if (one_call_) events.resize(i + 1);
    }
  }

  ReplyEnd end(FinishReason reason) const {
    switch (reason) {
      case FinishReason::kStopToken:
      case FinishReason::kSink:
        if (stream_.stop_string()) return ReplyEnd::kStopString;
        return n_calls_ > 0 ? ReplyEnd::kToolCalls : ReplyEnd::kStop;
      case FinishReason::kMaxTokens:
      case FinishReason::kContextFull:
        return ReplyEnd::kLength;
      case FinishReason::kCancelled:
        return ReplyEnd::kCancelled;
      case FinishReason::kError:
        return ReplyEnd::kError;
    }
    return ReplyEnd::kError;
  }

  TokenLogprobs logprobs_of(const TokenEvent& event) const {
    TokenLogprobs result{std::string(tokenizer_.token_bytes(event.token)), event.logprob, {}};
    for (const TokenLogprob& other : event.top) {
      result.top.emplace_back(tokenizer_.token_bytes(other.token), other.logprob);
    }
    return result;
  }

  const Tokenizer& tokenizer_;
  ReplyStream stream_;
  const int choice_;
  const bool one_call_;
  const bool logprobs_;
  const std::shared_ptr<Queue> queue_;
  bool first_ = true;
  int n_calls_ = 0;
  ReplySummary summary_;
};

void CollectedReply::add(const ReplyUpdate& update) {
  for (const ReplyEvent& event : update.events) {
    switch (event.kind) {
      case ReplyEvent::Kind::kReasoning:
        reasoning += event.text;
        break;
      case ReplyEvent::Kind::kContent:
        content += event.text;
        break;
      case ReplyEvent::Kind::kCallStart:
        calls.push_back({event.id, event.name, "", false});
        break;
      case ReplyEvent::Kind::kCallArguments:
        calls.at(static_cast<size_t>(event.call)).arguments += event.text;
        break;
      case ReplyEvent::Kind::kCallEnd:
        calls.at(static_cast<size_t>(event.call)).complete = true;
        break;
    }
  }
  logprobs.insert(logprobs.end(), update.logprobs.begin(), update.logprobs.end());
  if (update.kind == ReplyUpdate::Kind::kFinished) summary = update.summary;
}

void CollectedReply::drop_unfinished_calls() {
  std::erase_if(calls, [](const Call& call) { return !call.complete; });
}

ReplyRun::ReplyRun(const ServedModel& model, const ReplySettings& settings, ReplyPlan plan)
    : n_(settings.n), model_(model), turn_start_(std::move(plan.turn_start)), queue_(std::make_shared<Queue>()) {
  check(!plan.prompts.empty() && n_ > 0, "a run has prompts and replies");
  for (const PromptTokens& prompt : plan.prompts) {
    for (int i = 0; i < n_; i++) {
      const int index = choices();
      GenerationRequest request;
      request.prompt = prompt.tokens;
      request.boundaries = prompt.boundaries;
      request.sampling = settings.sampling;
      request.sampling.seed += static_cast<uint64_t>(index);
      request.max_tokens = settings.max_tokens;
      request.stop_tokens = model.stop_tokens;
      request.top_logprobs = settings.top_logprobs;
      if (plan.make_constraint) request.constraint = plan.make_constraint();
      request.use_cache = settings.cache_prompt;
      auto sink = std::make_shared<Sink>(*model.tokenizer, plan.reply, index, !plan.parallel_tool_calls, queue_,
                                         settings.top_logprobs >= 0);
      choices_.emplace_back().generation = std::make_shared<Generation>(std::move(request), std::move(sink));
    }
  }
  model_.service->submit(choices_[0].generation);
  choices_[0].submitted = true;
  submit_waiting();
}

ReplyRun::~ReplyRun() { cancel(); }

void ReplyRun::cancel() {
  for (Choice& choice : choices_) choice.generation->cancel();
}

// Submits what may start now. A full queue only means to try again.
void ReplyRun::submit_waiting() {
  for (size_t i = 0; i < choices_.size(); i++) {
    const Choice& first = choices_[i - i % static_cast<size_t>(n_)];
    if (choices_[i].submitted || (i % static_cast<size_t>(n_) != 0 && !first.started)) continue;
    try {
      model_.service->submit(choices_[i].generation);
      choices_[i].submitted = true;
    } catch (const RequestError& error) {
      if (error.code() != "queue_full") throw;
      return;
    }
  }
}

std::optional<ReplyUpdate> ReplyRun::wait(std::chrono::milliseconds time) {
  submit_waiting();
  std::optional<ReplyUpdate> update;
  {
    std::unique_lock lock(queue_->mutex);
    if (!queue_->ready.wait_for(lock, time, [&] { return !queue_->updates.empty(); })) return std::nullopt;
    update = std::move(queue_->updates.front());
    queue_->updates.pop_front();
  }
  Choice& choice = choices_[static_cast<size_t>(update->choice)];
  if (update->kind == ReplyUpdate::Kind::kProgress) return update;
  choice.started = true;
  if (!turn_start_.empty()) choice.reply.add(*update);
  if (update->kind == ReplyUpdate::Kind::kFinished) {
    n_finished_++;
    remember(choice);
  }
  return update;
}

// A reply that ended its turn properly may come back as history.
void ReplyRun::remember(Choice& choice) {
  const std::vector<TokenId>& tokens = choice.reply.summary.tokens;
  if (!model_.replay || tokens.empty() || choice.reply.summary.result.reason != FinishReason::kStopToken) return;
  if (model_.tokenizer->token_bytes(tokens.back()) != "<|im_end|>") return;
  Message message;
  message.role = Role::kAssistant;
  message.reasoning = choice.reply.reasoning;
  message.content = choice.reply.content;
  for (const auto& call : choice.reply.calls) {
    Json arguments = try_parse_json(call.arguments);
    if (!call.complete || !arguments.is_object()) return;
    message.tool_calls.push_back({call.id, call.name, std::move(arguments)});
  }
  std::vector<TokenId> body = turn_start_;
  body.insert(body.end(), tokens.begin(), tokens.end() - 1);
  model_.replay->add(message, std::move(body));
}

PromptTokens chat_prompt(const ServedModel& model, const ChatRequest& request) {
  const Prompt prompt = render_prompt(request.messages, request.tools, request.render);
  return encode_prompt(*model.tokenizer, prompt, request.messages, model.replay);
}

std::unique_ptr<ReplyRun> start_chat(const ServedModel& model, const ChatRequest& request) {
  ReplyPlan plan;
  plan.prompts.push_back(chat_prompt(model, request));
  plan.reply.parser.starts_in_thinking = request.render.enable_thinking;
  plan.reply.parser.tools = request.tools;
  plan.reply.stop = request.settings.stop;
  plan.parallel_tool_calls = request.parallel_tool_calls;
  plan.make_constraint = constraint_maker(model, request);
  plan.turn_start = model.tokenizer->encode(request.render.enable_thinking ? "<think>\n" : "<think>\n\n</think>\n\n",
                                            AddedTokens::kRecognise);
  return std::make_unique<ReplyRun>(model, request.settings, std::move(plan));
}

}  // namespace calla
