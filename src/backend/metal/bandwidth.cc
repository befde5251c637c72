#include "backend/metal/bandwidth.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend/metal/encoder.h"
#include "backend/metal/params.h"

namespace calla::metal {

double probe_read_bandwidth() {
  constexpr size_t kBytes = size_t{512} << 20, kWord = 16, kGroups = 1024, kThreads = mtl::kElementThreads;
  constexpr int kPasses = 6;
  Device device;
  const BufferSpan from = device.allocate(kBytes, "bandwidth probe");
  const BufferSpan sums = device.allocate(kGroups * kThreads * kWord, "bandwidth probe's sums");
  std::memset(from.as<std::byte>(), 1, kBytes);
  const Kernel& kernel = device.kernel("sum_words");
  StepEncoder encoder(device, {});
  std::vector<double> rates;
  for (int pass = 0; pass < kPasses; ++pass) {
    encoder.dispatch(kernel, mtl::SumParams{kBytes / kWord}, {reads(from), writes(sums)}, {kGroups}, kThreads);
    const auto command_buffers = encoder.take();
    wait_for(command_buffers);
    const double seconds = command_buffers[0]->GPUEndTime() - command_buffers[0]->GPUStartTime();
    if (pass > 0 && seconds > 0) rates.push_back(static_cast<double>(kBytes) / seconds);  // the first one wires memory
  }
  if (rates.empty()) return 0;
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace calla::metal
