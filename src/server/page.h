#pragma once
// The chat page, one HTML file (page.html) built into the program.
#include <string_view>

namespace calla {

std::string_view chat_page();

}  // namespace calla
