#include "pull/hub.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "pull/pull_error.h"

namespace calla {
namespace {

using nlohmann::json;

constexpr int kAttempts = 4;
constexpr int kMaxPages = 100;

bool is_name_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' || c == '-';
}

bool is_hexadecimal(const std::string& text, size_t length) {
  return text.size() == length &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

// The next page of a listing: Link: <URL>; rel="next"
std::string next_page(const std::string& link) {
  if (link.find("rel=\"next\"") == std::string::npos) return "";
  const size_t open = link.find('<'), close = link.find('>');
  return open == std::string::npos || close == std::string::npos || close < open
             ? ""
             : link.substr(open + 1, close - open - 1);
}

}  // namespace

void validate_repo_id(std::string_view repo) {
  const size_t slash = repo.find('/');
  const auto is_name = [](std::string_view name) {
    if (name.empty() || name.size() > 96 || !std::all_of(name.begin(), name.end(), is_name_character)) return false;
    const char first = name.front(), last = name.back();
    if (first == '.' || first == '-' || last == '.' || last == '-') return false;
    return name.find("--") == std::string_view::npos && name.find("..") == std::string_view::npos;
  };
  const bool is_valid =
      slash != std::string_view::npos && is_name(repo.substr(0, slash)) && is_name(repo.substr(slash + 1));
  // These ends mark our own folders beside the models.
  const bool is_ours = repo.ends_with(".partial") || repo.ends_with(".old") || repo.ends_with(".lock");
  if (!is_valid || is_ours)
    throw UsageError("\"" + std::string(repo.substr(0, 100)) +
                     "\" is no repository id; expected ORG/NAME, such as mlx-community/Qwen3.6-35B-A3B-4bit");
}

void validate_revision(std::string_view revision) {
  const bool is_valid =
      !revision.empty() && revision.size() <= 200 && revision.find("..") == std::string_view::npos &&
      std::all_of(revision.begin(), revision.end(), [](char c) { return is_name_character(c) || c == '/'; });
  if (!is_valid)
    throw UsageError("\"" + std::string(revision.substr(0, 100)) + "\" is no revision (a branch, tag or commit)");
}

bool is_safe_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 200 && name.front() != '.' && name.front() != '-' &&
         std::all_of(name.begin(), name.end(), is_name_character);
}

bool is_passing(int status) { return status == 0 || status == 408 || status == 429 || status >= 500; }

std::string explain_status(const HttpResponse& response, const std::string& repo) {
  switch (response.status) {
    case 0:
      return "no answer: " + response.error;
    case 401:
      return "access to " + repo +
             " was denied (401): it does not exist, or it is private or gated; check the name, or set "
             "HF_TOKEN to a token that may read it";
    case 403:
      return "access to " + repo +
             " was denied (403): accept its terms on the hub's page, or set HF_TOKEN to a token that may "
             "read it";
    case 404:
      return repo + " or the file in it was not found (404); check the name and the revision";
    case 429:
      return "the hub asks to slow down (429); try again later";
    default:
      return "the hub answered with status " + std::to_string(response.status);
  }
}

HttpResponse Hub::fetch(const std::string& url, const std::string& repo) {
  for (int attempt = 1;; ++attempt) {
    HttpResponse response = client_.get(url, {"Accept: application/json"});
    if (response.status == 200 && response.is_complete()) return response;
    if (stop_ != nullptr && stop_->load()) throw PullError("stopped");
    const bool passing = !response.is_complete() || is_passing(response.status);
    if (!passing) throw PullError(explain_status(response, repo));
    if (attempt == kAttempts)
      throw PullError("cannot list the files of " + repo + " at " + printable_url(endpoint_) + ": " +
                      (response.error.empty() ? explain_status(response, repo) : response.error));
    std::this_thread::sleep_for(std::chrono::milliseconds(200) * (1 << attempt));
  }
}

RepoListing Hub::list(const std::string& repo, const std::string& revision) {
  const std::string base = endpoint_ + "/api/models/" + encode_path(repo);
  try {
    RepoListing listing;
    // A revision with a slash in it ("refs/pr/1") is one path segment here.
    std::string segment = encode_path(revision);
    for (size_t at = segment.find('/'); at != std::string::npos; at = segment.find('/', at + 3))
      segment.replace(at, 1, "%2F");
    const HttpResponse head = fetch(base + "/revision/" + segment, repo);
    listing.commit = json::parse(head.body).at("sha").get<std::string>();
    if (!is_hexadecimal(listing.commit, 40)) throw PullError("the hub named a commit that is none");
    std::string page = base + "/tree/" + listing.commit;
    for (int count = 0; !page.empty(); ++count) {
      if (count == kMaxPages) throw PullError(repo + " has too many files");
      if (url_origin(page) != url_origin(endpoint_)) throw PullError("the list of files continues at another host");
      const HttpResponse response = fetch(page, repo);
      for (const json& entry : json::parse(response.body)) {
        if (entry.at("type").get<std::string>() != "file") continue;
        RemoteFile file;
        file.name = entry.at("path").get<std::string>();
        file.size = entry.at("size").get<uint64_t>();
        if (entry.contains("lfs")) {
          file.sha256 = entry.at("lfs").at("oid").get<std::string>();
          file.size = entry.at("lfs").at("size").get<uint64_t>();
          if (file.sha256.starts_with("sha256:")) file.sha256.erase(0, 7);
          if (!is_hexadecimal(file.sha256, 64)) throw PullError("the hub gave no valid SHA-256 for a file");
        } else {
          file.git_blob = entry.at("oid").get<std::string>();
          if (!is_hexadecimal(file.git_blob, 40)) throw PullError("the hub gave no valid hash for a file");
        }
        listing.files.push_back(std::move(file));
      }
      page = next_page(response.header("link"));
    }
    return listing;
  } catch (const json::exception& error) {
    throw PullError("the hub at " + printable_url(endpoint_) + " answered something unexpected for " + repo + ": " +
                    error.what() + "; check HF_ENDPOINT");
  }
}

std::string Hub::file_url(const std::string& repo, const std::string& commit, const std::string& name) const {
  return endpoint_ + "/" + encode_path(repo) + "/resolve/" + commit + "/" + encode_path(name);
}

}  // namespace calla
