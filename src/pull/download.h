#pragma once
// One file from the hub to the disk: resumed where it was left, hashed on the way, checked at the end.
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>

#include "pull/http_client.h"
#include "pull/hub.h"

namespace calla {

// Shared by the threads of a pull.
struct TransferState {
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> bytes_done{0};      // on disk, of all files; falls when a part turns out to be unusable
  std::atomic<uint64_t> bytes_received{0};  // over the network, in this run
  std::atomic<int> retries{0};
};

struct RetryPolicy {
  int attempts = 6;          // in a row without a new byte
  int first_delay_ms = 500;  // doubled each time, at most kMaxDelay; the hub's Retry-After counts if it is longer
  int max_delay_ms = 30'000;
};

// Where a file's part waits while it is incomplete, and the bytes that are there.
std::filesystem::path part_path(const std::filesystem::path& file);
uint64_t part_size(const std::filesystem::path& file);

// Downloads to part_path(target) and renames to `target` when size and hash are right. A file at `target` is left alone:
// only checked ones get there. Throws PullError; the part is kept unless its hash was wrong.
void download_file(HttpClient& client, const std::string& url, const std::string& repo, const RemoteFile& file,
                   const std::filesystem::path& target, const RetryPolicy& policy, TransferState& state);

}  // namespace calla
