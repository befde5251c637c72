#pragma once
// Counters of the HTTP side, and all numbers as Prometheus text.
#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "engine/scheduler.h"

namespace calla {

struct HttpMetrics {
  std::array<std::atomic<uint64_t>, 6> by_class{};  // answers by status / 100
  std::atomic<uint64_t> disconnects{0};             // clients that left before their answer was complete

  void count(int status) { by_class.at(static_cast<size_t>(status / 100) % by_class.size())++; }
};

std::string prometheus_text(const HttpMetrics& http, const SchedulerStats& engine);

}  // namespace calla
