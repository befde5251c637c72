// PartialFile: nothing under the final name before it is complete, and one writer at a time.
#include "checkpoint/writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "base/error.h"
#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class PartialFileTest : public testing::Test {
 protected:
  const TempDirectory directory_;
  const fs::path path_ = directory_.path() / "file";
};

TEST_F(PartialFileTest, TheNameAppearsWhenAllIsThere) {
  {
    PartialFile file(path_);
    file.write(0, bytes("new"));
    EXPECT_FALSE(fs::exists(path_));
  }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
  PartialFile file(path_);
  file.write(0, bytes("new"));
  file.finish();
  EXPECT_EQ(content(path_), "new");
}

TEST_F(PartialFileTest, OneWriterAtATime) {
  PartialFile first(path_);
  first.write(0, bytes("first"));
  try {
    PartialFile second(path_);
    FAIL() << "a second writer was let in";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("another process is writing"));
  }
  first.finish();
  EXPECT_EQ(content(path_), "first");
}

// Opening one would wait for a reader for ever, deaf to Ctrl-C.
TEST_F(PartialFileTest, APipeUnderTheNameIsRefused) {
  ASSERT_EQ(::mkfifo((path_.string() + ".partial").c_str(), 0600), 0);
  try {
    PartialFile file(path_);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("file.partial: not a regular file; remove it"));
  }
}

TEST_F(PartialFileTest, WhatAKilledWriterLeftIsTakenOver) {
  std::ofstream(path_.string() + ".partial") << "a longer text than the new one";
  PartialFile file(path_);
  file.write(0, bytes("new"));
  file.finish();
  EXPECT_EQ(content(path_), "new");
}

TEST_F(PartialFileTest, FollowsNoLinkAndKeepsPermissions) {
  const fs::path victim = directory_.path() / "victim", partial = path_.string() + ".partial";
  std::ofstream(victim) << "precious";
  fs::create_symlink(victim, partial);
  EXPECT_THROW(PartialFile{path_}, CheckpointError);
  EXPECT_EQ(content(victim), "precious");
  fs::remove(partial);

  std::ofstream(path_) << "old";
  fs::permissions(path_, fs::perms::owner_read | fs::perms::owner_write);
  write_text_file(path_, "new");
  EXPECT_EQ(fs::status(path_).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

}  // namespace
}  // namespace calla
