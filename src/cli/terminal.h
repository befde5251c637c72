#pragma once
// What the terminal can do: colours, a progress line, and Ctrl-C that stops an answer.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "engine/generation.h"

namespace calla {

// Styles stdout only if it is a terminal and NO_COLOR is not set.
class Style {
 public:
  explicit Style(int file_descriptor);
  const char* dim() const { return on_ ? "\033[2m" : ""; }
  const char* bold() const { return on_ ? "\033[1m" : ""; }
  const char* red() const { return on_ ? "\033[31m" : ""; }
  const char* reset() const { return on_ ? "\033[0m" : ""; }
  bool on() const { return on_; }

 private:
  bool on_ = false;
};

// One line on stderr that is rewritten in place: "reading the prompt  [####....]  40 %  1,234 tokens/s". Silent if
// stderr is no terminal, and for work shorter than half a second.
class ProgressLine {
 public:
  explicit ProgressLine(std::string what, std::string unit, bool enabled);
  ~ProgressLine() { clear(); }
  void update(double done, double total);
  void clear();

 private:
  const std::string what_, unit_;
  const bool enabled_;
  bool shown_ = false;
  double first_done_ = -1;
  std::chrono::steady_clock::time_point begin_, last_;
};

// Thrown by InterruptFlag::check; ends the program with 130.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
};

// While it lives, SIGINT, SIGTERM and SIGHUP only raise a flag, so that long work can clean up. One at a time.
class InterruptFlag {
 public:
  InterruptFlag();
  ~InterruptFlag();
  InterruptFlag(const InterruptFlag&) = delete;
  InterruptFlag& operator=(const InterruptFlag&) = delete;
  bool raised() const;
  void check() const {
    if (raised()) throw Interrupted();
  }
};

// While it lives, SIGINT cancels `generation` instead of ending the program; a second one within the same answer ends
// it. One at a time.
class InterruptGuard {
 public:
  explicit InterruptGuard(std::shared_ptr<Generation> generation);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  std::shared_ptr<Generation> generation_;
  struct sigaction before_ = {};
};

// "1,234.5", "12.3 MB", "1.23 s": for people.
std::string with_commas(double value, int digits = 0);
std::string human_bytes(double bytes);
std::string human_seconds(double seconds);
// "prompt 123 tokens (100 cached) in 0.12 s, 1,025 tokens/s; answer 45 tokens in 0.9 s, 50.0 tokens/s"
std::string timing_line(const GenerationResult& result);

}  // namespace calla
