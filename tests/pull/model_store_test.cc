#include "pull/model_store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "pull/pull_error.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

class Store : public testing::Test {
 protected:
  Store()
      : home_(fs::temp_directory_path() / ("calla-store-" + std::to_string(::getpid()) + "-" +
                                           testing::UnitTest::GetInstance()->current_test_info()->name())),
        store_(home_) {
    fs::remove_all(home_);
  }
  ~Store() override { fs::remove_all(home_); }
  void put(const std::string& folder, const std::string& repo, bool complete) {
    fs::create_directories(home_ / "models" / folder);
    std::ofstream(home_ / "models" / folder / "weights") << "12345";
    if (complete) write_manifest(home_ / "models" / folder, {repo, "c", {{"weights", 5, "s", ""}}});
  }

  fs::path home_;
  ModelStore store_;
};

TEST_F(Store, ListsCompleteAndIncompleteModels) {
  EXPECT_TRUE(store_.list().empty());
  put("a--whole", "a/whole", true);
  put("b--begun.partial", "b/begun", false);
  put("a--whole.partial", "a/whole", false);
  put("not ours", "", false);
  put("c--foreign", "", false);
  put("d--x.old", "d/x", true);
  const std::vector<StoredModel> models = store_.list();
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0].repo, "a/whole");
  EXPECT_TRUE(models[0].is_complete);
  EXPECT_EQ(models[0].commit, "c");
  EXPECT_GT(models[0].bytes, 5u);
  EXPECT_EQ(models[1].repo, "b/begun");
  EXPECT_FALSE(models[1].is_complete);
}

TEST_F(Store, FindsAndRemoves) {
  put("a--whole", "a/whole", true);
  put("a--whole.partial", "a/whole", false);
  EXPECT_EQ(store_.find("a/whole"), home_ / "models" / "a--whole");
  EXPECT_FALSE(store_.find("a/other"));
  EXPECT_GT(store_.remove("a/whole"), 10u);
  EXPECT_FALSE(fs::exists(home_ / "models" / "a--whole"));
  EXPECT_FALSE(fs::exists(home_ / "models" / "a--whole.partial"));
  EXPECT_THROW(store_.remove("a/whole"), UsageError);
  EXPECT_THROW(store_.remove("../../etc"), UsageError);
  EXPECT_THROW(store_.find(".."), UsageError);
}

TEST_F(Store, ALockedModelIsNotRemoved) {
  put("a--whole", "a/whole", true);
  {
    const ModelLock lock(store_, "a/whole");
    EXPECT_THROW(store_.remove("a/whole"), PullError);
  }
  EXPECT_GT(store_.remove("a/whole"), 0u);
}

TEST_F(Store, ADamagedManifestIsNone) {
  put("a--b", "a/b", true);
  for (const char* text :
       {"", "{", "[]", R"({"repo":1})", R"({"repo":"a/b","commit":"c","files":{"x":{"size":"1"}}})"}) {
    std::ofstream(home_ / "models" / "a--b" / "calla-pull.json") << text;
    EXPECT_FALSE(read_manifest(home_ / "models" / "a--b")) << text;
  }
}

TEST_F(Store, ComesFromTheEnvironment) {
  ::setenv("CALLA_HOME", home_.c_str(), 1);
  EXPECT_EQ(ModelStore::from_environment().path_of("a/b"), home_ / "models" / "a--b");
  ::unsetenv("CALLA_HOME");
  ::setenv("HOME", "/somewhere", 1);
  EXPECT_EQ(ModelStore::from_environment().models(), fs::path("/somewhere/.cache/calla/models"));
}

}  // namespace
}  // namespace calla
