// Elsewhere than on macOS: the device is softmetal's.
#include "backend/metal/device.h"
#include "softmetal/softmetal.h"

namespace calla::metal {

std::string software_device_note() {
  return std::string("computed in software (softmetal), memory checks ") + (softmetal::options().check ? "on" : "off");
}

}  // namespace calla::metal
