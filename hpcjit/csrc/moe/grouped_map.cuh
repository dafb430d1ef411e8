// Weights of the grouped product as TMA sees them; see grouped.cuh. A box has 128 rows of 128 bytes of K.
//
//   kGateUp: [experts][gate, up][features][K]; a box has 8 rows of gate, 8 of up, 8 of gate, ...: 64 features. A thread
//            that holds rows g and g + 8 of a product then has gate and up of the same feature.
//   else:    [experts][features][K]; 128 neighbouring rows
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/tma.cuh"
#include "hpcjit/tensor_map.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

// With 256 bytes, the other half comes too early: 5 % of the time of gate-up (docs/perf/fused_moe.md).
constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

template <class Config, bool kGateUp>
inline cudaError_t encode_weights(CUtensorMap& map, const void* weights, int64_t experts, int64_t features,
                                  int64_t depth) {
  constexpr bool kFp8 = Config::kQuant != kQuantNone;
  constexpr int kBytes = kFp8 ? 1 : 2, kStageK = kRowBytes / kBytes;
  constexpr auto kType = kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if constexpr (!kGateUp) {
    return encode_tensor_map<kType, kBytes>(map, {weights, experts * features, depth, depth * kBytes},
                                            kWeightRows, kStageK, kPromotion);
  } else {
    const EncodeTensorMap encode = tensor_map_encoder();
    if (encode == nullptr) return cudaErrorNotSupported;
    const cuuint64_t row = cuuint64_t(depth) * kBytes;
    const cuuint64_t sizes[4] = {cuuint64_t(depth), 8, cuuint64_t(experts) * 2, cuuint64_t(features) / 8};
    const cuuint64_t strides[3] = {row, cuuint64_t(features) * row, 8 * row};
    constexpr cuuint32_t kBox[4] = {kStageK, 8, 2, kWeightRows / 16}, kSteps[4] = {1, 1, 1, 1};
    const CUresult status = encode(&map, kType, 4, const_cast<void*>(weights), sizes, strides, kBox, kSteps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, kPromotion,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
  }
}

// Rows that a tile reads as they lie: boxes of kRowBox rows and 128 bytes of K.
template <class Config>
inline cudaError_t encode_rows(CUtensorMap& map, const void* rows, int64_t num_rows, int64_t depth,
                               int64_t stride) {
  constexpr bool kFp8 = Config::kQuant != kQuantNone;
  constexpr int kBytes = kFp8 ? 1 : 2;
  constexpr auto kType = kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_tensor_map<kType, kBytes>(map, {rows, num_rows, depth, stride * kBytes},
                                          GroupedShape<Config, false>::kRowBox, kRowBytes / kBytes,
                                          kPromotion);
}

// The box of an item from column k on.
template <bool kGateUp>
__device__ __forceinline__ void load_weights(uint32_t target, const CUtensorMap& map, int k, int expert,
                                             int feature_tile, int features, uint32_t barrier) {
  if constexpr (kGateUp)
    tma::load(target, &map, k, 0, 2 * expert, feature_tile * (kWeightRows / 16), barrier);
  else
    tma::load(target, &map, k, expert * features + feature_tile * kWeightRows, barrier);
}

}  // namespace hpcjit::moe
