// Host side of TMA: describes a matrix to the copy engine. The encoder belongs to the driver library, which is never
// linked: the runtime is asked for its address, once.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace hpcjit {

struct Matrix {
  const void* data;  // 16-byte aligned
  int64_t rows;
  int64_t columns;
  int64_t row_bytes;  // from one row to the next, a multiple of 16
};

// A box of `columns` x `rows` elements, whose rows are as long as the swizzle (64 or 128 bytes).
template <CUtensorMapDataType kType, int kElementBytes>
inline cudaError_t encode_tensor_map(CUtensorMap& map, const Matrix& matrix, int rows, int columns) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found)
                                                                          : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {cuuint64_t(matrix.columns), cuuint64_t(matrix.rows)};
  const cuuint64_t strides[1] = {cuuint64_t(matrix.row_bytes)};
  const cuuint32_t box[2] = {cuuint32_t(columns), cuuint32_t(rows)};
  const cuuint32_t steps[2] = {1, 1};
  const auto swizzle =
      columns * kElementBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult status = encode(&map, kType, 2, const_cast<void*>(matrix.data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace hpcjit
