#include "tokenizer/tokenizer_json.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "tokenizer/byte_alphabet.h"

namespace calla {
namespace {

using nlohmann::json;

constexpr TokenId kMaxTokens = 1 << 20;  // four times the largest vocabulary in use; bounds memory for absurd ids
constexpr size_t kMaxDepth = 16;

// A text for a message, cut if long.
std::string cut_short(const std::string& text) {
  constexpr size_t kLongest = 60;
  if (text.size() <= kLongest) return text;
  size_t cut = kLongest - 3;
  while ((static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;  // not within a character
  return text.substr(0, cut) + "...";
}

// A value as JSON, for a message.
std::string shown(const json& value) { return cut_short(value.dump()); }

constexpr const char* kGetAgain = "; get the file again, it was cut short or changed";

// The file as parsed: the two big tables apart, everything else as a small tree.
struct RawFile {
  json root;
  bool has_vocab = false, has_merges = false;
  std::vector<std::pair<std::string, TokenId>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;
};

// Parser events to RawFile. model.vocab and model.merges, hundreds of thousands of entries each, never become
// a tree.
class RawReader : public json::json_sax_t {
 public:
  RawReader(RawFile& file, std::string_view text, const std::string& name) : file_(file), text_(text), name_(name) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool binary(binary_t&) override { return false; }
  bool number_unsigned(number_unsigned_t value) override {
    if (in_ != In::kVocab) return add(value);
    if (value >= static_cast<number_unsigned_t>(kMaxTokens))
      fail("model.vocab", shown(key_) + " has id " + std::to_string(value) + "; ids up to " +
                              std::to_string(kMaxTokens - 1) + " are supported");
    file_.vocab.emplace_back(key_, static_cast<TokenId>(value));
    return true;
  }
  bool string(string_t& value) override {
    if (in_ == In::kPair) {
      pair_.push_back(value);
    } else if (in_ == In::kMerges) {
      const size_t space = value.find(' ');
      if (space == std::string::npos || value.find(' ', space + 1) != std::string::npos)
        fail(merge_place(), "expected two tokens with one space between them, found " + shown(value));
      file_.merges.emplace_back(value.substr(0, space), value.substr(space + 1));
    } else {
      return add(value);
    }
    return true;
  }
  bool start_object(size_t) override {
    if (in_ == In::kTree && stack_.size() == 2 && root_key_ == "model" && key_ == "vocab") {
      if (std::exchange(file_.has_vocab, true)) fail("model", "\"vocab\" stands twice");
      in_ = In::kVocab;
      key_.clear();
      return true;
    }
    return open(json::object());
  }
  bool start_array(size_t) override {
    if (in_ == In::kMerges) {
      in_ = In::kPair;
      return true;
    }
    if (in_ == In::kTree && stack_.size() == 2 && root_key_ == "model" && key_ == "merges") {
      if (std::exchange(file_.has_merges, true)) fail("model", "\"merges\" stands twice");
      in_ = In::kMerges;
      return true;
    }
    return open(json::array());
  }
  bool key(string_t& value) override {
    key_ = value;
    if (stack_.size() == 1) root_key_ = value;
    if (in_ == In::kTree && stack_.back()->contains(value)) fail(root_key_, shown(value) + " stands twice");
    return true;
  }
  bool end_object() override {
    if (in_ == In::kVocab) {
      in_ = In::kTree;
    } else {
      stack_.pop_back();
    }
    return true;
  }
  bool end_array() override {
    if (in_ == In::kPair) {
      if (pair_.size() != 2) fail(merge_place(), "expected two tokens, found " + std::to_string(pair_.size()));
      file_.merges.emplace_back(std::move(pair_[0]), std::move(pair_[1]));
      pair_.clear();
      in_ = In::kMerges;
    } else if (in_ == In::kMerges) {
      in_ = In::kTree;
    } else {
      stack_.pop_back();
    }
    return true;
  }
  // In words of our own: the library's name its states and codes. `byte` counts from 1 and may lie behind the end.
  bool parse_error(size_t byte, const std::string& found, const nlohmann::detail::exception& error) override {
    std::string reason;
    if (text_.find_first_not_of(" \t\r\n") == std::string_view::npos) {
      reason = "the file is empty";
    } else if (dynamic_cast<const json::out_of_range*>(&error) != nullptr) {
      reason = "the number " + cut_short(found) + " is too large";
    } else if (byte == 0 || byte > text_.size()) {
      reason = "the file ends too early";
    } else if (const auto last = static_cast<unsigned char>(text_[byte - 1]); last >= 0x80) {
      reason = "it is not UTF-8 text";
    } else {
      reason = "unexpected " + shown(std::string(1, text_[byte - 1]));
    }
    throw CheckpointError(name_ + ": " + where() + "not valid JSON at byte " + std::to_string(byte) + ": " + reason +
                          kGetAgain);
  }

 private:
  enum class In { kTree, kVocab, kMerges, kPair };

  [[noreturn]] void fail(const std::string& field, const std::string& what) const {
    throw CheckpointError(name_ + ": " + field + ": " + what);
  }
  std::string merge_place() const { return "model.merges[" + std::to_string(file_.merges.size()) + "]"; }
  // The field that is being read, for in front of a message.
  std::string where() const {
    if (in_ == In::kVocab) return "model.vocab" + (key_.empty() ? "" : " after " + shown(key_)) + ": ";
    if (in_ != In::kTree) return merge_place() + ": ";
    return stack_.empty() || root_key_.empty() ? "" : root_key_ + ": ";
  }

  json& place(json value) {
    if (in_ == In::kVocab) fail("model.vocab", shown(key_) + " has no token id, a number from 0 on");
    if (in_ != In::kTree) fail(merge_place(), "expected two tokens as strings");
    if (stack_.empty()) return file_.root = std::move(value);
    json& parent = *stack_.back();
    if (parent.is_object()) return parent[key_] = std::move(value);
    parent.push_back(std::move(value));
    return parent.back();
  }
  bool add(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json container) {
    json& placed = place(std::move(container));
    if (stack_.size() == kMaxDepth)
      fail(root_key_.empty() ? "file" : root_key_,
           "nested more than " + std::to_string(kMaxDepth) + " levels deep; get the file again");
    stack_.push_back(&placed);
    return true;
  }

  RawFile& file_;
  const std::string_view text_;
  const std::string& name_;
  std::vector<json*> stack_;  // a parent never grows while its child is open, so the pointers stay valid
  std::string key_, root_key_;
  std::vector<std::string> pair_;
  In in_ = In::kTree;
};

// The checks of one file, field by field.
class SpecBuilder {
 public:
  SpecBuilder(RawFile& file, const std::string& name) : file_(file), name_(name) {}

  TokenizerSpec build() {
    if (!file_.root.is_object()) fail("file", "expected a JSON object");
    expect_null(file_.root, "", "truncation");
    expect_null(file_.root, "", "padding");
    read_normalizer();
    read_pre_tokenizer();
    check_post_processor();
    check_decoder();
    check_model_options();
    const auto added = read_added_tokens();
    read_vocab(added);
    read_merges();
    check_added_against_vocab();
    return std::move(spec_);
  }

 private:
  [[noreturn]] void fail(const std::string& field, const std::string& what) const {
    throw CheckpointError(name_ + ": " + field + ": " + what);
  }

  // A field of an object, null if absent.
  static const json& get(const json& object, const char* key) {
    static const json kNull;
    const auto it = object.find(key);
    return it == object.end() ? kNull : *it;
  }
  void expect_null(const json& object, const std::string& where, const char* key) const {
    if (!get(object, key).is_null()) fail(where + key, "only null is supported, found " + shown(get(object, key)));
  }
  // A flag whose only supported value is `wanted`; absent counts as `otherwise`.
  void expect_bool(const json& object, const std::string& where, const char* key, bool wanted, bool otherwise) const {
    const json& value = get(object, key);
    if ((value.is_null() && otherwise == wanted) || value == json(wanted)) return;
    fail(where + key, std::string("only ") + (wanted ? "true" : "false") + " is supported, found " + shown(value));
  }
  void expect_keys(const json& object, const std::string& where, const std::set<std::string>& known) const {
    for (const auto& [key, value] : object.items()) {
      if (known.count(key) == 0) fail(where + key, "unknown option, its effect on the tokens is not known");
    }
  }
  void expect_type(const json& object, const std::string& where, const std::string& wanted) const {
    if (!object.is_object() || get(object, "type") != json(wanted))
      fail(where,
           "only type " + wanted + " is supported, found " + shown(object.is_object() ? get(object, "type") : object));
  }

  void read_normalizer() {
    const json& normalizer = get(file_.root, "normalizer");
    if (normalizer.is_null()) return;
    expect_type(normalizer, "normalizer", "NFC");
    expect_keys(normalizer, "normalizer.", {"type"});
    spec_.nfc = true;
  }

  void read_pre_tokenizer() {
    const json& sequence = get(file_.root, "pre_tokenizer");
    expect_type(sequence, "pre_tokenizer", "Sequence");
    expect_keys(sequence, "pre_tokenizer.", {"type", "pretokenizers"});
    const json& steps = get(sequence, "pretokenizers");
    if (!steps.is_array() || steps.size() != 2)
      fail("pre_tokenizer.pretokenizers", "only [Split, ByteLevel] is supported, found " + shown(steps));
    const json& split = steps[0];
    const std::string where = "pre_tokenizer.pretokenizers[0]";
    expect_type(split, where, "Split");
    expect_keys(split, where + ".", {"type", "pattern", "behavior", "invert"});
    if (get(split, "behavior") != json("Isolated"))
      fail(where + ".behavior", "only Isolated is supported, found " + shown(get(split, "behavior")));
    expect_bool(split, where + ".", "invert", false, false);
    const json& pattern = get(split, "pattern");
    if (!pattern.is_object() || pattern.size() != 1 || !get(pattern, "Regex").is_string())
      fail(where + ".pattern", "only {\"Regex\": \"...\"} is supported, found " + shown(pattern));
    spec_.split_pattern = get(pattern, "Regex").get<std::string>();
    const json& bytes = steps[1];
    const std::string byte_level = "pre_tokenizer.pretokenizers[1]";
    expect_type(bytes, byte_level, "ByteLevel");
    expect_keys(bytes, byte_level + ".", {"type", "add_prefix_space", "trim_offsets", "use_regex"});
    expect_bool(bytes, byte_level + ".", "add_prefix_space", false, true);
    expect_bool(bytes, byte_level + ".", "use_regex", false, true);
  }

  // ByteLevel only moves character offsets, which Calla does not use.
  void check_post_processor() const {
    const json& processor = get(file_.root, "post_processor");
    if (!processor.is_null()) expect_type(processor, "post_processor", "ByteLevel");
  }
  void check_decoder() const { expect_type(get(file_.root, "decoder"), "decoder", "ByteLevel"); }

  void check_model_options() const {
    const json& model = get(file_.root, "model");
    expect_type(model, "model", "BPE");
    expect_keys(model, "model.",
                {"type", "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                 "fuse_unk", "byte_fallback", "ignore_merges"});
    expect_null(model, "model.", "dropout");
    expect_null(model, "model.", "unk_token");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const json& value = get(model, key);
      if (!value.is_null() && value != json("")) fail(std::string("model.") + key, "only null or \"\" is supported");
    }
    expect_bool(model, "model.", "byte_fallback", false, false);
    expect_bool(model, "model.", "ignore_merges", false, false);
    if (!file_.has_vocab) fail("model.vocab", "expected an object of tokens and their ids");
    if (!file_.has_merges) fail("model.merges", "expected a list of pairs of tokens");
  }

  // Fills spec_.added_tokens; returns text -> id.
  std::map<std::string, TokenId> read_added_tokens() {
    std::map<std::string, TokenId> ids;
    std::set<TokenId> used;
    const json& list = get(file_.root, "added_tokens");
    if (list.is_null()) return ids;
    if (!list.is_array()) fail("added_tokens", "expected a list");
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string where = "added_tokens[" + std::to_string(i) + "]";
      const json& token = list[i];
      if (!token.is_object()) fail(where, "expected an object");
      expect_keys(token, where + ".", {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      const json& id = get(token, "id");
      if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(kMaxTokens))
        fail(where + ".id", "expected a number from 0 to " + std::to_string(kMaxTokens - 1) + ", found " + shown(id));
      const json& content = get(token, "content");
      if (!content.is_string() || content.get_ref<const std::string&>().empty())
        fail(where + ".content", "expected a text that is not empty, found " + shown(content));
      for (const char* key : {"single_word", "lstrip", "rstrip"}) expect_bool(token, where + ".", key, false, false);
      expect_bool(token, where + ".", "normalized", false, true);
      const json& special = get(token, "special");
      if (!special.is_boolean()) fail(where + ".special", "expected true or false, found " + shown(special));
      AddedToken added{id.get<TokenId>(), content.get<std::string>(), special.get<bool>()};
      if (!used.insert(added.id).second) fail(where + ".id", std::to_string(added.id) + " stands twice");
      if (!ids.emplace(added.text, added.id).second) fail(where + ".content", shown(added.text) + " stands twice");
      spec_.added_tokens.push_back(std::move(added));
    }
    return ids;
  }

  void read_vocab(const std::map<std::string, TokenId>& added) {
    TokenId max_id = -1;
    for (const auto& [text, id] : file_.vocab) max_id = std::max(max_id, id);
    std::vector<std::string> bytes(static_cast<size_t>(max_id) + 1);
    for (const auto& [text, id] : file_.vocab) {
      if (text.empty()) fail("model.vocab", "the empty text has id " + std::to_string(id));
      auto token = alphabet_.to_bytes(text);
      if (!token) {  // an added token may be listed here too, and need not be made of byte characters
        const auto it = added.find(text);
        if (it != added.end() && it->second == id) continue;
        fail("model.vocab",
             shown(text) + " has a character that stands for no byte; only byte-level vocabularies " + "are supported");
      }
      if (!bytes[id].empty())
        fail("model.vocab", "id " + std::to_string(id) + " stands twice, once for " + shown(text));
      bytes[id] = std::move(*token);
    }
    spec_.model_tokens = TokenTable(bytes);
    if (const auto id = spec_.model_tokens.duplicate())
      fail("model.vocab", "the token of id " + std::to_string(*id) + " stands twice");
    for (int byte = 0; byte < 256; ++byte) {
      const auto id = spec_.model_tokens.find(std::string(1, static_cast<char>(byte)));
      if (!id) fail("model.vocab", "no token for the byte " + std::to_string(byte) + "; all 256 are needed");
      spec_.byte_tokens[byte] = *id;
    }
  }

  void read_merges() {
    constexpr uint32_t kNone = ~uint32_t{0};
    // For each token its last merge, for each merge the one before with the same result: two merges are the same pair
    // if they have the same result and the same left part.
    std::vector<uint32_t> last(static_cast<size_t>(spec_.model_tokens.size()), kNone), before;
    spec_.merges.reserve(file_.merges.size());
    before.reserve(file_.merges.size());
    for (const auto& [left, right] : file_.merges) {
      const auto bytes_of = [&](const std::string& text) { return alphabet_.to_bytes(text).value_or(""); };
      const auto find = [&](const std::string& bytes, const std::string& text) {
        const auto id = spec_.model_tokens.find(bytes);
        if (!id) fail(merge_place(), shown(text) + " is not a token of model.vocab");
        return *id;
      };
      std::string bytes = bytes_of(left);
      const TokenId l = find(bytes, left);
      const std::string right_bytes = bytes_of(right);
      const TokenId r = find(right_bytes, right);
      const TokenId result = find(bytes.append(right_bytes), left + right);
      for (uint32_t i = last[result]; i != kNone; i = before[i]) {
        if (spec_.merges[i].left == l) fail(merge_place(), shown(left) + " and " + shown(right) + " are merged twice");
      }
      before.push_back(last[result]);
      last[result] = static_cast<uint32_t>(spec_.merges.size());
      spec_.merges.push_back({l, r, result});
    }
  }
  std::string merge_place() const { return "model.merges[" + std::to_string(spec_.merges.size()) + "]"; }

  void check_added_against_vocab() const {
    for (size_t i = 0; i < spec_.added_tokens.size(); ++i) {
      const AddedToken& added = spec_.added_tokens[i];
      const auto bytes = alphabet_.to_bytes(added.text);
      const auto model_id = bytes ? spec_.model_tokens.find(*bytes) : std::nullopt;
      const bool same = model_id && *model_id == added.id;
      if (model_id && !same)
        fail("added_tokens[" + std::to_string(i) + "]", shown(added.text) + " has id " + std::to_string(added.id) +
                                                            " here and " + std::to_string(*model_id) +
                                                            " in model.vocab");
      if (!same && !spec_.model_tokens.bytes(added.id).empty())
        fail("added_tokens[" + std::to_string(i) + "]",
             "id " + std::to_string(added.id) + " belongs to another token in model.vocab");
    }
  }

  RawFile& file_;
  const std::string& name_;
  ByteAlphabet alphabet_;
  TokenizerSpec spec_;
};

// Throws CheckpointError if it is not JSON, or JSON of a kind that no tokenizer's file has.
RawFile read_raw(std::string_view text, const std::string& name) {
  // The library would take a zero byte for the end.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos)
    throw CheckpointError(name + ": not valid JSON at byte " + std::to_string(zero + 1) + ": a zero byte" + kGetAgain);
  RawFile file;
  RawReader reader(file, text, name);
  json::sax_parse(text, &reader);
  return file;
}

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& name) {
  RawFile file = read_raw(text, name);
  return SpecBuilder(file, name).build();
}

std::optional<std::string> parse_eos_token(std::string_view text, const std::string& name) {
  const json config = read_raw(text, name).root;
  if (!config.is_object())
    throw CheckpointError(name + ": file: expected a JSON object, found " + shown(config) + kGetAgain);
  const json eos = config.value("eos_token", json());
  if (eos.is_null()) return std::nullopt;
  const json content = eos.is_object() ? eos.value("content", json()) : eos;
  if (!content.is_string())
    throw CheckpointError(name + ": eos_token: expected a text, or an object with the text as \"content\", found " +
                          shown(eos) + kGetAgain);
  return content.get<std::string>();
}

std::string shown(const std::string& text) { return shown(json(text)); }

}  // namespace calla
