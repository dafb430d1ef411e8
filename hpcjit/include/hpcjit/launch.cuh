// Host side of a launch: one call that sets grid, block, shared memory, cluster and the PDL attribute.
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
  int cluster = 1;  // neighbouring blocks; `blocks` is a multiple of it. Above 8: allow_large_cluster
};

// Clusters above 8 blocks are not portable and must be asked for, once per device (in `prepare`).
template <class... Params>
inline cudaError_t allow_large_cluster(void (*kernel)(Params...)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

template <class... Params, class... Args>
inline cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                          Args... args) {
  if (shape.blocks == 0) return cudaSuccess;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (shape.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = unsigned(shape.cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(shape.blocks));
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace hpcjit
