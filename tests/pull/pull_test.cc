// Whole pulls from a hub that misbehaves.
#include "pull/pull.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <fstream>
#include <sstream>

#include "pull/pull_error.h"
#include "tests/pull/fake_hub.h"

namespace calla {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

class PullTest : public testing::Test {
 protected:
  PullTest()
      : home_(fs::temp_directory_path() / ("calla-pull-" + std::to_string(::getpid()) + "-" + name())), store_(home_) {
    fs::remove_all(home_);
    hub_.files = sharded_repository(300'000);
  }
  ~PullTest() override { fs::remove_all(home_); }

  static std::string name() { return testing::UnitTest::GetInstance()->current_test_info()->name(); }

  PullOptions options() const {
    PullOptions options;
    options.endpoint = hub_.endpoint();
    options.retry = {.attempts = 3, .first_delay_ms = 5, .max_delay_ms = 100};
    options.stall_timeout_s = 2;
    return options;
  }
  PullResult pull() { return pull_model("org/model", store_, options()); }

  void expect_model_is_right() {
    const fs::path folder = home_ / "models" / "org--model";
    for (const auto& [name, file] : hub_.files) {
      const bool is_needed =
          name != "README.md" && name.find('/') == std::string::npos && name != "consolidated.safetensors";
      EXPECT_EQ(fs::exists(folder / name), is_needed) << name;
      if (is_needed) {
        EXPECT_TRUE(read(folder / name) == file.content) << name;
      }
    }
    EXPECT_FALSE(fs::exists(folder.string() + ".partial"));
    EXPECT_FALSE(fs::exists(folder.string() + ".old"));
    for (const auto& entry : fs::directory_iterator(folder)) {
      EXPECT_FALSE(entry.path().string().ends_with(".part")) << entry.path();
      EXPECT_FALSE(entry.path().string().ends_with(".etag")) << entry.path();
    }
  }
  void expect_nothing_is_there() {
    EXPECT_FALSE(fs::exists(home_ / "models" / "org--model"));
    EXPECT_FALSE(store_.find("org/model"));
  }
  std::string failure() {
    try {
      pull();
    } catch (const PullError& error) {
      return error.what();
    }
    ADD_FAILURE() << "the pull worked";
    return "";
  }

  FakeHub hub_;
  fs::path home_;
  ModelStore store_;
};

TEST_F(PullTest, FetchesWhatIsNeededAndChecksIt) {
  const PullResult result = pull();
  EXPECT_FALSE(result.was_current);
  EXPECT_FALSE(result.was_stopped);
  EXPECT_EQ(result.commit, hub_.commit());
  EXPECT_EQ(result.path, home_ / "models" / "org--model");
  EXPECT_EQ(result.bytes, result.bytes_received);
  expect_model_is_right();
  EXPECT_EQ(store_.find("org/model"), result.path);
}

TEST_F(PullTest, TheSecondTimeNothingIsFetched) {
  pull();
  hub_.log.clear();
  const PullResult result = pull();
  EXPECT_TRUE(result.was_current);
  EXPECT_EQ(result.bytes_received, 0u);
  EXPECT_EQ(hub_.count("resolve"), 0u);
}

TEST_F(PullTest, WithoutAnIndexAllWeightFilesAtTheTopAreTaken) {
  hub_.files.erase("model.safetensors.index.json");
  hub_.files.erase("consolidated.safetensors");
  pull();
  expect_model_is_right();
}

TEST_F(PullTest, FollowsThePagesOfTheList) {
  hub_.page_size = 3;
  pull();
  expect_model_is_right();
  EXPECT_GE(hub_.count("cursor"), 3u);
}

TEST_F(PullTest, CutConnectionsAreResumedWhereTheyBroke) {
  hub_.cuts = {100'000, 50'000, 0, 1, 70'000};
  const PullResult result = pull();
  expect_model_is_right();
  EXPECT_GE(hub_.count("bytes="), 3u);
  EXPECT_EQ(result.bytes_received, result.bytes);  // no byte twice
}

TEST_F(PullTest, AnInterruptedPullGoesOnInTheNextRun) {
  PullOptions first = options();
  first.connections = 1;
  hub_.cuts = {0, 120'000, 1, 1, 1};
  first.retry.attempts = 1;
  EXPECT_THROW(pull_model("org/model", store_, first), PullError);
  expect_nothing_is_there();
  ASSERT_EQ(store_.list().size(), 1u);
  EXPECT_FALSE(store_.list()[0].is_complete);
  hub_.cuts.clear();
  const PullResult result = pull();
  expect_model_is_right();
  EXPECT_LE(result.bytes_received, result.bytes - 120'000);
  EXPECT_TRUE(store_.list()[0].is_complete);
}

TEST_F(PullTest, AServerWithoutRangesStartsOver) {
  hub_.cuts = {0, 100'000, 50'000};
  hub_.ignores_ranges = true;
  pull();
  expect_model_is_right();
}

TEST_F(PullTest, AWrongRangeIsNotBelieved) {
  hub_.cuts = {0, 100'000};
  hub_.sends_wrong_range = true;
  pull();
  expect_model_is_right();
}

TEST_F(PullTest, AFileThatChangedOnTheServerIsNotMixed) {
  PullOptions first = options();
  first.connections = 1;
  first.retry.attempts = 1;
  hub_.cuts = {0, 120'000};
  EXPECT_THROW(pull_model("org/model", store_, first), PullError);
  // The network has other bytes now, under another tag; the old ones cannot be gone on with.
  for (const char* shard : {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"})
    hub_.files[shard].content[0] ^= 1;
  pull();
  expect_model_is_right();
}

TEST_F(PullTest, DamagedPartsOnTheDiskAreFetchedAgain) {
  PullOptions first = options();
  first.connections = 1;
  first.retry.attempts = 1;
  hub_.cuts = {0, 120'000};
  EXPECT_THROW(pull_model("org/model", store_, first), PullError);
  const fs::path part = home_ / "models" / "org--model.partial" / "model-00001-of-00002.safetensors.part";
  ASSERT_EQ(fs::file_size(part), 120'000u);
  std::fstream(part, std::ios::in | std::ios::out | std::ios::binary).seekp(500).put('x').put('y').put('z');
  pull();
  expect_model_is_right();
}

TEST_F(PullTest, WrongHashesAreRefused) {
  hub_.files["model-00002-of-00002.safetensors"].wrong_hash = std::string(64, '0');
  EXPECT_THAT(failure(), HasSubstr("model-00002-of-00002.safetensors: the content does not have the hash"));
  expect_nothing_is_there();
  EXPECT_EQ(hub_.count("network GET /blobs/model-00002"), 2u);
}

TEST_F(PullTest, WrongHashesOfSmallFilesAreRefused) {
  hub_.files["config.json"].wrong_hash = std::string(40, '0');
  EXPECT_THAT(failure(), HasSubstr("config.json: the content does not have the hash"));
  expect_nothing_is_there();
}

TEST_F(PullTest, PassingTroubleIsWaitedFor) {
  hub_.failures = {503, 429, 500};
  pull();
  expect_model_is_right();
}

TEST_F(PullTest, TroubleThatStaysIsReported) {
  hub_.failures.assign(100, 503);
  EXPECT_THAT(failure(), testing::AllOf(HasSubstr("503"), HasSubstr("gave up after 3 attempts")));
  hub_.failures.assign(100, 429);
  EXPECT_THAT(failure(), HasSubstr("slow down"));
}

TEST_F(PullTest, WaitsAsLongAsTheHubAsks) {
  hub_.failures = {429};
  hub_.extra_failure_header = "Retry-After: 1";
  PullOptions patient = options();
  patient.retry.max_delay_ms = 5000;
  const auto begin = std::chrono::steady_clock::now();
  pull_model("org/model", store_, patient);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(950));
}

TEST_F(PullTest, AStalledConnectionIsGivenUpAndResumed) {
  hub_.stall_ms = 6000;
  hub_.files = {
      {"config.json", {"{}"}}, {"tokenizer.json", {"{}"}}, {"model.safetensors", {std::string(50'000, 'w'), true}}};
  hub_.stalls = 1;
  PullOptions quick = options();
  int retries = 0;
  quick.progress = [&](const PullProgress& progress) {
    retries = progress.retries;
    return true;
  };
  quick.stall_timeout_s = 1;
  pull_model("org/model", store_, quick);
  expect_model_is_right();
  EXPECT_EQ(retries, 1);
  EXPECT_EQ(hub_.count("network GET /blobs/model.safetensors?Signature=secret bytes=25000-"), 1u);
}

TEST_F(PullTest, MissingThingsAreNamed) {
  EXPECT_THROW(pull_model("org/other", store_, options()), PullError);
  hub_.files.erase("tokenizer.json");
  EXPECT_THAT(failure(), HasSubstr("has no tokenizer.json"));
  hub_.files = sharded_repository(1000);
  hub_.files.erase("model-00002-of-00002.safetensors");
  EXPECT_THAT(failure(), HasSubstr("model-00002-of-00002.safetensors is in the index but not in the repository"));
  hub_.files = {{"config.json", {"{}"}}, {"tokenizer.json", {"{}"}}, {"model.gguf", {"x", true}}};
  EXPECT_THAT(failure(), HasSubstr("has no .safetensors files"));
}

TEST_F(PullTest, AFileThatVanishedIsReportedAtOnce) {
  hub_.failures = {404};
  EXPECT_THAT(failure(), HasSubstr("not found (404)"));
}

TEST_F(PullTest, TheTokenGoesToTheHubOnly) {
  hub_.token = "hf_verysecret";
  EXPECT_THAT(failure(), testing::AllOf(HasSubstr("401"), HasSubstr("HF_TOKEN")));
  PullOptions with_token = options();
  with_token.token = "hf_wrong";
  try {
    pull_model("org/model", store_, with_token);
    FAIL() << "worked";
  } catch (const PullError& error) {
    EXPECT_THAT(error.what(), Not(HasSubstr("hf_wrong")));
  }
  with_token.token = hub_.token;
  pull_model("org/model", store_, with_token);
  expect_model_is_right();
  EXPECT_FALSE(hub_.token_leaked);
  with_token.token = "a\r\nX: y";
  EXPECT_THROW(pull_model("org/model", store_, with_token), UsageError);
}

TEST_F(PullTest, AFullDiskIsSeenBefore) {
  PullOptions small = options();
  small.free_bytes = [](const fs::path&) { return 70'000'000u; };
  pull_model("org/model", store_, small);  // just enough with the spare room
  store_.remove("org/model");
  small.free_bytes = [](const fs::path&) { return 67'200'000u; };
  try {
    pull_model("org/model", store_, small);
    FAIL() << "worked";
  } catch (const PullError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("not enough space"), HasSubstr("CALLA_HOME")));
  }
  expect_nothing_is_there();
  EXPECT_EQ(hub_.count("network GET /blobs/model-00001"), 1u);
}

// A limit on the size of files makes writes fail as a full disk does.
TEST_F(PullTest, ADiskThatFillsUpOnTheWayKeepsWhatIsThere) {
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 200'000;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const std::string what = failure();
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(what,
              testing::AllOf(HasSubstr("cannot write model-00001-of-00002.safetensors.part"), HasSubstr("make room")));
  expect_nothing_is_there();
  const PullResult result = pull();
  expect_model_is_right();
  EXPECT_LT(result.bytes_received, result.bytes);
}

TEST_F(PullTest, StoppingKeepsTheParts) {
  PullOptions stopped = options();
  stopped.connections = 1;
  hub_.stall_ms = 400;
  stopped.progress = [](const PullProgress& progress) { return progress.bytes_done < 150'000; };
  const PullResult result = pull_model("org/model", store_, stopped);
  EXPECT_TRUE(result.was_stopped);
  expect_nothing_is_there();
  hub_.stall_ms = 0;
  EXPECT_LT(pull().bytes_received, result.bytes);
  expect_model_is_right();
}

TEST_F(PullTest, StoppingWorksBeforeTheHubAnswers) {
  TestServer silent(
      [](const TestServer::Request&) -> TestServer::Response { return {.body = "[]  ", .stall_ms = 20'000}; });
  PullOptions stopped = options();
  stopped.endpoint = silent.origin();
  stopped.stall_timeout_s = 15;
  stopped.progress = [](const PullProgress&) { return false; };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(pull_model("org/model", store_, stopped).was_stopped);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
}

TEST_F(PullTest, ProgressOnlyGrowsAndEndsAtAll) {
  PullOptions watched = options();
  hub_.stall_ms = 250;
  std::vector<PullProgress> seen;
  watched.progress = [&](const PullProgress& progress) {
    seen.push_back(progress);
    return true;
  };
  const PullResult result = pull_model("org/model", store_, watched);
  ASSERT_GE(seen.size(), 3u);
  std::erase_if(seen, [](const PullProgress& progress) { return progress.bytes_total == 0; });  // still listing
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_GE(seen[i].bytes_done, seen[i - 1].bytes_done);
  EXPECT_EQ(seen.back().bytes_done, result.bytes);
  EXPECT_EQ(seen.back().bytes_total, result.bytes);
  EXPECT_EQ(seen.back().files_done, seen.back().files_total);
}

TEST_F(PullTest, ANewVersionReplacesTheOldOne) {
  pull();
  hub_.set_commit('b');
  hub_.files["config.json"].content = R"({"model_type":"newer"})";
  const PullResult result = pull();
  EXPECT_FALSE(result.was_current);
  EXPECT_EQ(result.commit, std::string(40, 'b'));
  expect_model_is_right();
}

TEST_F(PullTest, AnIndexCannotNameFilesElsewhere) {
  for (const char* name : {"../evil.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden.safetensors",
                           "config.json", "model.safetensors/../x"}) {
    hub_.files["model.safetensors.index.json"].content = std::string(R"({"weight_map":{"a":")") + name + "\"}}";
    hub_.files[name] = {name == std::string("config.json") ? "{}" : "x", false};
    EXPECT_THAT(failure(), HasSubstr("a weight file that is not allowed")) << name;
    store_.remove("org/model");
  }
  hub_.files["model.safetensors.index.json"].content = "[1]";
  EXPECT_THAT(failure(), HasSubstr("no valid weight_map"));
}

TEST_F(PullTest, ForeignFoldersAreLeftAlone) {
  fs::create_directories(home_ / "models" / "org--model");
  std::ofstream(home_ / "models" / "org--model" / "mine.txt") << "mine";
  EXPECT_THAT(failure(), HasSubstr("is in the way"));
  EXPECT_EQ(read(home_ / "models" / "org--model" / "mine.txt"), "mine");
  EXPECT_THROW(store_.remove("org/model"), PullError);
}

TEST_F(PullTest, OneAtATime) {
  const ModelLock lock(store_, "org/model");
  EXPECT_THAT(failure(), HasSubstr("another calla"));
}

}  // namespace
}  // namespace calla
