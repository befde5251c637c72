#pragma once
// SnapshotStore: snapshots on disk, so that a conversation goes on after a restart without reading it all again.
//
// A file holds one snapshot as the difference to the longest stored snapshot that is a prefix of it (its parent): the
// tokens since then, the recurrent state, and the KV pages from the parent's last, partly filled page on. So the KV
// rows of a growing conversation are written once. A file is written beside its place, flushed and renamed; its
// contents are hashed; a file that is damaged, of another model or of another state layout is skipped with a warning,
// and with it those that build on it; when room is needed, such files go first. Engine thread only; the writing itself happens on a thread of its own.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/prefix_cache.h"

namespace calla {

class SnapshotStore {
 public:
  using Warn = std::function<void(const std::string&)>;  // from any thread

  // Opens (and makes) the directory and reads the headers of what is there. `model` identifies the checkpoint's
  // contents; `max_bytes` bounds the files, the least recently used of which are removed. Throws Error if the directory
  // cannot be used.
  SnapshotStore(std::filesystem::path directory, std::string model, StatePool& pool, uint64_t max_bytes, Warn warn);
  ~SnapshotStore();  // waits until all is written

  // Length of the longest stored snapshot that is a prefix of `tokens` and at most `limit` long; 0: none.
  int find(std::span<const TokenId> tokens, int limit) const;
  // Reads the snapshot of exactly tokens[0, length) into a slot and pages from `take_slot` and `append_page` (which make
  // room as they see fit). Nothing if a file turns out damaged.
  std::optional<Snapshot> load(std::span<const TokenId> tokens, int length,
                               const std::function<SlotHandle()>& take_slot,
                               const std::function<void(PageList&)>& append_page);
  // Copies a snapshot out of the backend and queues it for writing; does nothing if it is stored already.
  void save(const Snapshot& snapshot);
  // Waits until everything queued is on disk.
  void flush();

  size_t size() const { return entries_.size(); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::vector<TokenId> tokens;  // all of them, from the start
    std::string parent;           // key, or empty
    uint64_t bytes = 0;
    uint64_t last_use = 0;
  };
  struct Job {
    std::string key;
    std::vector<std::byte> contents;
  };
  struct Unusable {  // a snapshot's file that was there and is damaged or of another model
    std::filesystem::path path;
    uint64_t bytes = 0;
    std::filesystem::file_time_type time;
  };

  std::filesystem::path path_of(const std::string& key) const;
  std::string key_of(std::span<const TokenId> tokens) const;
  void scan();
  bool is_whole(const Entry& entry, std::span<const std::byte> contents) const;
  void drop_unwritten();
  void remove(const std::string& key, bool with_warning);
  void make_room(uint64_t bytes);
  void write_loop();

  const std::filesystem::path directory_;
  const std::string model_;
  StatePool& pool_;
  const uint64_t max_bytes_;
  const Warn warn_;
  std::map<std::string, Entry> entries_;  // by key
  std::vector<Unusable> unusable_;        // the oldest first
  uint64_t bytes_ = 0;                    // of both
  uint64_t clock_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Job> jobs_;
  std::vector<std::string> unwritten_;  // keys
  bool writing_ = false, stop_ = false;
  std::thread writer_;
};

}  // namespace calla
