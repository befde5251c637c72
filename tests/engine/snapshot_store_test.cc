// Snapshots on disk: a new process goes on where the old one stopped, and damaged files cost nothing but time.
#include "engine/snapshot_store.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <random>

#include "backend/create.h"
#include "engine/scheduler.h"
#include "selftest/random_model.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

class Sink : public GenerationSink {
 public:
  bool on_token(const TokenEvent& event) override {
    tokens.push_back(event.token);
    return true;
  }
  void on_finished(const GenerationResult& r) override { result = r; }
  std::vector<TokenId> tokens;
  GenerationResult result;
};

const RandomModel& model() {
  static const RandomModel instance(tiny_shape(4), 3);
  return instance;
}

std::vector<TokenId> prompt(size_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<TokenId> tokens(n);
  for (TokenId& t : tokens) t = static_cast<TokenId>(random() % 4096);
  return tokens;
}

class SnapshotStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "calla-store-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  // A fresh process: backend, scheduler and what the directory holds.
  struct Process {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Scheduler> scheduler;
    std::vector<std::string> warnings;

    std::shared_ptr<Sink> ask(std::vector<TokenId> tokens, std::vector<int> boundaries = {}) {
      GenerationRequest request;
      request.prompt = std::move(tokens);
      request.boundaries = std::move(boundaries);
      request.max_tokens = 4;
      const auto sink = std::make_shared<Sink>();
      const auto generation = std::make_shared<Generation>(std::move(request), sink);
      scheduler->submit(generation);
      scheduler->run_until_finished(generation);
      return sink;
    }
  };
  std::unique_ptr<Process> start(const std::string& model_id = "m", uint64_t bytes = uint64_t{1} << 30) {
    auto process = std::make_unique<Process>();
    BackendOptions backend_options;
    backend_options.max_rows = 64;
    process->backend = create_backend(cpu_backend_info().available ? "cpu" : "reference", model().shape(),
                                      model().weights(), backend_options);
    SchedulerOptions options;
    options.context = 1024;
    options.prefill_chunk = 64;
    options.cache_snapshots = 8;
    options.cache_dir = directory_;
    options.cache_dir_bytes = bytes;
    options.model_id = model_id;
    options.warn = [p = process.get()](const std::string& line) { p->warnings.push_back(line); };
    process->scheduler = std::make_unique<Scheduler>(*process->backend, model().shape(), options);
    return process;
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> paths;
    for (const auto& item : fs::directory_iterator(directory_)) paths.push_back(item.path());
    return paths;
  }
  fs::path directory_;
};

TEST_F(SnapshotStoreTest, TheNextTurnSurvivesARestart) {
  std::vector<TokenId> conversation = prompt(150);
  std::vector<TokenId> first;
  {
    const auto process = start();
    first = process->ask(conversation, {40, 140})->tokens;
  }
  conversation.insert(conversation.end(), first.begin(), first.end());
  for (TokenId t : prompt(20, 2)) conversation.push_back(t);
  std::vector<TokenId> second;
  {
    const auto process = start();
    const auto sink = process->ask(conversation);
    EXPECT_EQ(sink->result.cached_tokens, 153);  // 150 + 4 - 1
    EXPECT_TRUE(process->warnings.empty());
    second = sink->tokens;
    // An edit after 100 falls back to the boundary at 40.
    std::vector<TokenId> edited = conversation;
    edited[100] ^= 1;
    EXPECT_EQ(process->ask(edited)->result.cached_tokens, 40);
  }
  fs::remove_all(directory_);
  EXPECT_EQ(start()->ask(conversation)->tokens, second);
}

TEST_F(SnapshotStoreTest, KvRowsAreWrittenOnce) {
  uintmax_t bytes[2] = {};
  for (int round = 0; round < 2; ++round) {
    const auto process = start();
    std::vector<TokenId> conversation = prompt(600);
    process->ask(conversation, {300, 500, 590});
    process.get()->scheduler.reset();
    for (const fs::path& path : files()) bytes[round] += fs::file_size(path);
    const uint64_t whole = process->backend->recurrent_slot_bytes() * files().size() +
                           process->backend->kv_page_bytes() * (10 + files().size());
    EXPECT_LE(bytes[round], whole + 100000);
  }
  EXPECT_EQ(bytes[0], bytes[1]);  // the second process found all of it
}

