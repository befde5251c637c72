#include "cli/terminal.h"

#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "base/check.h"

namespace calla {
namespace {

// The one thing that a signal handler can reach.
std::atomic<Generation*> interrupted_generation{nullptr};

extern "C" void on_interrupt(int) {
  Generation* generation = interrupted_generation.load(std::memory_order_relaxed);
  if (generation && !generation->cancelled()) {
    generation->cancel();
    return;
  }
  ::signal(SIGINT, SIG_DFL);
  ::raise(SIGINT);
}

volatile std::sig_atomic_t flag_raised = 0;

extern "C" void raise_flag(int) { flag_raised = 1; }

constexpr int kFlagSignals[] = {SIGINT, SIGTERM, SIGHUP};

}  // namespace

InterruptFlag::InterruptFlag() {
  flag_raised = 0;
  for (const int number : kFlagSignals) ::signal(number, raise_flag);
}

InterruptFlag::~InterruptFlag() {
  for (const int number : kFlagSignals) ::signal(number, SIG_DFL);
}

bool InterruptFlag::raised() const { return flag_raised != 0; }

Style::Style(int file_descriptor) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  on_ = ::isatty(file_descriptor) && !(no_color && *no_color) && !(term && std::string(term) == "dumb");
}

ProgressLine::ProgressLine(std::string what, std::string unit, bool enabled)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      enabled_(enabled && ::isatty(STDERR_FILENO)),
      begin_(std::chrono::steady_clock::now()),
      last_(begin_) {}

void ProgressLine::update(double done, double total) {
  if (!enabled_ || total <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  const double elapsed = std::chrono::duration<double>(now - begin_).count();
  if (first_done_ < 0) first_done_ = done;
  if (elapsed < 0.5 || (shown_ && std::chrono::duration<double>(now - last_).count() < 0.1 && done < total)) return;
  last_ = now;
  shown_ = true;
  constexpr int kWidth = 24;
  const int filled = static_cast<int>(std::lround(done / total * kWidth));
  std::string bar(static_cast<size_t>(filled), '#');
  bar.resize(kWidth, '.');
  std::fprintf(stderr, "\r%s [%s] %3.0f %%", what_.c_str(), bar.c_str(), 100 * done / total);
  if (!unit_.empty()) std::fprintf(stderr, "  %s %s/s", with_commas(done / elapsed).c_str(), unit_.c_str());
  std::fprintf(stderr, "\033[K");
  std::fflush(stderr);
}

void ProgressLine::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

InterruptGuard::InterruptGuard(std::shared_ptr<Generation> generation) : generation_(std::move(generation)) {
  check(interrupted_generation.exchange(generation_.get()) == nullptr, "one interrupt guard at a time");
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  ::sigaction(SIGINT, &action, &before_);
}

InterruptGuard::~InterruptGuard() {
  ::sigaction(SIGINT, &before_, nullptr);
  interrupted_generation.store(nullptr);
}

std::string with_commas(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  std::string s = text;
  size_t end = s.find('.');
  if (end == std::string::npos) end = s.size();
  const size_t begin = s[0] == '-' ? 1 : 0;
  for (size_t i = end; i > begin + 3; i -= 3) s.insert(i - 3, ",");
  return s;
}

std::string human_bytes(double bytes) {
  const char* units[] = {"bytes", "kB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 1000 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  return with_commas(bytes, unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2) + " " + units[unit];
}

std::string human_seconds(double seconds) {
  if (seconds < 1) return with_commas(seconds * 1000, seconds < 0.01 ? 1 : 0) + " ms";
  return with_commas(seconds, seconds < 10 ? 2 : 1) + " s";
}

std::string timing_line(const GenerationResult& result) {
  std::string line = "prompt " + with_commas(result.prompt_tokens) + " tokens";
  if (result.cached_tokens > 0) line += " (" + with_commas(result.cached_tokens) + " cached)";
  const int computed = result.prompt_tokens - result.cached_tokens;
  line += " in " + human_seconds(result.prefill_seconds);
  if (result.prefill_seconds > 0) line += ", " + with_commas(computed / result.prefill_seconds) + " tokens/s";
  line += "; answer " + with_commas(result.generated_tokens) + " tokens";
  if (result.generated_tokens > 1 && result.decode_seconds > 0)
    line += " in " + human_seconds(result.decode_seconds) + ", " +
            with_commas((result.generated_tokens - 1) / result.decode_seconds, 1) + " tokens/s";
  return line;
}

}  // namespace calla
