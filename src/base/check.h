#pragma once
// check(): an invariant of our own code. A failure is a bug in Calla, prints where, and aborts, in every build type.
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace calla {

// std::source_location in the form that clang 14 has too.
struct SourcePlace {
  const char* file;
  int line;
  const char* function;
  static constexpr SourcePlace current(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                                       const char* function = __builtin_FUNCTION()) {
    return {file, line, function};
  }
};

[[noreturn]] inline void check_failed(std::string_view what, const SourcePlace& at) {
  std::fprintf(stderr, "%s:%d: %s: check failed: %.*s\nThis is a bug in Calla; please report it.\n", at.file, at.line,
               at.function, static_cast<int>(what.size()), what.data());
  std::abort();
}

inline void check(bool condition, std::string_view what, const SourcePlace& at = SourcePlace::current()) {
  if (!condition) [[unlikely]]
    check_failed(what, at);
}

}  // namespace calla
