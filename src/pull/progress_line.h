#pragma once
// The one line that shows how far a pull is.
#include <string>

#include "pull/pull.h"

namespace calla {

// At most `width` columns, such as "[=====>     ]  47%  9.6 of 20.4 GB  112 MB/s  1:36 left".
std::string progress_line(const PullProgress& progress, int width);

// "20.4 GB", in powers of 1000.
std::string readable_bytes(double bytes);

}  // namespace calla
