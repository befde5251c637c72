#include "checkpoint/tensor_names.h"

#include <array>

namespace calla {

std::string_view canonical_name(std::string_view name) {
  using namespace std::string_view_literals;
  constexpr std::array kWrappers = {"language_model.model."sv, "model.language_model."sv, "language_model."sv,
                                    "model."sv};
  for (const std::string_view wrapper : kWrappers)
    if (name.starts_with(wrapper)) return name.substr(wrapper.size());
  return name;
}

bool is_unused_part(std::string_view name) {
  for (const std::string_view vision : {"vision_tower.", "model.visual.", "visual.", "model.vision_tower."})
    if (name.starts_with(vision)) return true;
  return name.starts_with("mtp.") || name.find(".mtp.") != std::string_view::npos;
}

}  // namespace calla
