#pragma once
// Whether a checkpoint's chat template is the one that render.h implements.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace calla {

// A hash of the template's text, blind to line endings and to white space at the ends of lines and of the
// file.
uint64_t template_hash(std::string_view jinja);

// The hash of the Qwen3.6 template.
inline constexpr uint64_t kTemplateHash = 0x8ae3a8bc6e68f114;

// Nothing, or one sentence for the user: this checkpoint carries another template.
std::optional<std::string> template_warning(std::string_view jinja);

}  // namespace calla
