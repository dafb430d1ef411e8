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

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                     CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                     CUtensorMapFloatOOBfill);

inline EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTensorMap>(found)
               : nullptr;
  }();
  return encode;
}

// Of rank 2 or 3; a row of a box has as many bytes as the swizzle spans (64 or 128). `strides` in bytes, without the
// first dimension's. `promotion`: what L2 fetches at least. More than a row of a box pays where the next box is asked for soon.
template <CUtensorMapDataType kType, int kElementBytes, int kRank>
inline cudaError_t encode_tensor_map(CUtensorMap& map, const void* data, const cuuint64_t (&sizes)[kRank],
                                     const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const EncodeTensorMap encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kSteps[3] = {1, 1, 1};
  const auto swizzle = box[0] * kElementBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult status =
      encode(&map, kType, kRank, const_cast<void*>(data), sizes, strides, box, kSteps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A box of `columns` x `rows` elements.
template <CUtensorMapDataType kType, int kElementBytes>
inline cudaError_t encode_tensor_map(CUtensorMap& map, const Matrix& matrix, int rows, int columns,
                                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return encode_tensor_map<kType, kElementBytes, 2>(
      map, matrix.data, {cuuint64_t(matrix.columns), cuuint64_t(matrix.rows)}, {cuuint64_t(matrix.row_bytes)},
      {cuuint32_t(columns), cuuint32_t(rows)}, promotion);
}

// The matrix as chunks of `columns` columns, a box being `rows` rows of `chunks` of them, chunk by chunk: an element's
// coordinates are its column in the chunk, its row and the chunk. The matrix has whole chunks.
template <CUtensorMapDataType kType, int kElementBytes>
inline cudaError_t encode_chunked_map(CUtensorMap& map, const Matrix& matrix, int rows, int columns,
                                      int chunks) {
  return encode_tensor_map<kType, kElementBytes, 3>(
      map, matrix.data, {cuuint64_t(columns), cuuint64_t(matrix.rows), cuuint64_t(matrix.columns / columns)},
      {cuuint64_t(matrix.row_bytes), cuuint64_t(columns * kElementBytes)},
      {cuuint32_t(columns), cuuint32_t(rows), cuuint32_t(chunks)});
}

}  // namespace hpcjit
