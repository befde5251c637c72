#include "engine/snapshot_store.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

#include "base/error.h"

namespace calla {
namespace fs = std::filesystem;
namespace {

constexpr char kMagic[8] = {'C', 'A', 'L', 'L', 'A', 'S', 'N', '1'};
constexpr size_t kMaxQueued = 8;
constexpr const char* kSuffix = ".snapshot";
constexpr uint64_t kMaxTokens = 1u << 24;  // a header that claims more is damaged

// The fixed part of a file. After it: parent key and layout and model (text), the new tokens, the recurrent state, the
// KV pages.
struct Header {
  char magic[8];
  uint64_t hash;          // XXH3 of all bytes after this field
  uint32_t parent_bytes;  // length of the parent's key; 0: no parent
  uint32_t layout_bytes;
  uint32_t model_bytes;
  uint32_t new_tokens;
  uint32_t total_tokens;
  uint32_t first_page;  // pages [first_page, first_page + pages) of the sequence are in the file
  uint32_t pages;
  uint32_t reserved;
  uint64_t recurrent_bytes;
  uint64_t page_bytes;
};
static_assert(sizeof(Header) == 64);
constexpr size_t kHashedFrom = offsetof(Header, parent_bytes);

uint64_t payload_bytes(const Header& h) {
  return uint64_t{h.parent_bytes} + h.layout_bytes + h.model_bytes + uint64_t{h.new_tokens} * sizeof(TokenId) +
         h.recurrent_bytes + h.pages * h.page_bytes;
}

// Those since the parent's last, partly filled one.
bool has_right_pages(const Header& h) {
  const uint32_t first = (h.total_tokens - h.new_tokens) / kKvPageRows;
  return h.first_page == first && h.pages == static_cast<uint32_t>(pages_for(static_cast<int>(h.total_tokens))) - first;
}

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  void add(const void* data, size_t bytes) {
    const auto* p = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), p, p + bytes);
  }
  std::span<std::byte> room(size_t bytes) {
    out_.resize(out_.size() + bytes);
    return std::span(out_).last(bytes);
  }

 private:
  std::vector<std::byte>& out_;
};

std::string system_message() { return std::strerror(errno); }

// Writes a file so that it is there whole or not at all.
void write_atomically(const fs::path& path, std::span<const std::byte> contents) {
  const fs::path temporary = path.string() + ".tmp";
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) throw Error(temporary.string() + " cannot be written: " + system_message());
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t n = ::write(file, contents.data() + done, contents.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const std::string reason = system_message();
      ::close(file);
      ::unlink(temporary.c_str());
      throw Error(temporary.string() + " cannot be written: " + reason);
    }
    done += static_cast<size_t>(n);
  }
  const bool flushed = ::fsync(file) == 0;
  ::close(file);
  if (!flushed || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string reason = system_message();
    ::unlink(temporary.c_str());
    throw Error(path.string() + " cannot be written: " + reason);
  }
}

bool is_prefix(std::span<const TokenId> prefix, std::span<const TokenId> tokens) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

}  // namespace

SnapshotStore::SnapshotStore(fs::path directory, std::string model, StatePool& pool, uint64_t max_bytes, Warn warn)
    : directory_(std::move(directory)),
      model_(std::move(model)),
      pool_(pool),
      max_bytes_(max_bytes),
      warn_(std::move(warn)) {
  std::error_code error;
  const bool made = fs::create_directories(directory_, error);
  if (error) throw Error("--cache-dir " + directory_.string() + " cannot be made: " + error.message());
  // Conversations are private. A directory that was there is its owner's affair; the files are private anyway.
  if (made) fs::permissions(directory_, fs::perms::owner_all, error);
  scan();
  make_room(0);
  writer_ = std::thread([this] { write_loop(); });
}

SnapshotStore::~SnapshotStore() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  writer_.join();
}

fs::path SnapshotStore::path_of(const std::string& key) const { return directory_ / (key + kSuffix); }

std::string SnapshotStore::key_of(std::span<const TokenId> tokens) const {
  const std::string salt = model_ + '\n' + pool_.backend().state_layout();
  const uint64_t seed = XXH3_64bits(salt.data(), salt.size());
  const XXH128_hash_t hash = XXH3_128bits_withSeed(tokens.data(), tokens.size_bytes(), seed);
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text;
}

