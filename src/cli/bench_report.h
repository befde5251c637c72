#pragma once
// What `calla bench` measured, and its three forms: a table, JSON and an SVG plot.
#include <string>
#include <vector>

#include "backend/backend.h"

namespace calla {

struct BenchPoint {
  int tokens = 0;            // prompt length (prefill) or context length (decode)
  double tokens_per_s = 0;   // median of the repetitions
  double low = 0, high = 0;  // slowest and fastest repetition
  double limit = 0;          // tokens/s at the counted bytes and the probed bandwidth; 0: not known
};

struct BenchProfile {
  std::string what;      // of which step
  bool counted = false;  // the kernels' bytes are known
  std::vector<KernelTime> kernels;
};

struct BenchReport {
  std::string model, backend, machine;
  double read_bandwidth = 0;   // bytes/s, probed in this run; 0: not probed
  double bytes_per_token = 0;  // decode at context 0
  int repetitions = 0;
  double load_seconds = 0;
  std::vector<BenchPoint> prefill, decode;
  std::vector<BenchProfile> profiles;
};

std::string bench_table(const BenchReport& report);
std::string bench_json(const BenchReport& report);
std::string bench_svg(const BenchReport& report);

}  // namespace calla
