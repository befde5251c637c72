#pragma once
// StepProfiler: takes a captured step apart and times each of its kernels by itself.
#include <cuda_runtime.h>

#include <vector>

#include "backend/backend.h"

namespace calla::cuda {

class StepProfiler {
 public:
  // During the capture of a step on `stream`: the kernels launched from here on have to move `bytes`, counted.
  void add_bytes(cudaStream_t stream, double bytes);

  // Times the kernels of the finished capture, a chain of nodes: for each function, its launches alone, one behind the
  // other as in the step (dependent launch included), the mean of twelve replays. They work on the step's memory, so the
  // sequences' states and the activations are undefined afterwards. Bytes go to the first kernel behind add_bytes().
  std::vector<KernelTime> measure(cudaGraph_t graph, cudaStream_t stream) const;

 private:
  struct Mark {
    size_t node = 0;  // nodes captured before
    double bytes = 0;
  };
  std::vector<Mark> marks_;
};

}  // namespace calla::cuda
