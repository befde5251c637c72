// macOS: the one file that holds metal-cpp's definitions.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Metal/Metal.hpp>

#include "backend/metal/device.h"

namespace calla::metal {

std::string software_device_note() { return ""; }

}  // namespace calla::metal
