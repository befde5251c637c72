#include "pull/pull.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <unordered_map>

#include "pull/pull_error.h"

namespace calla {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::array<std::string_view, 6> kSmallFiles = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", kIndex};
constexpr std::array<std::string_view, 2> kNeededFiles = {"config.json", "tokenizer.json"};
constexpr uint64_t kSpareBytes = 64u << 20;  // left free on the disk
constexpr uint64_t kMaxSmallFile = 256u << 20;

// Speed over the last seconds, from samples of a counter.
class SpeedMeter {
 public:
  double update(uint64_t received) {
    const Clock::time_point now = Clock::now();
    samples_.emplace_back(now, received);
    while (samples_.size() > 2 && now - samples_.front().first > std::chrono::seconds(8)) samples_.pop_front();
    const double seconds = std::chrono::duration<double>(now - samples_.front().first).count();
    return seconds < 0.5 ? 0 : static_cast<double>(received - samples_.front().second) / seconds;
  }

 private:
  std::deque<std::pair<Clock::time_point, uint64_t>> samples_;
};

// Makes a folder's entries survive a power cut.
void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // not all file systems can; the renames are still in order
  ::fsync(descriptor);
  ::close(descriptor);
}

class Pull {
 public:
  Pull(std::string repo, const ModelStore& store, const PullOptions& options)
      : repo_(std::move(repo)),
        options_(options),
        store_(store),
        target_(store.path_of(repo_)),
        partial_(store.partial_path_of(repo_)),
        client_(http_options()),
        hub_(options_.endpoint, client_, &state_.stop) {}

  PullResult run() {
    RepoListing listing;
    if (!watch(1, [&] { listing = hub_.list(repo_, options_.revision); })) return finish_result(true);
    commit_ = listing.commit;
    for (const RemoteFile& file : listing.files) by_name_.emplace(file.name, file);
    const std::optional<Manifest> present = read_manifest(target_);
    if (present && present->commit == commit_ && is_whole(*present)) {
      PullResult result{.path = target_, .commit = commit_, .was_current = true};
      for (const RemoteFile& file : present->files) result.bytes += file.size;
      return result;
    }
    start_partial();
    for (const std::string_view name : kNeededFiles)
      if (!by_name_.contains(std::string(name)))
        throw PullError(repo_ + " has no " + std::string(name) + "; it is no MLX or safetensors checkpoint");
    std::vector<RemoteFile> small;
    for (const std::string_view name : kSmallFiles)
      if (const auto found = by_name_.find(std::string(name)); found != by_name_.end()) {
        if (found->second.size > kMaxSmallFile) throw PullError(found->first + " is too large to be what it is called");
        small.push_back(found->second);
      }
    for (const RemoteFile& file : small) add(file);
    const bool has_index = by_name_.contains(kIndex);
    // Without an index the weights are known at once, and the totals right from the start.
    if (!has_index) add_weights(all_weight_files());
    check_space();
    if (has_index && download(small)) {
      add_weights(indexed_files());
      check_space();
    }
    if (state_.stop || !download(files_)) return finish_result(true);
    commit_files();
    return finish_result(false);
  }

 private:
  HttpOptions http_options() {
    return {.token = options_.token,
            .connect_timeout_s = options_.connect_timeout_s,
            .stall_timeout_s = options_.stall_timeout_s,
            .stop = &state_.stop};
  }

  bool is_whole(const Manifest& manifest) const {
    return std::all_of(manifest.files.begin(), manifest.files.end(), [&](const RemoteFile& file) {
      std::error_code error;
      return is_safe_file_name(file.name) && fs::file_size(target_ / file.name, error) == file.size && !error;
    });
  }

  // Keeps what an interrupted run left, unless it was of another commit.
  void start_partial() {
    std::error_code error;
    const std::optional<Manifest> begun = read_manifest(partial_);
    if (!begun || begun->commit != commit_) fs::remove_all(partial_);
    fs::create_directories(partial_, error);
    if (error) throw PullError("cannot make the folder " + partial_.string() + ": " + error.message());
    write_manifest(partial_, {repo_, commit_, {}});
  }

  std::vector<std::string> all_weight_files() const {
    std::vector<std::string> names;
    for (const auto& [name, file] : by_name_)
      if (name.ends_with(".safetensors") && name.find('/') == std::string::npos) names.push_back(name);
    std::sort(names.begin(), names.end());
    return names;
  }

  std::vector<std::string> indexed_files() const {
    std::ifstream in(partial_ / kIndex, std::ios::binary);
    const nlohmann::json index = nlohmann::json::parse(in, nullptr, false);
    std::set<std::string> names;
    try {
      for (const auto& [tensor, name] : index.at("weight_map").items()) names.insert(name.get<std::string>());
    } catch (const nlohmann::json::exception&) {
      throw PullError(repo_ + ": " + kIndex + " has no valid weight_map");
    }
    return {names.begin(), names.end()};
  }

