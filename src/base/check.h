#pragma once
// check(): an invariant of our own code. A failure is a bug in Calla, prints where, and aborts, in every build type.
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <string_view>

namespace calla {

[[noreturn]] inline void check_failed(std::string_view what, const std::source_location& at) {
  std::fprintf(stderr, "%s:%u: %s: check failed: %.*s\nThis is a bug in Calla; please report it.\n", at.file_name(),
               static_cast<unsigned>(at.line()), at.function_name(), static_cast<int>(what.size()), what.data());
  std::abort();
}

inline void check(bool condition, std::string_view what,
                  const std::source_location& at = std::source_location::current()) {
  if (!condition) [[unlikely]]
    check_failed(what, at);
}

}  // namespace calla
