#pragma once
// The read bandwidth of this machine's memory, as a limit to hold decode against.
#include <functional>
#include <string>

#include "base/thread_pool.h"

namespace calla {

// Bytes per second at which `pool` reads fresh memory (512 MB in large pages, each thread its own part, plain vector
// loads): the median of five passes. Takes about a tenth of a second.
double probe_read_bandwidth(ThreadPool& pool);

// Measures, in bytes per second, the memory that a backend reads its weights from; empty where there is no way yet.
// `threads` as in BackendOptions.
std::function<double()> bandwidth_probe(const std::string& backend, int threads);

}  // namespace calla
