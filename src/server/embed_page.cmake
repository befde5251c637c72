# Writes page.cc: the bytes of page.html as an array (a string literal of that length is not portable).
file(READ ${PAGE} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "#include \"server/page.h\"\n\nnamespace calla {\nnamespace {\n"
  "constexpr unsigned char kPage[] = {\n${bytes}\n};\n}  // namespace\n\n"
  "std::string_view chat_page() { return {reinterpret_cast<const char*>(kPage), sizeof kPage}; }\n\n}  // namespace calla\n")