// Reads the headers. Tokens are known only once the parents' are, so files are taken up in rounds.
void SnapshotStore::scan() {
  struct Found {
    Header header;
    std::string parent;
    std::vector<TokenId> tokens;
    uint64_t bytes;
    fs::file_time_type time;
  };
  std::map<std::string, Found> found;
  int skipped = 0;
  std::error_code end;
  for (fs::directory_iterator it(directory_, end); !end && it != fs::directory_iterator(); it.increment(end)) {
    const fs::directory_entry& item = *it;
    std::error_code error;
    if (!item.is_regular_file(error)) continue;  // a pipe would be waited for
    if (item.path().string().ends_with(std::string(kSuffix) + ".tmp")) fs::remove(item.path(), error);  // of a crash
    if (item.path().extension() != kSuffix) continue;
    Found f{};
    f.bytes = item.file_size(error);
    if (!error) f.time = item.last_write_time(error);
    if (error) continue;  // gone meanwhile
    unusable_.push_back({item.path(), f.bytes, f.time});
    bytes_ += f.bytes;
    std::ifstream file(item.path(), std::ios::binary);
    if (!file.read(reinterpret_cast<char*>(&f.header), sizeof(Header)) ||
        std::memcmp(f.header.magic, kMagic, sizeof(kMagic)) != 0 || f.header.parent_bytes > 64 ||
        f.header.layout_bytes > 256 || f.header.model_bytes > 256 || f.header.total_tokens > kMaxTokens ||
        f.header.new_tokens == 0 || f.header.new_tokens > f.header.total_tokens || !has_right_pages(f.header) ||
        f.bytes != sizeof(Header) + payload_bytes(f.header)) {
      warn_(item.path().string() + " is damaged; it is not used");
      continue;
    }
    std::string layout(f.header.layout_bytes, '\0'), model(f.header.model_bytes, '\0');
    f.parent.resize(f.header.parent_bytes);
    f.tokens.resize(f.header.new_tokens);
    file.read(f.parent.data(), static_cast<std::streamsize>(f.parent.size()));
    file.read(layout.data(), static_cast<std::streamsize>(layout.size()));
    file.read(model.data(), static_cast<std::streamsize>(model.size()));
    file.read(reinterpret_cast<char*>(f.tokens.data()),
              static_cast<std::streamsize>(f.tokens.size() * sizeof(TokenId)));
    if (!file || layout != pool_.backend().state_layout() || model != model_ ||
        f.header.recurrent_bytes != pool_.backend().recurrent_slot_bytes() ||
        f.header.page_bytes != pool_.backend().kv_page_bytes()) {
      ++skipped;
      continue;
    }
    found[item.path().stem().string()] = std::move(f);
  }
  if (end) throw Error("--cache-dir " + directory_.string() + " cannot be read: " + end.message());
  if (skipped > 0)
    warn_(std::to_string(skipped) + " snapshots in " + directory_.string() +
          " are of another model or backend; they are not used");

  std::vector<std::pair<fs::file_time_type, std::string>> by_time;
  for (bool progress = true; progress;) {
    progress = false;
    for (auto it = found.begin(); it != found.end();) {
      Found& f = it->second;
      std::vector<TokenId> tokens;
      if (!f.parent.empty()) {
        const auto parent = entries_.find(f.parent);
        if (parent == entries_.end()) {
          ++it;
          continue;
        }
        tokens = parent->second.tokens;
      }
      tokens.insert(tokens.end(), f.tokens.begin(), f.tokens.end());
      if (tokens.size() == f.header.total_tokens && key_of(tokens) == it->first) {
        by_time.emplace_back(f.time, it->first);
        entries_[it->first] = {std::move(tokens), f.parent, f.bytes, 0};
        std::erase_if(unusable_, [&](const Unusable& file) { return file.path == path_of(it->first); });
        progress = true;
      } else {
        warn_(path_of(it->first).string() + " is damaged; it is not used");
      }
      it = found.erase(it);
    }
  }
  if (!found.empty())
    warn_(std::to_string(found.size()) + " snapshots in " + directory_.string() +
          " build on missing ones; they are not used");
  std::sort(unusable_.begin(), unusable_.end(), [](const auto& a, const auto& b) { return a.time < b.time; });
  std::sort(by_time.begin(), by_time.end());
  for (const auto& [time, key] : by_time) entries_[key].last_use = ++clock_;
}

int SnapshotStore::find(std::span<const TokenId> tokens, int limit) const {
  size_t best = 0;
  for (const auto& [key, entry] : entries_)
    if (entry.tokens.size() > best && entry.tokens.size() <= static_cast<size_t>(limit) &&
        is_prefix(entry.tokens, tokens))
      best = entry.tokens.size();
  return static_cast<int>(best);
}

