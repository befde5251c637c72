#pragma once
// Content hashes, computed while a file arrives.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace calla {

class Digest {
 public:
  enum class Kind : uint8_t { kSha256, kSha1 };

  explicit Digest(Kind kind);
  void update(const void* data, size_t bytes);
  // The hash in lower-case hexadecimal. Call once.
  std::string finish();

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;
};

}  // namespace calla
