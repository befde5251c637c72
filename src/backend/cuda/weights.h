#pragma once
// DeviceWeights: the model's weights in device memory, uploaded once.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/layout.h"
#include "backend/weights.h"
#include "model/shape.h"

namespace calla::cuda {

// Matrices that read the same input, side by side: part i writes columns [column(i), column(i) + n_i) of an output row
// of `width` columns; each part starts at a multiple of 16.
struct Linear {
  int k = 0;
  int width = 0;
  std::vector<int> columns;
  std::vector<int> rows;  // outputs of each part
  bool packed = false;
  PackedView view;           // if packed: all parts as one matrix
  std::vector<RawView> raw;  // if not: one a part
  size_t bytes = 0;          // that reading it once moves
};

// Stacks of experts: gate and up interleaved, and down.
struct Experts {
  int count = 0;
  int width = 0;  // hidden units of one expert
  bool packed = false;
  PackedView up;                       // swiglu tiles [count][width / 8]
  PackedView down;                     // plain tiles [count][hidden / 16]
  RawView raw_gate, raw_up, raw_down;  // if not packed
  size_t bytes = 0;                    // of one expert
};

struct LayerOnDevice {
  const float* input_norm = nullptr;
  const float* post_norm = nullptr;
  Linear in;  // GDN: qkv, z, a, b; attention: q + gate, k, v
  Linear out;
  const float* conv = nullptr;        // [channels][4]
  const float* decay_rate = nullptr;  // exp(A_log) [value_heads]
  const float* dt_bias = nullptr;
  const float* gdn_norm = nullptr;  // [128]
  const float* q_norm = nullptr;    // [256]
  const float* k_norm = nullptr;
  Linear router;  // router, shared expert's gate
  Experts experts;
  Experts shared;  // a stack of one
};

// How an upload goes about it (uploader.h); only tests choose differently.
struct UploadSizes {
  // A buffer's 4 MiB take 0.08 ms on the bus: long beside the start of a copy, short beside the whole.
  size_t buffer = size_t{4} << 20;
  // Half of them on the bus hide the time that threads take to wake up.
  size_t buffers = 8;
  // Of which there are two. 0.6 ms on the bus: long beside an event between streams.
  size_t area = size_t{32} << 20;
};

class WeightPlacer;

class DeviceWeights {
 public:
  // Uploads everything, into one block of memory; what else that needs is freed before it returns. A matrix whose codes
  // (or values) pointer is null gets random contents, made on the device (benchmarks of the real shape).
  // `on_upload(bytes sent, all bytes)`, if not empty, is called now and then.
  DeviceWeights(const ModelShape& shape, const ModelWeights& weights, cudaStream_t stream,
                const std::function<void(double done, double total)>& on_upload = {}, const UploadSizes& sizes = {});

  RawView embedding;
  Linear head;
  const float* final_norm = nullptr;
  std::vector<LayerOnDevice> layers;

  size_t bytes() const { return bytes_; }
  int unpacked_matrices() const { return unpacked_; }  // that run through the plain kernels
  double upload_seconds() const { return upload_seconds_; }

 private:
  friend class WeightPlacer;
  DeviceWeights() = default;  // without memory, to see how much it takes
  void place(const ModelWeights& weights, WeightPlacer& placer);

  DeviceBytes memory_;
  size_t bytes_ = 0;
  int unpacked_ = 0;
  double upload_seconds_ = 0;
};

// True if the packed layout can hold the matrix.
bool can_pack(const WeightMatrix& matrix);

}  // namespace calla::cuda
