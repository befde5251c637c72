#pragma once
#include "base/error.h"

namespace calla {

// A model could not be downloaded. The message says what happened and what to try; what has arrived is kept.
class PullError : public Error {
 public:
  using Error::Error;
};

}  // namespace calla
