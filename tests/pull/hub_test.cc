#include "pull/hub.h"

#include <gtest/gtest.h>

#include "pull/digest.h"
#include "pull/pull_error.h"
#include "tests/pull/fake_hub.h"

namespace calla {
namespace {

TEST(RepoIds, AreChecked) {
  for (const char* good : {"mlx-community/Qwen3.6-35B-A3B-4bit", "a/b", "A_1/b.c_d"})
    EXPECT_NO_THROW(validate_repo_id(good)) << good;
  for (const std::string& bad : {std::string(),
                                 std::string("model"),
                                 std::string("a/b/c"),
                                 std::string("../b"),
                                 std::string("a/.."),
                                 std::string("a/.b"),
                                 std::string("a/b?x"),
                                 std::string("a/b c"),
                                 std::string("a//b"),
                                 std::string("/b"),
                                 std::string("a/"),
                                 std::string("a/b--c"),
                                 std::string("a/b.partial"),
                                 std::string("a/b.old"),
                                 std::string("a/b.lock"),
                                 std::string("-a/b"),
                                 std::string("a/b\n"),
                                 "a/" + std::string(97, 'x'),
                                 std::string("a/b\0c", 5),
                                 std::string("https://hub/a/b"),
                                 std::string("a/é")})
    EXPECT_THROW(validate_repo_id(bad), UsageError) << bad;
}

TEST(Revisions, AreChecked) {
  for (const char* good : {"main", "v1.0", "refs/pr/1", "0123456789abcdef"}) EXPECT_NO_THROW(validate_revision(good));
  for (const char* bad : {"", "..", "a/../b", "a b", "a?b", "a#b", "a%2e"})
    EXPECT_THROW(validate_revision(bad), UsageError) << bad;
}

TEST(FileNames, AreChecked) {
  for (const char* good : {"model-00001-of-00002.safetensors", "a_b.json"}) EXPECT_TRUE(is_safe_file_name(good));
  for (const char* bad : {"", ".", "..", ".git", "-x", "a/b", "a\\b", "a b", "a\n", "é"})
    EXPECT_FALSE(is_safe_file_name(bad)) << bad;
}

TEST(Digests, AreRight) {
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  Digest empty(Digest::Kind::kSha1);
  EXPECT_EQ(empty.finish(), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
}

TEST(Hub, StrangeAnswersAreErrors) {
  std::string body;
  TestServer server([&](const TestServer::Request& request) -> TestServer::Response {
    if (request.path.find("/revision/") != std::string::npos && body != "[]" && body != "<html>")
      return {.headers = {}, .body = R"({"sha":")" + std::string(40, 'c') + "\"}"};
    return {.headers = {}, .body = body};
  });
  HttpClient client({});
  Hub hub(server.origin(), client);
  for (const char* answer :
       {"[]", "<html>", R"({"error":1})", R"([{"type":"file"}])", R"([{"type":"file","path":"a","size":-1,"oid":"x"}])",
        R"([{"type":"file","path":"a","size":1,"oid":"short"}])",
        R"([{"type":"file","path":"a","size":1,"oid":"x","lfs":{"oid":"y","size":1}}])"}) {
    body = answer;
    EXPECT_THROW(hub.list("a/b", "main"), PullError) << answer;
  }
}

TEST(Hub, UrlsAreEncoded) {
  HttpClient client({});
  EXPECT_EQ(Hub("https://hub", client).file_url("a/b", "c", "d e.json"), "https://hub/a/b/resolve/c/d%20e.json");
}

}  // namespace
}  // namespace calla
