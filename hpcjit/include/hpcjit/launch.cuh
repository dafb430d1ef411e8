// Host side of a launch: one call that sets grid, block, shared memory and the PDL attribute.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace hpcjit {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct LaunchShape {
  int64_t blocks;
  int threads;
  int smem_bytes = 0;
  bool pdl = false;
};

template <class... Params, class... Args>
inline cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                          Args... args) {
  if (shape.blocks == 0) return cudaSuccess;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(shape.blocks));
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.smem_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace hpcjit
