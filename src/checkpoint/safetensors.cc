#include "checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "base/error.h"
#include "checkpoint/describe.h"
#include "checkpoint/json_file.h"

namespace calla {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are used as they lie in the file");

struct DtypeInfo {
  std::string_view name;
  size_t bytes;
};

// In the order of enum Dtype.
constexpr std::array<DtypeInfo, 16> kDtypes = {{
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"U16", 2},
    {"I16", 2},
    {"F16", 2},
    {"BF16", 2},
    {"U32", 4},
    {"I32", 4},
    {"F32", 4},
    {"U64", 8},
    {"I64", 8},
    {"F64", 8},
    {"C64", 8},
}};
constexpr size_t kMaxDimensions = 8;

std::optional<Dtype> find_dtype(std::string_view name) {
  for (size_t i = 0; i < kDtypes.size(); ++i)
    if (kDtypes[i].name == name) return static_cast<Dtype>(i);
  return std::nullopt;
}

// Receives the header's JSON piece by piece and builds the list of tensors, so that a hostile header costs no more
// memory than its own names.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& file_name, SafetensorsHeader& header) : file_(file_name), header_(header) {}

  bool start_object(size_t) override {
    switch (at_) {
      case At::kStart:
        at_ = At::kTop;
        return true;
      case At::kTensorValue:
        at_ = At::kTensor;
        return true;
      case At::kMetadataValue:
        at_ = At::kMetadata;
        return true;
      default:
        unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    if (at_ == At::kTop) {
      if (!names_.insert(name).second) fail("tensor " + describe_name(name) + " occurs twice in the header");
      if (name == "__metadata__") {
        at_ = At::kMetadataValue;
      } else {
        header_.tensors.emplace_back().name = name;
        has_dtype_ = has_shape_ = false;
        offsets_ = 0;
        at_ = At::kTensorValue;
      }
    } else if (at_ == At::kTensor) {
      if (name == "dtype" && !has_dtype_) {
        at_ = At::kDtype;
      } else if (name == "shape" && !has_shape_) {
        at_ = At::kShapeValue;
      } else if (name == "data_offsets" && offsets_ == 0) {
        at_ = At::kOffsetsValue;
      } else {
        fail_tensor("field " + describe_name(name) + " is unknown or occurs twice");
      }
    } else {  // kMetadata: the only other place where a key can be
      header_.metadata.emplace_back(name, "");
      at_ = At::kMetadataString;
    }
    return true;
  }

  bool end_object() override {
    if (at_ == At::kTensor) {
      if (!has_dtype_) fail_tensor("has no dtype");
      if (!has_shape_) fail_tensor("has no shape");
      if (offsets_ != 2) fail_tensor("has no data_offsets");
    }
    at_ = at_ == At::kTop ? At::kEnd : At::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (at_ == At::kShapeValue) {
      at_ = At::kShape;
    } else if (at_ == At::kOffsetsValue) {
      at_ = At::kOffsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (at_ == At::kShape) has_shape_ = true;
    if (at_ == At::kOffsets && offsets_ != 2) fail_tensor("data_offsets must be two numbers");
    at_ = At::kTensor;
    return true;
  }

  bool string(string_t& value) override {
    if (at_ == At::kDtype) {
      const std::optional<Dtype> dtype = find_dtype(value);
      if (!dtype) fail_tensor("has the unknown dtype " + describe_name(value));
      header_.tensors.back().dtype = *dtype;
      has_dtype_ = true;
      at_ = At::kTensor;
    } else if (at_ == At::kMetadataString) {
      header_.metadata.back().second = value;
      at_ = At::kMetadata;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::kShape) {
      TensorEntry& tensor = header_.tensors.back();
      if (tensor.shape.size() == kMaxDimensions) fail_tensor("has more than 8 dimensions");
      tensor.shape.push_back(value);
    } else if (at_ == At::kOffsets && offsets_ < 2) {
      TensorEntry& tensor = header_.tensors.back();
      (offsets_++ == 0 ? tensor.begin : tensor.end) = value;
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool null() override {
    if (at_ != At::kMetadataValue) unexpected("null");
    at_ = At::kTop;  // one writer spells "no metadata" so
    return true;
  }
  bool boolean(bool) override { unexpected("true or false"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    unexpected("a number that is not an integer below 2^64");
  }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    fail("the header is not valid JSON at its byte " + std::to_string(position) + ": " + json_error_text(error.what()));
  }

 private:
  enum class At {
    kStart,
    kTop,
    kTensorValue,
    kTensor,
    kDtype,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kMetadataValue,
    kMetadata,
    kMetadataString,
    kEnd,
  };

  [[noreturn]] void fail(const std::string& what) const { throw CheckpointError(file_ + ": " + what); }
  [[noreturn]] void fail_tensor(const std::string& what) const {
    fail("tensor " + describe_name(header_.tensors.back().name) + " " + what);
  }
  [[noreturn]] void unexpected(const std::string& what) const {
    const bool in_tensor = !header_.tensors.empty() && at_ != At::kTop && at_ != At::kMetadataValue &&
                           at_ != At::kMetadata && at_ != At::kMetadataString;
    if (in_tensor) fail_tensor("has " + what + " where the format has none");
    fail("the header has " + what + " where the format has none");
  }

  const std::string& file_;
  SafetensorsHeader& header_;
  std::unordered_set<std::string> names_;
  At at_ = At::kStart;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  int offsets_ = 0;
};

// Bytes of a tensor, or nothing if they do not fit in 64 bits.
std::optional<uint64_t> tensor_bytes(const TensorEntry& tensor) {
  uint64_t bytes = dtype_bytes(tensor.dtype);
  for (const uint64_t size : tensor.shape)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  return bytes;
}

// Checks each tensor's range against its shape and the ranges against the file; makes the offsets absolute.
void place_tensors(SafetensorsHeader& header, uint64_t file_size, const std::string& file) {
  const uint64_t data_size = file_size - header.data_begin;
  for (const TensorEntry& tensor : header.tensors) {
    const auto fail = [&](const std::string& what) {
      throw CheckpointError(file + ": tensor " + describe_name(tensor.name) + " " + what);
    };
    const std::string range = "[" + std::to_string(tensor.begin) + ", " + std::to_string(tensor.end) + ")";
    if (tensor.begin > tensor.end) fail("has the range " + range + ", which ends before it begins");
    if (tensor.end > data_size)
      fail("has the bytes " + range + ", but the file has only " + std::to_string(data_size) +
           " bytes of data; is the download complete?");
    const std::optional<uint64_t> bytes = tensor_bytes(tensor);
    const std::string what = std::string(dtype_name(tensor.dtype)) + " " + describe_shape(tensor.shape);
    if (!bytes) fail("has an impossible shape: " + what);
    if (*bytes != tensor.end - tensor.begin)
      fail("is " + what + ", which takes " + std::to_string(*bytes) + " bytes, but its range " + range + " has " +
           std::to_string(tensor.end - tensor.begin));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t covered = 0;
  const TensorEntry* previous = nullptr;
  for (TensorEntry& tensor : header.tensors) {
    if (tensor.begin < covered)
      throw CheckpointError(file + ": tensors " + describe_name(previous->name) + " and " + describe_name(tensor.name) +
                            " overlap");
    if (tensor.begin > covered)
      throw CheckpointError(file + ": " + std::to_string(tensor.begin - covered) +
                            " bytes that belong to no tensor lie before tensor " + describe_name(tensor.name));
    covered = tensor.end;
    previous = &tensor;
  }
  if (covered != data_size)
    throw CheckpointError(file + ": the tensors end after " + std::to_string(covered) +
                          " bytes of data, but the file has " + std::to_string(data_size) + "; is it the right file?");
  for (TensorEntry& tensor : header.tensors) {
    tensor.begin += header.data_begin;
    tensor.end += header.data_begin;
  }
}

}  // namespace

std::string_view dtype_name(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }
size_t dtype_bytes(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bytes; }

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& file_name) {
  const auto fail = [&](const std::string& what) { throw CheckpointError(file_name + ": " + what); };
  if (file.size() < 8)
    fail("has " + std::to_string(file.size()) + " bytes, too few for a safetensors file; download it again?");
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  if (length == 0) fail("the header length is 0; not a safetensors file?");
  if (length > kMaxHeaderBytes)
    fail("the header length is " + std::to_string(length) + " bytes, more than any checkpoint needs (" +
         std::to_string(kMaxHeaderBytes) + "); not a safetensors file?");
  if (length > file.size() - 8)
    fail("the header length is " + std::to_string(length) + " bytes, but the file has only " +
         std::to_string(file.size()) + "; is the download complete?");
  const auto* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (text[0] != '{') fail("the header does not begin with {; not a safetensors file?");
  // The JSON library would take a zero byte for the end.
  if (const void* zero = std::memchr(text, '\0', length); zero != nullptr)
    fail("the header is not valid JSON at its byte " + std::to_string(static_cast<const char*>(zero) - text) +
         ": a zero byte");

  SafetensorsHeader header;
  header.data_begin = 8 + length;
  HeaderReader reader(file_name, header);
  nlohmann::json::sax_parse(text, text + length, &reader);
  place_tensors(header, file.size(), file_name);
  return header;
}

}  // namespace calla
