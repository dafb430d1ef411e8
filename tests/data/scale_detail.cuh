#pragma once
#include <cstdint>

namespace scale_test {

template <int kOffset>
__device__ float apply(float x, float scale) {
  return x * scale + kOffset;
}

}  // namespace scale_test
