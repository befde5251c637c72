#pragma once
// The read bandwidth of the card's memory, as a limit to hold decode against.
#include "backend/cuda/device.h"

namespace calla::cuda {

// Bytes per second of a plain sum over fresh memory (2 GB, or half of what is free), the median of five passes.
// Synchronises the stream. Throws DeviceError.
double probe_read_bandwidth(const DeviceInfo& device, cudaStream_t stream);

}  // namespace calla::cuda