  void add_weights(const std::vector<std::string>& names) {
    if (names.empty()) throw PullError(repo_ + " has no .safetensors files; choose an MLX or safetensors checkpoint");
    for (const std::string& name : names) {
      if (!is_safe_file_name(name) || !name.ends_with(".safetensors"))
        throw PullError(repo_ + ": the index names a weight file that is not allowed");
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) throw PullError(repo_ + ": " + name + " is in the index but not in the repository");
      add(found->second);
    }
  }

  void add(const RemoteFile& file) {
    files_.push_back(file);
    bytes_total_ += file.size;
    if (fs::exists(partial_ / file.name)) {
      state_.bytes_done += file.size;
      ++files_done_;
    } else {
      state_.bytes_done += std::min(part_size(partial_ / file.name), file.size);
    }
  }

  void check_space() const {
    const uint64_t done = state_.bytes_done;
    const uint64_t needed = bytes_total_ > done ? bytes_total_ - done : 0;
    const uint64_t free = options_.free_bytes ? options_.free_bytes(partial_) : fs::space(partial_).available;
    if (needed + kSpareBytes > free) {
      const auto megabytes = [](uint64_t bytes) { return std::to_string((bytes + 999'999) / 1'000'000) + " MB"; };
      throw PullError("not enough space in " + store_.models().string() + ": " + megabytes(needed + kSpareBytes) +
                      " are needed, " + megabytes(free) + " are free; make room, or set CALLA_HOME to another disk");
    }
  }

  // Returns false if it was stopped.
  bool download(const std::vector<RemoteFile>& wanted) {
    std::vector<RemoteFile> queue;
    for (const RemoteFile& file : wanted)
      if (!fs::exists(partial_ / file.name)) queue.push_back(file);
    // Largest last, since the threads take from the back.
    std::sort(queue.begin(), queue.end(), [](const RemoteFile& a, const RemoteFile& b) { return a.size < b.size; });
    std::mutex mutex;
    const int n_threads = std::min(std::clamp(options_.connections, 1, 16), static_cast<int>(queue.size()));
    return watch(n_threads, [&] {
      HttpClient client(http_options());
      for (;;) {
        RemoteFile file;
        {
          const std::lock_guard lock(mutex);
          if (queue.empty() || state_.stop) return;
          file = std::move(queue.back());
          queue.pop_back();
        }
        download_file(client, hub_.file_url(repo_, commit_, file.name), repo_, file, partial_ / file.name,
                      options_.retry, state_);
        if (!state_.stop) ++files_done_;
      }
    });
  }

  // Runs `work` on so many threads, reporting progress meanwhile. Throws the first failure; returns false if the user
  // stopped it.
  bool watch(int n_threads, const std::function<void()>& work) {
    std::mutex mutex;
    std::exception_ptr failure;
    std::atomic<int> running{n_threads};
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; ++i)
      threads.emplace_back([&] {
        try {
          work();
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
          state_.stop = true;  // the others keep what they have
        }
        --running;
      });
    while (running > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      if (Clock::now() - last_report_ >= std::chrono::milliseconds(100) && !report()) {
        user_stopped_ = true;
        state_.stop = true;
      }
    }
    for (std::thread& thread : threads) thread.join();
    if (failure && !user_stopped_) std::rethrow_exception(failure);
    if (!state_.stop) report();
    return !state_.stop;
  }

  bool report() {
    last_report_ = Clock::now();
    PullProgress progress;
    progress.bytes_done = state_.bytes_done;
    progress.bytes_total = bytes_total_;
    progress.files_done = files_done_;
    progress.files_total = static_cast<int>(files_.size());
    progress.bytes_per_second = meter_.update(state_.bytes_received);
    progress.retries = state_.retries;
    if (progress.bytes_per_second > 0)
      progress.seconds_left =
          static_cast<double>(bytes_total_ - std::min(progress.bytes_done, bytes_total_)) / progress.bytes_per_second;
    return !options_.progress || options_.progress(progress);
  }

  // The model takes its place; an older version goes only when the new one stands.
  void commit_files() {
    write_manifest(partial_, {repo_, commit_, files_});
    sync_folder(partial_);
    const fs::path old = target_.string() + ".old";
    fs::remove_all(old);
    if (fs::exists(fs::symlink_status(target_))) {
      if (!read_manifest(target_))
        throw PullError(target_.string() + " is in the way and was not made by calla pull; move it away");
      fs::rename(target_, old);
    }
    fs::rename(partial_, target_);
    sync_folder(store_.models());
    fs::remove_all(old);
  }

  PullResult finish_result(bool was_stopped) const {
    return {.path = was_stopped ? partial_ : target_,
            .commit = commit_,
            .bytes = bytes_total_,
            .bytes_received = state_.bytes_received,
            .was_stopped = was_stopped};
  }

  std::string repo_;
  const PullOptions& options_;
  const ModelStore& store_;
  fs::path target_, partial_;
  TransferState state_;
  HttpClient client_;
  Hub hub_;
  std::string commit_;
  std::unordered_map<std::string, RemoteFile> by_name_;
  std::vector<RemoteFile> files_;  // all that are wanted
  uint64_t bytes_total_ = 0;
  std::atomic<int> files_done_{0};
  SpeedMeter meter_;
  Clock::time_point last_report_ = Clock::now() - std::chrono::seconds(1);
  bool user_stopped_ = false;
};

}  // namespace

PullOptions PullOptions::from_environment() {
  PullOptions options;
  if (const char* endpoint = std::getenv("HF_ENDPOINT"); endpoint != nullptr && *endpoint != '\0')
    options.endpoint = endpoint;
  if (const char* token = std::getenv("HF_TOKEN"); token != nullptr) options.token = token;
  return options;
}

PullResult pull_model(const std::string& repo, const ModelStore& store, const PullOptions& options) {
  validate_repo_id(repo);
  validate_revision(options.revision);
  PullOptions cleaned = options;
  while (cleaned.endpoint.ends_with("/")) cleaned.endpoint.pop_back();
  if (url_origin(cleaned.endpoint).empty())
    throw UsageError("HF_ENDPOINT is no http or https address: \"" + printable_url(cleaned.endpoint) + "\"");
  const bool is_header_safe =
      std::all_of(cleaned.token.begin(), cleaned.token.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (!is_header_safe) throw UsageError("HF_TOKEN has characters in it that no token has");
  const ModelLock lock(store, repo);
  try {
    return Pull(repo, store, cleaned).run();
  } catch (const fs::filesystem_error& error) {
    throw PullError(error.what());
  }
}

}  // namespace calla
