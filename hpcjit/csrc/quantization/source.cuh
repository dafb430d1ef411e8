// One vector of what is quantised: of a tensor, or of a gated activation f(x) * up of a tensor whose rows are
// [x | up].
//
// kAccess elements are moved by one load. It is less than kVec when rows are not aligned to whole vectors:
// the registers then hold the same elements, so the rest of a kernel does not notice.
#pragma once
#include "hpcjit/math/activation.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::quantization {

template <class T, int kVec, int kAccess, Activation kKind>
struct Source {
  Vec<T, kVec> value, up;

  __device__ __forceinline__ void load(const T* row, int64_t column, int64_t up_offset) {
    load_parts(value, row + column);
    if constexpr (kKind != Activation::kNone) load_parts(up, row + column + up_offset);
  }

  __device__ __forceinline__ void to(float (&y)[kVec]) const {
    value.to(y);
    if constexpr (kKind != Activation::kNone) {
      float u[kVec];
      up.to(u);
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] = activate<kKind, sizeof(T) == 4>(y[j]) * u[j];
    }
  }

 private:
  static __device__ __forceinline__ void load_parts(Vec<T, kVec>& whole, const T* from) {
#pragma unroll
    for (int j = 0; j < kVec; j += kAccess) {
      Vec<T, kAccess> part;
      part.template load<Cache::kStream>(from + j);
#pragma unroll
      for (int l = 0; l < kAccess; ++l) whole.data[j + l] = part.data[l];
    }
  }
};

template <int kVec>
__device__ __forceinline__ float largest_magnitude(const float (&y)[kVec], float so_far = 0.f) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) so_far = fmaxf(so_far, fabsf(y[j]));  // fmaxf drops NaN
  return so_far;
}

// Writes e4m3(y * inverse_scale), kAccess elements at a time.
template <int kAccess, Cache kCache, int kVec>
__device__ __forceinline__ void store_e4m3(e4m3* target, const float (&y)[kVec], float inverse_scale) {
#pragma unroll
  for (int j = 0; j < kVec; j += kAccess) {
    float scaled[kAccess];
#pragma unroll
    for (int l = 0; l < kAccess; ++l) scaled[l] = y[j + l] * inverse_scale;
    Vec<e4m3, kAccess> q;
    q.from(scaled);
    q.template store<kCache>(target + j);
  }
}

}  // namespace hpcjit::quantization
