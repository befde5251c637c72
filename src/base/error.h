#pragma once
// Errors: something outside Calla is wrong (a file, a request, a device, a command line). They are thrown while
// loading, admitting or synchronising, and caught once: in main() and in the request handler. A message names what
// was expected, what was found, where, and what to try. When *we* are wrong, see check.h.
#include <stdexcept>
#include <string>

namespace calla {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A checkpoint directory, or a file in it, cannot be used as it is.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

// A request (or prompt) asks for something that cannot be done. `field` names the parameter, if one is to blame;
// `code` is a short machine-readable word such as "context_length_exceeded".
class RequestError : public Error {
 public:
  explicit RequestError(const std::string& message, std::string field = "", std::string code = "invalid_value")
      : Error(message), field_(std::move(field)), code_(std::move(code)) {}
  const std::string& field() const { return field_; }
  const std::string& code() const { return code_; }

 private:
  std::string field_;
  std::string code_;
};

// A device (GPU, driver, memory) failed or is missing.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// The command line is wrong.
class UsageError : public Error {
 public:
  using Error::Error;
};

}  // namespace calla
