// Results that a sum over split weights (term_split.cuh) could not give: where it is NaN, the plain fp32 dot product
// decides. So infinities, and weights that a term cannot hold, cost time and not the result.
//
// Params has `x`, `weight`, `x_stride`, `weight_stride` (elements) and `hidden_size`.
#pragma once
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/types.cuh"

namespace hpcjit::gemm {

// One row of x times one row of weights, by a whole warp, in a fixed order; every lane gets the result. NaN in what was
// read so far ends it: x rows that hold NaN would otherwise cost a dot product for each expert.
template <class Config>
__device__ __noinline__ float exact_dot(const void* x_row, const float* w_row, int64_t hidden_size,
                                        int lane) {
  using x_t = typename Config::x_t;
  constexpr int kAtOnce = 8;
  const x_t* x = static_cast<const x_t*>(x_row);
  float sum = 0.f;
  for (int64_t first = lane; first - lane < hidden_size; first += 32 * kAtOnce) {
    bool unknown = false;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t k = first + 32 * i;
      if (k >= hidden_size) continue;
      const float a = to_float(x[k]), b = w_row[k];
      unknown |= a != a || b != b;
      sum = fmaf(a, b, sum);
    }
    if (__any_sync(0xffffffffu, unknown)) return __uint_as_float(0x7fc00000u);
  }
  return reduce_lanes<Add>(sum);
}

// Called by whole warps. `value` is this lane's result for (token, expert), if it has one (`live`).
template <class Config, class Params>
__device__ __forceinline__ float repair(float value, bool live, int64_t token, int64_t expert,
                                        const Params& p) {
  using x_t = typename Config::x_t;
  const int lane = threadIdx.x % 32;
  uint32_t broken = __ballot_sync(0xffffffffu, live && value != value);
  while (broken != 0) {
    const int source = __ffs(int(broken)) - 1;
    broken &= broken - 1;
    const int64_t row = __shfl_sync(0xffffffffu, token, source);
    const int64_t column = __shfl_sync(0xffffffffu, expert, source);
    const float exact = exact_dot<Config>(static_cast<const x_t*>(p.x) + row * p.x_stride,
                                          static_cast<const float*>(p.weight) + column * p.weight_stride,
                                          p.hidden_size, lane);
    if (lane == source) value = exact;
  }
  return value;
}

}  // namespace hpcjit::gemm
