// FP8 quantisation with one scale per group of kGroupSize neighbours in a row, of a tensor or of a gated
// activation of it:
//
//   y = input                        or  f(input[:, :hidden_size]) * input[:, hidden_size:]   (kActivation)
//   scale[t, g] = max(max |y[t, group g]|, 1e-10) / 448        rounded up to a power of two with kPowerOfTwo
//   output[t, i] = e4m3(y[t, i] / scale[t, i / kGroupSize])
//
// The tensor is one flat list of vectors; each thread takes kVecsPerThread of them, kThreads apart, all loads
// first. A group is kLanes neighbouring lanes of a warp: rows are whole groups and kLanes divides 32, so no
// group is split between warps, and a group is inside the tensor or outside as a whole. The maximum travels
// by shuffles alone; no shared memory. NaN elements stay NaN and do not enter the maximum; inf makes the
// scale inf, itself NaN and the rest of its group 0.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "quantization/source.cuh"

namespace hpcjit::quantization {

struct GroupQuantParams {
  const void* input;
  void* output;
  float* scale;
  int64_t num_tokens;
  int64_t hidden_size;  // of the output
  int64_t input_stride;
  int64_t output_stride;
  int64_t scale_token_stride;
  int64_t scale_group_stride;
};

// The least power of two that is not below x > 0; inf stays.
__device__ __forceinline__ float round_up_to_power_of_two(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x007fffffu) & 0xff800000u);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    group_quant_kernel(const __grid_constant__ GroupQuantParams p) {
  using input_t = typename Config::input_t;
  constexpr int kVec = Config::kVec;
  constexpr int kVecs = Config::kVecsPerThread;
  constexpr int kLanes = Config::kGroupSize / kVec;
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0,
                "a group is a power of two of lanes");

  pdl::trigger();
  const uint32_t row_vecs = uint32_t(p.hidden_size / kVec);
  const int64_t first = int64_t(blockIdx.x) * (Config::kThreads * kVecs);
  const int64_t first_row = first / row_vecs;
  const uint32_t first_vec = uint32_t(first - first_row * row_vecs);
  int64_t row[kVecs];
  uint32_t vec[kVecs];  // in its row
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t flat = first_vec + threadIdx.x + i * Config::kThreads;
    const uint32_t row_step = flat / row_vecs;
    row[i] = first_row + row_step;
    vec[i] = flat - row_step * row_vecs;
  }
  pdl::wait();

  Source<input_t, kVec, Config::kAccess, Activation(Config::kActivation)> raw[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (row[i] >= p.num_tokens) continue;
    raw[i].load(static_cast<const input_t*>(p.input) + row[i] * p.input_stride, int64_t(vec[i]) * kVec,
                p.hidden_size);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const bool inside = row[i] < p.num_tokens;
    float y[kVec] = {};
    if (inside) raw[i].to(y);
    const float largest =
        reduce_lanes<Max, kLanes>(largest_magnitude(y));  // every lane of the warp takes part
    float scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
    if constexpr (Config::kPowerOfTwo) scale = round_up_to_power_of_two(scale);
    if (!inside) continue;
    e4m3* target = static_cast<e4m3*>(p.output) + row[i] * p.output_stride + int64_t(vec[i]) * kVec;
    constexpr Cache kOut = Config::kStreamOut ? Cache::kStream : Cache::kDefault;
    store_e4m3<Config::kAccess, kOut>(target, y, 1.f / scale);
    if (vec[i] % kLanes == 0)
      p.scale[row[i] * p.scale_token_stride + vec[i] / kLanes * p.scale_group_stride] = scale;
  }
}

template <class Config>
struct GroupQuant {
  using Params = GroupQuantParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, group_quant_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t vecs = p.num_tokens * (p.hidden_size / Config::kVec);
    const int64_t blocks = ceil_div(vecs, Config::kThreads * Config::kVecsPerThread);
    return hpcjit::launch(group_quant_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::quantization