TEST_F(SnapshotStoreTest, OtherModelsAndDamageNeverMatch) {
  const std::vector<TokenId> conversation = prompt(150);
  const std::vector<TokenId> answer = start()->ask(conversation, {70, 140})->tokens;
  {
    const auto other = start("another model");
    EXPECT_EQ(other->ask(conversation)->result.cached_tokens, 0);
    EXPECT_FALSE(other->warnings.empty());
  }
  fs::remove_all(directory_);
  start()->ask(conversation, {70, 140});
  std::mt19937 random(3);
  for (int round = 0; round < 12; ++round) {
    const auto paths = files();
    if (paths.empty()) break;
    const fs::path victim = paths[random() % paths.size()];
    switch (round % 4) {
      case 0:
        fs::resize_file(victim, fs::file_size(victim) - 1);
        break;
      case 1:
        fs::resize_file(victim, 10);
        break;
      case 2:
        std::ofstream(victim, std::ios::trunc) << "nonsense";
        break;
      default: {
        std::fstream file(victim, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(static_cast<std::streamoff>(random() % fs::file_size(victim)));
        file.put(static_cast<char>(random()));
      }
    }
    const auto process = start();
    EXPECT_EQ(process->ask(conversation, {70, 140})->tokens, answer) << "round " << round;
  }
}

TEST_F(SnapshotStoreTest, LeftoversOfACrashAreRemoved) {
  std::ofstream(directory_ / "half.snapshot.tmp") << "half";
  start();
  EXPECT_TRUE(files().empty());
}

TEST_F(SnapshotStoreTest, WhatElseIsInTheDirectoryDoesNoHarm) {
  const std::vector<TokenId> answer = start()->ask(prompt(150), {70, 140})->tokens;
  const fs::path victim = files().front();
  fs::create_directory(directory_ / "folder.snapshot");
  ASSERT_EQ(::mkfifo((directory_ / "pipe.snapshot").c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", directory_ / "zeros.snapshot");
  fs::create_symlink("nowhere", directory_ / "dangling.snapshot");
  std::ofstream(directory_ / "mine.tmp") << "not ours";
  std::ofstream(directory_ / "empty.snapshot");
  fs::copy_file(victim, directory_ / "another-name.snapshot");
  std::ofstream(directory_ / "huge.snapshot");
  fs::resize_file(directory_ / "huge.snapshot", uintmax_t{1} << 34);  // sparse
  const auto process = start("m", uint64_t{1} << 35);
  EXPECT_EQ(process->warnings.size(), 3u);
  const auto sink = process->ask(prompt(150), {70, 140});
  EXPECT_EQ(sink->tokens, answer);
  EXPECT_EQ(sink->result.cached_tokens, 140);
  EXPECT_TRUE(fs::exists(directory_ / "mine.tmp"));
}

// A file with a right hash that stands in for another.
TEST_F(SnapshotStoreTest, AFileIsHeldAgainstItsName) {
  const std::vector<TokenId> one = start()->ask(prompt(64, 1))->tokens;
  const auto first_files = files();
  const std::vector<TokenId> two = start()->ask(prompt(64, 2))->tokens;
  ASSERT_EQ(files().size(), 2 * first_files.size());
  const auto process = start();
  for (const fs::path& path : files()) {
    if (std::find(first_files.begin(), first_files.end(), path) != first_files.end()) continue;
    if (fs::file_size(path) == fs::file_size(first_files[0]))
      fs::copy_file(first_files[0], path, fs::copy_options::overwrite_existing);
  }
  std::vector<TokenId> next = prompt(64, 2);
  next.insert(next.end(), two.begin(), two.end());
  const auto sink = process->ask(next);
  EXPECT_EQ(sink->result.cached_tokens, 0);
  EXPECT_EQ(process->warnings.size(), 1u);
  process->scheduler.reset();
  fs::remove_all(directory_);
  EXPECT_EQ(start()->ask(next)->tokens, sink->tokens);
}

TEST_F(SnapshotStoreTest, LeavesTheRightsOfAGivenDirectoryAlone) {
  fs::permissions(directory_, fs::perms::owner_all | fs::perms::group_read | fs::perms::group_exec);
  start()->ask(prompt(150));
  EXPECT_EQ(fs::status(directory_).permissions(), fs::perms::owner_all | fs::perms::group_read | fs::perms::group_exec);
  for (const fs::path& path : files())
    EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  directory_ /= "new";
  start();
  EXPECT_EQ(fs::status(directory_).permissions(), fs::perms::owner_all);
  directory_ = directory_.parent_path();
}

TEST_F(SnapshotStoreTest, OtherModelsFilesCountAndGoFirst) {
  uint64_t limit = 0;
  {
    const auto process = start("old");
    process->ask(prompt(200, 1), {50, 150});
  }
  for (const fs::path& path : files()) limit += fs::file_size(path);
  const auto old_files = files();
  {
    const auto process = start("new", limit);
    process->ask(prompt(200, 1), {50, 150});
  }
  uintmax_t bytes = 0;
  for (const fs::path& path : files()) bytes += fs::file_size(path);
  EXPECT_LE(bytes, limit);
  for (const fs::path& path : old_files) EXPECT_FALSE(fs::exists(path));
  EXPECT_GT(start("new")->ask(prompt(200, 1))->result.cached_tokens, 0);
}

// A limit on the size of files stands in for a full disk.
TEST_F(SnapshotStoreTest, AFullDiskCostsOneWarningAndNothingElse) {
  const std::vector<TokenId> answer = start()->ask(prompt(150, 1), {70, 140})->tokens;
  fs::remove_all(directory_);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto process = start();
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::vector<TokenId> conversation = prompt(150, 1);
  EXPECT_EQ(process->ask(conversation, {70, 140})->tokens, answer);
  conversation.insert(conversation.end(), answer.begin(), answer.end());
  for (TokenId t : prompt(20, 2)) conversation.push_back(t);
  EXPECT_EQ(process->ask(conversation)->result.cached_tokens, 153);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  // There is room again: what is written now does not build on what is not there.
  for (TokenId t : prompt(30, 3)) conversation.push_back(t);
  const auto later = process->ask(conversation);
  process->scheduler.reset();
  EXPECT_EQ(process->warnings.size(), 1u);
  conversation.insert(conversation.end(), later->tokens.begin(), later->tokens.end());
  for (TokenId t : prompt(5, 4)) conversation.push_back(t);
  const auto restarted = start();
  EXPECT_GE(restarted->ask(conversation)->result.cached_tokens, 200);
  EXPECT_TRUE(restarted->warnings.empty());
}

TEST_F(SnapshotStoreTest, StaysWithinItsBytes) {
  const uint64_t limit = 12u << 20;
  const auto process = start("m", limit);
  for (unsigned i = 0; i < 8; ++i) process->ask(prompt(200, i), {50, 150});
  process->scheduler.reset();
  uintmax_t bytes = 0;
  for (const fs::path& path : files()) bytes += fs::file_size(path);
  EXPECT_LE(bytes, limit);
  EXPECT_GT(bytes, 0u);
}

}  // namespace
}  // namespace calla
