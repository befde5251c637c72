#include "server/metrics.h"

#include "chat/json.h"

namespace calla {

std::string prometheus_text(const HttpMetrics& http, const SchedulerStats& engine) {
  std::string text;
  const auto head = [&](const std::string& name, const char* type, const char* help) {
    text += "# HELP calla_" + name + " " + help + "\n# TYPE calla_" + name + " " + type + "\n";
  };
  const auto counter = [&](const std::string& name, const char* help, const Json& value) {
    head(name, "counter", help);
    text += "calla_" + name + " " + compact_json(value) + "\n";
  };
  const auto gauge = [&](const std::string& name, const char* help, int value) {
    head(name, "gauge", help);
    text += "calla_" + name + " " + std::to_string(value) + "\n";
  };
  counter("requests_total", "Generations accepted by the engine.", engine.requests);
  counter("prompt_tokens_total", "Prompt tokens of accepted generations.", engine.prompt_tokens);
  counter("cached_tokens_total", "Prompt tokens taken from the prefix cache.", engine.cached_tokens);
  counter("prefilled_tokens_total", "Prompt tokens computed.", engine.prefilled_tokens);
  counter("generated_tokens_total", "Tokens generated.", engine.generated_tokens);
  counter("decode_steps_total", "Decode steps, each of all running sequences.", engine.decode_steps);
  counter("prefill_seconds_total", "Seconds spent in prefill chunks.", engine.prefill_seconds);
  counter("decode_seconds_total", "Seconds spent in decode steps.", engine.decode_seconds);
  counter("preparations_total", "Next turns read ahead.", engine.preparations);
  counter("preparations_interrupted_total", "Times that a request interrupted reading ahead.",
          engine.preparations_interrupted);
  counter("prepared_tokens_total", "Tokens read ahead, apart from the prefilled ones.", engine.prepared_tokens);
  counter("prepare_seconds_total", "Seconds spent on reading ahead.", engine.prepare_seconds);
  gauge("running", "Sequences that run now.", engine.running);
  gauge("queued", "Generations that wait.", engine.queued);
  gauge("cache_snapshots", "Snapshots in the prefix cache.", engine.snapshots);
  gauge("kv_pages_free", "Free pages of the KV pool.", engine.free_pages);
  gauge("kv_pages", "Pages of the KV pool.", engine.total_pages);
  head("http_responses_total", "counter", "HTTP answers by status class.");
  for (const size_t i : {2, 4, 5}) {
    text += "calla_http_responses_total{class=\"" + std::to_string(i) + "xx\"} " +
            std::to_string(http.by_class[i].load()) + "\n";
  }
  counter("http_disconnects_total", "Clients that left before their answer was complete.", http.disconnects.load());
  return text;
}

}  // namespace calla
