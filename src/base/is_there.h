#pragma once
// is_there: whether a directory has an entry of this name.
#include <filesystem>
#include <system_error>

namespace calla {

// A link is there even if its file has gone, and so is what may not be looked at: reading it then says what is wrong.
inline bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::symlink_status(path, error).type() != std::filesystem::file_type::not_found;
}

}  // namespace calla
