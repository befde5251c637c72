#pragma once
// The shim of MSL's standard library, included before every translated kernel (tools/translate.py).
#include "softmetal/abi.h"
#include "softmetal/atomic.h"
#include "softmetal/half.h"
#include "softmetal/index.h"
#include "softmetal/math.h"
#include "softmetal/matrix.h"
#include "softmetal/simd.h"
#include "softmetal/tensor.h"
#include "softmetal/vec.h"
