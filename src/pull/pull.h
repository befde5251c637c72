#pragma once
// calla pull: a model from the hub into the store. Reading order of this folder: pull.h, hub.h (what there is),
// download.h (one file), http_client.h, model_store.h (where it goes), progress_line.h.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "pull/download.h"
#include "pull/model_store.h"

namespace calla {

struct PullProgress {
  uint64_t bytes_done = 0;  // on disk, earlier runs included
  uint64_t bytes_total = 0;
  int files_done = 0;
  int files_total = 0;
  double bytes_per_second = 0;  // over the last seconds; 0 while unknown
  double seconds_left = -1;     // negative while unknown
  int retries = 0;              // connections that were lost or refused
};

struct PullOptions {
  std::string endpoint = "https://huggingface.co";
  std::string token;              // never written anywhere, sent to `endpoint` only
  std::string revision = "main";  // a branch, tag or commit
  int connections = 4;            // files at once
  RetryPolicy retry;
  int connect_timeout_s = 20;
  int stall_timeout_s = 30;
  // Called by the pulling thread about ten times a second; false stops the pull, keeping what has arrived.
  std::function<bool(const PullProgress&)> progress;
  // Free bytes on the disk of a folder.
  std::function<uint64_t(const std::filesystem::path&)> free_bytes;

  // HF_ENDPOINT and HF_TOKEN.
  static PullOptions from_environment();
};

struct PullResult {
  std::filesystem::path path;
  std::string commit;
  uint64_t bytes = 0;           // of the model
  uint64_t bytes_received = 0;  // in this run
  bool was_current = false;     // this commit was there already
  bool was_stopped = false;     // `progress` said so; the next run goes on from here
};

// Downloads what Calla needs of a repository and checks every file's size and hash. The model appears in the store as a
// whole, or not at all. Throws PullError; UsageError if a name or a setting of the environment is none.
PullResult pull_model(const std::string& repo, const ModelStore& store, const PullOptions& options);

}  // namespace calla
