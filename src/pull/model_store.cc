#include "pull/model_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "pull/pull_error.h"

namespace calla {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kManifest = "calla-pull.json";
constexpr std::string_view kPartial = ".partial";

std::string folder_name(const std::string& repo) {
  validate_repo_id(repo);
  std::string name = repo;
  name.replace(name.find('/'), 1, "--");
  return name;
}

// Back from the folder's name; empty if it is none of ours.
std::string repo_of(const std::string& folder) {
  const size_t dashes = folder.find("--");
  if (dashes == std::string::npos) return "";
  std::string repo = folder;
  repo.replace(dashes, 2, "/");
  try {
    validate_repo_id(repo);
  } catch (const UsageError&) {
    return "";
  }
  return repo;
}

uint64_t folder_bytes(const fs::path& folder) {
  uint64_t total = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.is_regular_file(error)) total += static_cast<uint64_t>(entry.file_size(error));
  return total;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

ModelStore ModelStore::from_environment() {
  if (const std::string home = environment("CALLA_HOME"); !home.empty()) return ModelStore(home);
  const std::string home = environment("HOME");
  if (home.empty()) throw UsageError("neither CALLA_HOME nor HOME is set; set CALLA_HOME to the folder for models");
  return ModelStore(fs::path(home) / ".cache" / "calla");
}

fs::path ModelStore::path_of(const std::string& repo) const { return models() / folder_name(repo); }

fs::path ModelStore::partial_path_of(const std::string& repo) const {
  return models() / (folder_name(repo) + std::string(kPartial));
}

std::vector<StoredModel> ModelStore::list() const {
  std::map<std::string, StoredModel> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(models(), error)) {
    if (!entry.is_directory()) continue;
    std::string name = entry.path().filename().string();
    const bool is_partial = name.ends_with(kPartial);
    if (is_partial) name.resize(name.size() - kPartial.size());
    const std::string repo = repo_of(name);
    if (repo.empty()) continue;
    const std::optional<Manifest> manifest = is_partial ? std::nullopt : read_manifest(entry.path());
    if (!is_partial && !manifest) continue;  // somebody else's folder
    // A complete model counts before a newer version of it that is still incomplete.
    if (found.contains(repo) && !manifest) continue;
    found[repo] = {repo, entry.path(), folder_bytes(entry.path()), manifest ? manifest->commit : "",
                   manifest.has_value()};
  }
  std::vector<StoredModel> models;
  for (auto& [repo, model] : found) models.push_back(std::move(model));
  return models;
}

std::optional<fs::path> ModelStore::find(const std::string& repo) const {
  const fs::path path = path_of(repo);
  return read_manifest(path) ? std::optional(path) : std::nullopt;
}

uint64_t ModelStore::remove(const std::string& repo) const {
  const ModelLock lock(*this, repo);
  uint64_t freed = 0;
  bool found = false;
  for (const fs::path& path : {path_of(repo), partial_path_of(repo)}) {
    if (!fs::is_directory(fs::symlink_status(path))) continue;
    if (path == path_of(repo) && !read_manifest(path))
      throw PullError(path.string() + " was not made by calla pull; delete it by hand if it is not needed");
    found = true;
    freed += folder_bytes(path);
    fs::remove_all(path);
  }
  if (!found)
    throw UsageError("there is no model " + repo + " in " + models().string() + "; `calla list` shows what there is");
  return freed;
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  json files = json::object();
  for (const RemoteFile& file : manifest.files)
    files[file.name] = {{"size", file.size}, {"sha256", file.sha256}, {"git_blob", file.git_blob}};
  std::ofstream out(folder / kManifest, std::ios::binary | std::ios::trunc);
  out << json{{"repo", manifest.repo}, {"commit", manifest.commit}, {"files", files}}.dump(2) << "\n";
  out.close();
  if (!out) throw PullError("cannot write " + (folder / kManifest).string() + ": " + std::strerror(errno));
}

std::optional<Manifest> read_manifest(const fs::path& folder) {
  std::ifstream in(folder / kManifest, std::ios::binary);
  if (!in) return std::nullopt;
  const json read = json::parse(in, nullptr, false);
  try {
    Manifest manifest{read.at("repo").get<std::string>(), read.at("commit").get<std::string>(), {}};
    for (const auto& [name, file] : read.at("files").items())
      manifest.files.push_back({name, file.at("size").get<uint64_t>(), file.at("sha256").get<std::string>(),
                                file.at("git_blob").get<std::string>()});
    return manifest;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

ModelLock::ModelLock(const ModelStore& store, const std::string& repo) {
  std::error_code error;
  fs::create_directories(store.models(), error);
  if (error) throw PullError("cannot make the folder " + store.models().string() + ": " + error.message());
  path_ = store.path_of(repo).string() + ".lock";
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (descriptor_ < 0) throw PullError("cannot open " + path_.string() + ": " + std::strerror(errno));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    ::close(descriptor_);
    throw PullError("another calla is working on " + repo + "; wait until it is done");
  }
}

ModelLock::~ModelLock() {
  // The lock file stays: deleting it would let two holders in, one of each file.
  ::close(descriptor_);
}

}  // namespace calla
