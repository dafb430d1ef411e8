// FP8 quantisation with one scale for the whole tensor, of a tensor or of a gated activation of it:
//
//   y = input                        or  f(input[:, :hidden_size]) * input[:, hidden_size:]   (kActivation)
//   scale = max(max |y|, 1e-10) / 448                          (kDynamic; else given)
//   output = e4m3(y / scale)
//
// Dynamic takes two kernels: the first leaves one maximum per block in `workspace`, in the second every block
// reduces all of them itself. No atomics and nothing to initialise; a maximum has one value in any order, so
// the bits repeat. The second kernel walks the tensor backwards: what the first read last is still in L2.
// Both see one flat list of vectors, cut into chunks of kThreads * kVecsPerThread, and blocks stride over the
// chunks. With kFlat rows follow each other without gaps and no division by the row length is needed. Shared
// memory: one float per warp, written and read once. NaN elements stay NaN and do not enter the maximum.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "quantization/source.cuh"

namespace hpcjit::quantization {

struct TensorQuantParams {
  const void* input;
  void* output;
  float* scale;      // one value; written when dynamic
  float* workspace;  // num_blocks values when dynamic
  int64_t num_tokens;
  int64_t hidden_size;  // of the output
  int64_t input_stride;
  int64_t output_stride;
  int64_t num_blocks;
};

template <class Config>
struct Chunk {
  using input_t = typename Config::input_t;
  static constexpr int kVec = Config::kVec;
  static constexpr int kVecs = Config::kVecsPerThread;
  static constexpr int kSize = Config::kThreads * kVecs;
  static constexpr Cache kOut = Config::kStreamOut ? Cache::kStream : Cache::kDefault;

  Source<input_t, kVec, kVec, Activation(Config::kActivation)> raw[kVecs];
  int64_t row[kVecs];  // negative outside of the tensor
  int64_t column[kVecs];

  static __device__ int64_t count(const TensorQuantParams& p) {
    return (p.num_tokens * (p.hidden_size / kVec) + kSize - 1) / kSize;
  }

  __device__ Chunk(const TensorQuantParams& p, int64_t chunk) {
    const int64_t first = chunk * kSize;
    if constexpr (Config::kFlat) {
      const int64_t vecs = p.num_tokens * (p.hidden_size / kVec);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int64_t vec = first + threadIdx.x + i * Config::kThreads;
        row[i] = vec < vecs ? 0 : -1;
        column[i] = vec * kVec;
      }
    } else {
      const uint32_t row_vecs = uint32_t(p.hidden_size / kVec);
      const int64_t first_row = first / row_vecs;
      const uint32_t first_vec = uint32_t(first - first_row * row_vecs);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const uint32_t vec = first_vec + threadIdx.x + i * Config::kThreads;
        const uint32_t row_step = vec / row_vecs;
        row[i] = first_row + row_step < p.num_tokens ? first_row + row_step : -1;
        column[i] = int64_t(vec - row_step * row_vecs) * kVec;
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (row[i] >= 0)
        raw[i].load(static_cast<const input_t*>(p.input) + row[i] * p.input_stride, column[i], p.hidden_size);
  }

  __device__ float largest(float so_far) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (row[i] < 0) continue;
      float y[kVec];
      raw[i].to(y);
      so_far = largest_magnitude(y, so_far);
    }
    return so_far;
  }

  __device__ void store(const TensorQuantParams& p, float inverse_scale) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (row[i] < 0) continue;
      float y[kVec];
      raw[i].to(y);
      store_e4m3<kVec, kOut>(static_cast<e4m3*>(p.output) + row[i] * p.output_stride + column[i], y,
                             inverse_scale);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    tensor_max_kernel(const __grid_constant__ TensorQuantParams p) {
  __shared__ float scratch[Config::kThreads / 32];
  pdl::trigger();
  const int64_t chunks = Chunk<Config>::count(p);
  pdl::wait();
  float largest = 0.f;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x)
    largest = Chunk<Config>(p, chunk).largest(largest);
  largest = reduce_block<Max, Config::kThreads>(largest, scratch);
  if (threadIdx.x == 0) p.workspace[blockIdx.x] = largest;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    tensor_quant_kernel(const __grid_constant__ TensorQuantParams p) {
  __shared__ float scratch[Config::kThreads / 32];
  pdl::trigger();
  const int64_t chunks = Chunk<Config>::count(p);
  pdl::wait();
  float scale;
  if constexpr (Config::kDynamic) {
    float largest = 0.f;
    for (int i = threadIdx.x; i < int(p.num_blocks); i += Config::kThreads)
      largest = fmaxf(largest, p.workspace[i]);
    scale = fmaxf(reduce_block<Max, Config::kThreads>(largest, scratch), kQuantFloor) / kE4m3Max;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale;
  } else {
    scale = *p.scale;
  }
  const float inverse_scale = 1.f / scale;
  for (int64_t chunk = chunks - 1 - blockIdx.x; chunk >= 0; chunk -= gridDim.x)
    Chunk<Config>(p, chunk).store(p, inverse_scale);
}

template <class Config>
struct TensorQuant {
  using Params = TensorQuantParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, tensor_quant_kernel<Config>);
    if (!Config::kDynamic || status != cudaSuccess) return status;
    return cudaFuncGetAttributes(&attributes, tensor_max_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const LaunchShape shape = {p.num_blocks, Config::kThreads, 0, Config::kPdl};
    if constexpr (Config::kDynamic) {
      const cudaError_t status = hpcjit::launch(tensor_max_kernel<Config>, shape, stream, p);
      if (status != cudaSuccess) return status;
    }
    return hpcjit::launch(tensor_quant_kernel<Config>, shape, stream, p);
  }
};

}  // namespace hpcjit::quantization
