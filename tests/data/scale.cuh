// out[i] = in[i] * scale + Config::kOffset, the smallest template: used by the tests of build, cache and launch.
#pragma once
#include "scale_detail.cuh"

namespace scale_test {

template <class Config>
__global__ void scale_kernel(const float* input, float* output, int64_t count, float scale) {
  int64_t i = int64_t(blockIdx.x) * Config::kThreads + threadIdx.x;
  if (i < count) output[i] = apply<Config::kOffset>(input[i], scale);
}

template <class Config>
struct Scale {
  struct Params {
    const float* input;
    float* output;
    int64_t count;
    double scale;
  };
  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, scale_kernel<Config>);
  }
  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    if (p.count == 0) return cudaSuccess;
    scale_kernel<Config><<<unsigned((p.count + Config::kThreads - 1) / Config::kThreads), Config::kThreads, 0, stream>>>(
        p.input, p.output, p.count, float(p.scale));
    return cudaGetLastError();
  }
};

}  // namespace scale_test
