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

// One mechanism of a backend: tokens/s with it and without it at each point, measured in alternating order.
struct AblationRow {
  struct Rates {
    double with = 0, without = 0;
    double gain() const { return with / without - 1; }
  };
  std::string mechanism;
  std::vector<Rates> at;  // one for each prompt length, then one for each context length; empty: not measured
  std::string problem;    // why not
};

struct AblationReport {
  std::string model, backend;
  int repetitions = 0;
  std::vector<int> prompts, contexts;
  std::vector<AblationRow> rows;
};

// What Lily's authors report for a mechanism of this name, on an M5 Max with their engine ("prefill +77.4 % at 512");
// empty where they report none. Where the figure is from: docs/performance.md.
std::string lilys_gain(const std::string& mechanism);

std::string ablation_table(const AblationReport& report);
std::string ablation_json(const AblationReport& report);

std::string bench_table(const BenchReport& report);
std::string bench_json(const BenchReport& report);
std::string bench_svg(const BenchReport& report);

}  // namespace calla