// Whether the bytes are what was written for this entry: the hash fits, and so does what it was written for.
bool SnapshotStore::is_whole(const Entry& entry, std::span<const std::byte> contents) const {
  Header h{};
  if (contents.size() < sizeof(h)) return false;
  std::memcpy(&h, contents.data(), sizeof(h));
  if (h.page_bytes != pool_.backend().kv_page_bytes() || h.recurrent_bytes != pool_.backend().recurrent_slot_bytes() ||
      h.new_tokens > h.total_tokens || h.total_tokens != entry.tokens.size() || !has_right_pages(h) ||
      contents.size() != sizeof(h) + payload_bytes(h) ||
      XXH3_64bits(contents.data() + kHashedFrom, contents.size() - kHashedFrom) != h.hash)
    return false;
  const size_t new_tokens = sizeof(h) + h.parent_bytes + h.layout_bytes + h.model_bytes;
  return std::memcmp(contents.data() + sizeof(h), entry.parent.data(), entry.parent.size()) == 0 &&
         std::memcmp(contents.data() + new_tokens, entry.tokens.data() + (h.total_tokens - h.new_tokens),
                     h.new_tokens * sizeof(TokenId)) == 0;
}

std::optional<Snapshot> SnapshotStore::load(std::span<const TokenId> tokens, int length,
                                            const std::function<SlotHandle()>& take_slot,
                                            const std::function<void(PageList&)>& append_page) {
  flush();  // it may still be on its way out
  drop_unwritten();
  const std::string key = key_of(tokens.first(static_cast<size_t>(length)));
  std::vector<std::string> chain;  // from the snapshot to its first ancestor
  for (std::string k = key; !k.empty();) {
    const auto entry = entries_.find(k);
    if (entry == entries_.end()) return std::nullopt;
    chain.push_back(k);
    entry->second.last_use = ++clock_;
    k = entry->second.parent;
  }
  Snapshot snapshot;
  snapshot.tokens.assign(tokens.begin(), tokens.begin() + length);
  for (auto k = chain.rbegin(); k != chain.rend(); ++k) {
    std::ifstream file(path_of(*k), std::ios::binary);
    std::vector<std::byte> contents(entries_.at(*k).bytes);
    file.read(reinterpret_cast<char*>(contents.data()), static_cast<std::streamsize>(contents.size()));
    if (!file || !is_whole(entries_.at(*k), contents)) {
      remove(*k, true);
      return std::nullopt;
    }
    Header header{};
    std::memcpy(&header, contents.data(), sizeof(header));
    const std::byte* state = contents.data() + sizeof(Header) + header.parent_bytes + header.layout_bytes +
                             header.model_bytes + header.new_tokens * sizeof(TokenId);
    const std::byte* pages = state + header.recurrent_bytes;
    // The parent's partly filled page comes again, with more rows.
    snapshot.pages.truncate(header.first_page);
    for (uint32_t i = 0; i < header.pages; ++i) {
      append_page(snapshot.pages);
      pool_.backend().import_kv_page(snapshot.pages.ids().back(), {pages + i * header.page_bytes, header.page_bytes});
    }
    if (*k == key) {
      snapshot.slot = take_slot();
      pool_.backend().import_recurrent(snapshot.slot.id(), {state, header.recurrent_bytes});
    }
  }
  if (static_cast<int>(snapshot.pages.size()) != pages_for(length)) {
    remove(key, true);
    return std::nullopt;
  }
  return snapshot;
}

