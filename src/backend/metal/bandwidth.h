#pragma once
// What the GPU's memory gives when a kernel does nothing but read: the yardstick of `calla bench` and `calla selftest`.

namespace calla::metal {

// Bytes/s, the median of a few passes over half a GB (more than any cache holds), timed by the GPU's own clock. Throws
// DeviceError where there is no device or no memory.
double probe_read_bandwidth();

}  // namespace calla::metal
