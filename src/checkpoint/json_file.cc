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
constexpr const char* kGetAgain = "; get the file again, it was cut short or changed";

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
  struct Object {
    std::unordered_set<std::string> keys;
    std::string last;  // that was read
  };
  std::vector<Object> objects;  // that are being read, outermost first
  const auto fail = [&](const std::string& what) {
    std::string field;
    for (const Object& object : objects)
      if (!object.last.empty()) field += (field.empty() ? "" : ".") + describe_name(object.last);
    throw CheckpointError(file_name + ": " + (field.empty() ? "" : field + ": ") + what + kGetAgain);
  };
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) fail("more than 64 levels deep");
    if (event == json::parse_event_t::object_start) {
      objects.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      objects.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!objects.back().keys.insert(key).second)
        fail("the key " + describe_name(key) + " occurs twice in one object");
      objects.back().last = key;
    }
    return true;
  };
  // The library would take a zero byte for the end.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos)
    fail("not valid JSON at byte " + std::to_string(zero) + ": a zero byte");
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& error) {
    fail("not valid JSON at byte " + std::to_string(error.byte) + ": " + json_error_text(error.what()));
  } catch (const json::exception& error) {
    fail("not valid JSON: " + json_error_text(error.what()));
  }
  return {};  // not reached
}

}  // namespace calla