void SnapshotStore::save(const Snapshot& snapshot) {
  drop_unwritten();
  const std::string key = key_of(snapshot.tokens);
  if (const auto entry = entries_.find(key); entry != entries_.end()) {
    entry->second.last_use = ++clock_;
    return;
  }
  const auto total = static_cast<int>(snapshot.tokens.size());
  const int parent_length = find(snapshot.tokens, total - 1);
  const std::string parent =
      parent_length > 0 ? key_of(std::span(snapshot.tokens).first(static_cast<size_t>(parent_length))) : "";
  Backend& backend = pool_.backend();
  const std::string layout = backend.state_layout();
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.parent_bytes = static_cast<uint32_t>(parent.size());
  header.layout_bytes = static_cast<uint32_t>(layout.size());
  header.model_bytes = static_cast<uint32_t>(model_.size());
  header.new_tokens = static_cast<uint32_t>(total - parent_length);
  header.total_tokens = static_cast<uint32_t>(total);
  header.first_page = static_cast<uint32_t>(parent_length / kKvPageRows);
  header.pages = static_cast<uint32_t>(pages_for(total)) - header.first_page;
  header.recurrent_bytes = backend.recurrent_slot_bytes();
  header.page_bytes = backend.kv_page_bytes();
  const uint64_t bytes = sizeof(Header) + payload_bytes(header);
  if (bytes > max_bytes_) return;
  {
    std::lock_guard lock(mutex_);
    if (jobs_.size() >= kMaxQueued) return;  // the disk does not keep up; better no snapshot than no memory
  }

  Job job;
  job.key = key;
  job.contents.reserve(bytes);
  Writer out(job.contents);
  out.add(&header, sizeof(header));
  out.add(parent.data(), parent.size());
  out.add(layout.data(), layout.size());
  out.add(model_.data(), model_.size());
  out.add(snapshot.tokens.data() + parent_length, header.new_tokens * sizeof(TokenId));
  backend.export_recurrent(snapshot.slot.id(), out.room(header.recurrent_bytes));
  for (uint32_t i = 0; i < header.pages; ++i)
    backend.export_kv_page(snapshot.pages.ids()[header.first_page + i], out.room(header.page_bytes));

  std::erase_if(unusable_, [&](const Unusable& file) {  // it is overwritten
    if (file.path != path_of(key)) return false;
    bytes_ -= file.bytes;
    return true;
  });
  entries_[key] = {snapshot.tokens, parent, bytes, ++clock_};
  bytes_ += bytes;
  for (std::string k = parent; !k.empty(); k = entries_.at(k).parent) entries_.at(k).last_use = ++clock_;
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    wake_.notify_one();
  }
  make_room(0);
}

void SnapshotStore::flush() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return jobs_.empty() && !writing_; });
}

// Forgets what the writer could not write, and what builds on it.
void SnapshotStore::drop_unwritten() {
  std::vector<std::string> keys;
  {
    std::lock_guard lock(mutex_);
    keys.swap(unwritten_);
  }
  for (const std::string& key : keys)
    if (entries_.contains(key)) remove(key, false);
}

// Removes files that are of no use here (of another model, say), then the least recently used snapshots that no other
// builds on, until the files fit. Ancestors are used whenever their descendants are, so they outlive them.
void SnapshotStore::make_room(uint64_t bytes) {
  while (bytes_ + bytes > max_bytes_ && !unusable_.empty()) {
    std::error_code error;
    fs::remove(unusable_.front().path, error);
    bytes_ -= unusable_.front().bytes;
    unusable_.erase(unusable_.begin());
  }
  while (bytes_ + bytes > max_bytes_ && !entries_.empty()) {
    std::set<std::string> parents;
    for (const auto& [key, entry] : entries_) parents.insert(entry.parent);
    const std::string* oldest = nullptr;
    for (const auto& [key, entry] : entries_)
      if (!parents.contains(key) && (!oldest || entry.last_use < entries_.at(*oldest).last_use)) oldest = &key;
    if (!oldest) return;
    remove(std::string(*oldest), false);
  }
}

// Removes a snapshot and those that build on it.
void SnapshotStore::remove(const std::string& key, bool with_warning) {
  flush();
  if (with_warning) warn_(path_of(key).string() + " is damaged; it is removed, and what builds on it");
  std::vector<std::string> doomed = {key};
  for (size_t i = 0; i < doomed.size(); ++i)
    for (const auto& [other, entry] : entries_)
      if (entry.parent == doomed[i]) doomed.push_back(other);
  for (const std::string& k : doomed) {
    std::error_code error;
    fs::remove(path_of(k), error);
    bytes_ -= entries_.at(k).bytes;
    entries_.erase(k);
  }
}

void SnapshotStore::write_loop() {
  bool failing = false;  // one warning is enough for a full disk
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      writing_ = false;
      if (jobs_.empty()) idle_.notify_all();
      wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
      writing_ = true;
    }
    const uint64_t hash = XXH3_64bits(job.contents.data() + kHashedFrom, job.contents.size() - kHashedFrom);
    std::memcpy(job.contents.data() + offsetof(Header, hash), &hash, sizeof(hash));
    try {
      write_atomically(path_of(job.key), job.contents);
      failing = false;
    } catch (const Error& e) {
      if (!failing) warn_(std::string(e.what()) + "; the cache on disk does not grow until there is room");
      failing = true;
      std::lock_guard lock(mutex_);
      unwritten_.push_back(job.key);
    }
  }
}

}  // namespace calla
