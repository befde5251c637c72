#include "chat/json.h"

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace calla {
namespace {

TEST(Json, KeepsKeyOrderAndIntegers) {
  const std::string text =
      R"({"z": 1, "a": [9007199254740993, 18446744073709551615, -9223372036854775808, 123456789012345678901234567890]})";
  EXPECT_EQ(python_json(parse_json(text)), text);
  EXPECT_TRUE(is_big_integer(parse_json("-123456789012345678901234567890")));
  EXPECT_FALSE(is_big_integer(parse_json("18446744073709551615")));
  EXPECT_FALSE(is_big_integer(parse_json("1e40")));
}

TEST(Json, RepeatedKeyKeepsFirstPlaceAndLastValue) {
  EXPECT_EQ(compact_json(parse_json(R"({"a": 1, "b": {"x": 1}, "a": [2]})")), R"({"a":[2],"b":{"x":1}})");
}

TEST(Json, CompactHasNoSpaces) {
  EXPECT_EQ(compact_json(parse_json(R"( { "a" : [ 1 , 2.50 , { } , null , true ] } )")),
            R"({"a":[1,2.5,{},null,true]})");
}

TEST(Json, EscapesOnlyWhatItMust) {
  const std::string value = std::string("\x00", 1) + "\x1f\x7f\b\f\n\r\t\"\\/<é>";
  EXPECT_EQ(python_json(Json(value)), "\"\\u0000\\u001f\x7f\\b\\f\\n\\r\\t\\\"\\\\/<é>\"");
}

TEST(Json, RefusesWithAPlace) {
  for (const char* text : {"", "{", "[1,]", "nul", "{\"a\" 1}", "1 2", "\"\xff\"", "\"\\ud800\"", "1e999"}) {
    EXPECT_THROW(parse_json(text), RequestError) << text;
    EXPECT_TRUE(try_parse_json(text).is_discarded()) << text;
  }
  try {
    parse_json("{\"a\": tru}");
    FAIL();
  } catch (const RequestError& error) {
    EXPECT_NE(std::string(error.what()).find("byte"), std::string::npos) << error.what();
    EXPECT_EQ(error.code(), "invalid_json");
  }
  try {
    parse_json("[1e400]");
    FAIL();
  } catch (const RequestError& error) {  // the library's own words, without its name for the error
    EXPECT_EQ(std::string(error.what()), "not valid JSON: byte 6: number overflow parsing '1e400'");
  }
}

TEST(Json, LimitsDepth) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_NO_THROW(parse_json(nested(256)));
  EXPECT_THROW(parse_json(nested(257)), RequestError);
  EXPECT_THROW(parse_json(std::string(1'000'000, '[')), RequestError);
  EXPECT_NO_THROW(parse_json(R"({"a":[{"b":1}]})", 3));
  EXPECT_THROW(parse_json(R"({"a":[{"b":1}]})", 2), RequestError);
}

}  // namespace
}  // namespace calla
