// Found by the translator's preprocessor run; the declarations come from softmetal_msl.h.
#pragma once
#ifndef METAL_FUNC
#define METAL_FUNC inline __attribute__((always_inline))
#endif
