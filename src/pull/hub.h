#pragma once
// The model hub's interface: what files a repository has, and where they are.
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pull/http_client.h"

namespace calla {

struct RemoteFile {
  std::string name;
  uint64_t size = 0;
  std::string sha256;    // of the content, for large files
  std::string git_blob;  // git's SHA-1 of the blob, for small ones
};

struct RepoListing {
  std::string commit;  // all files are taken from this one, whatever happens to the branch meanwhile
  std::vector<RemoteFile> files;
};

// "ORG/NAME". Throws UsageError if the hub would not have such a name; a valid one is safe in paths and URLs.
void validate_repo_id(std::string_view repo);
void validate_revision(std::string_view revision);
// A plain file name: letters, digits and "._-", not hidden, no folder.
bool is_safe_file_name(std::string_view name);

class Hub {
 public:
  // Once `stop` is true, list() gives up.
  Hub(std::string endpoint, HttpClient& client, const std::atomic<bool>* stop = nullptr)
      : endpoint_(std::move(endpoint)), client_(client), stop_(stop) {}

  // The files at the top of the repository. Throws PullError: not found, no access, not reachable, strange answer.
  RepoListing list(const std::string& repo, const std::string& revision);
  std::string file_url(const std::string& repo, const std::string& commit, const std::string& name) const;

 private:
  HttpResponse fetch(const std::string& url, const std::string& repo);

  std::string endpoint_;
  HttpClient& client_;
  const std::atomic<bool>* stop_;
};

// What an answer other than 200 or 206 means to the user.
std::string explain_status(const HttpResponse& response, const std::string& repo);
// Whether asking again may help.
bool is_passing(int status);

}  // namespace calla
