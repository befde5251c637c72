#include "checkpoint/json_file.h"

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "checkpoint/describe.h"
#include "checkpoint/mapped_file.h"

namespace calla {
namespace {

constexpr int kMaxDepth = 64;

}  // namespace

std::string read_text_file(const std::filesystem::path& path, size_t max_bytes) {
  const MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() > max_bytes)
    throw CheckpointError(path.string() + ": has " + describe_bytes(bytes.size()) + ", more than the " +
                          describe_bytes(max_bytes) + " that such a file may have");
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string json_error_text(std::string_view message) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: REASON; last read: 'INPUT'; expected ..."
  // "[json.exception.out_of_range.406] REASON"
  if (const size_t code = message.find("] "); message.starts_with('[') && code != std::string_view::npos)
    message.remove_prefix(code + 2);
  if (const size_t place = message.find("column "); place != std::string_view::npos) {
    const size_t colon = message.find(": ", place);
    if (colon != std::string_view::npos) message.remove_prefix(colon + 2);
  }
  return describe_name(message.substr(0, message.find("; last read")));
}

nlohmann::json parse_json(std::string_view text, const std::string& file_name) {
  using nlohmann::json;
  std::vector<std::unordered_set<std::string>> keys;  // of the objects being read, outermost first
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) throw CheckpointError(file_name + ": more than 64 levels deep");
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second)
        throw CheckpointError(file_name + ": the key " + describe_name(key) + " occurs twice in one object");
    }
    return true;
  };
  // The library would take a zero byte for the end.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos)
    throw CheckpointError(file_name + ": not valid JSON at byte " + std::to_string(zero) + ": a zero byte");
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& error) {
    throw CheckpointError(file_name + ": not valid JSON at byte " + std::to_string(error.byte) + ": " +
                          json_error_text(error.what()));
  } catch (const json::exception& error) {
    throw CheckpointError(file_name + ": not valid JSON: " + json_error_text(error.what()));
  }
}

}  // namespace calla
