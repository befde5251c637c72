#pragma once
// Names, shapes and sizes for people. Names come from outside: they are made printable and short.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace calla {

// `name` with control characters and bytes beyond ASCII escaped (\n, \xe2), cut after about 120 characters.
std::string describe_name(std::string_view name);
std::string describe_shape(std::span<const uint64_t> shape);  // "[256, 512]"
std::string describe_bytes(uint64_t bytes);                   // "19.5 GB", "512 bytes" (powers of ten)

}  // namespace calla
