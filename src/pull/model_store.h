#pragma once
// The models on this machine: HOME/models/ORG--NAME, HOME being $CALLA_HOME or ~/.cache/calla. A folder of that name is
// complete and checked; one with ".partial" after it is being downloaded, or was interrupted.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pull/hub.h"

namespace calla {

struct StoredModel {
  std::string repo;
  std::filesystem::path path;
  uint64_t bytes = 0;
  std::string commit;  // empty if the download is incomplete
  bool is_complete = false;
};

class ModelStore {
 public:
  explicit ModelStore(std::filesystem::path home) : home_(std::move(home)) {}
  // From the environment. Throws UsageError if neither CALLA_HOME nor HOME is set.
  static ModelStore from_environment();

  std::filesystem::path models() const { return home_ / "models"; }
  std::filesystem::path path_of(const std::string& repo) const;  // throws UsageError for an invalid id
  std::filesystem::path partial_path_of(const std::string& repo) const;

  // By repository id; incomplete ones too.
  std::vector<StoredModel> list() const;
  // The folder of a complete model.
  std::optional<std::filesystem::path> find(const std::string& repo) const;
  // Deletes a model and what was downloaded of it; returns the bytes freed. Throws UsageError if there is nothing,
  // PullError if it is being downloaded.
  uint64_t remove(const std::string& repo) const;

 private:
  std::filesystem::path home_;
};

// Kept in a complete model's folder; says what it holds.
struct Manifest {
  std::string repo;
  std::string commit;
  std::vector<RemoteFile> files;
};
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
// Nothing if there is none, or it cannot be read.
std::optional<Manifest> read_manifest(const std::filesystem::path& folder);

// Holds one model against another process; throws PullError if it is taken.
class ModelLock {
 public:
  ModelLock(const ModelStore& store, const std::string& repo);
  ~ModelLock();
  ModelLock(const ModelLock&) = delete;
  ModelLock& operator=(const ModelLock&) = delete;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace calla
