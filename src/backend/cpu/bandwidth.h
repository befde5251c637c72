#pragma once
// The read bandwidth of this machine's memory, as a limit to hold decode against.
#include "base/thread_pool.h"

namespace calla::cpu {

// Bytes per second at which `pool` reads fresh memory (512 MB in large pages, each thread its own part, plain vector
// loads): the median of five passes; 0 without the memory. Takes about a tenth of a second.
double probe_read_bandwidth(ThreadPool& pool);

}  // namespace calla::cpu
