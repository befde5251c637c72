#include "chat/template_check.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "chat/json.h"

namespace calla {
namespace {

TEST(TemplateCheck, KnowsTheTemplateOfTheGoldenFile) {
  std::ifstream file(CALLA_SOURCE_DIR "/tests/chat/render_golden.json");
  std::stringstream text;
  text << file.rdbuf();
  const std::string hash = parse_json(text.str())["template_hash"];
  EXPECT_EQ(std::stoull(hash, nullptr, 16), kTemplateHash);
}

TEST(TemplateCheck, IsBlindToLineEndsOnly) {
  const uint64_t hash = template_hash("{% a %}\n\n  b\nc");
  EXPECT_EQ(template_hash("{% a %}  \r\n\t\r\n  b\r\nc\n\n \n"), hash);
  EXPECT_NE(template_hash("{% a %}\n\n b\nc"), hash);
  EXPECT_NE(template_hash("{% a %}\n  b\nc"), hash);
  EXPECT_NE(template_hash("{% a %}\n\n  b\nd"), hash);
  EXPECT_NE(template_hash("{% a %}\n\n  bc"), hash);
  EXPECT_EQ(template_hash(""), template_hash(" \n"));
}

TEST(TemplateCheck, WarnsOfAnotherTemplate) {
  ASSERT_TRUE(template_warning("{{ messages }}"));
  EXPECT_NE(template_warning("{{ messages }}")->find("chat template"), std::string::npos);
}

}  // namespace
}  // namespace calla
