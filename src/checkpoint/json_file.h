#pragma once
// Reading JSON that comes from outside: bounded in size and depth, duplicate keys refused.
#include <cstddef>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace calla {

// The content of a text file of at most `max_bytes`. Throws CheckpointError.
std::string read_text_file(const std::filesystem::path& path, size_t max_bytes);

// Parses `text`; `file_name` is for messages. Throws CheckpointError on anything but valid UTF-8 JSON without
// duplicate keys and at most 64 levels deep.
nlohmann::json parse_json(std::string_view text, const std::string& file_name);

// The reason in a JSON library's message, without its codes and without the quoted input.
std::string json_error_text(std::string_view message);

}  // namespace calla
