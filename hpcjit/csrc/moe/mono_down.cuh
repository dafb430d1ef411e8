// kColumns features of the result for all tokens, by all warps that compute; see mono.cuh.
//
// Warps of one slot share out its features, slots the tiles of rows. Each slot has sums of its own of every token in shared
// memory, so that no two threads ever add to one; at the end they are added in order.
#pragma once
#include "hpcjit/ptx/named_barrier.cuh"
#include "moe/mono_fragments.cuh"

namespace hpcjit::moe {

template <class Config>
class MonoDown {
  using Shape = MonoShape<Config>;
  using Fragments = MonoFragments<typename Config::weight_t>;
  static constexpr int kTiles = Shape::kTokenTiles, kColumns = Shape::kColumns;
  static constexpr int kThreads = 32 * Shape::kComputing;
  using Ring = MonoRing<Shape::kStages>;

 public:
  __device__ MonoDown(const MonoBlock<Config>& block, int warp, int lane)
      : b_(block),
        warp_(warp),
        lane_(lane),
        slot_(warp / Shape::kColumnTiles),
        strip_(warp % Shape::kColumnTiles),
        sums_(block.template at<float>(0)) {}

  __device__ __forceinline__ void run(uint32_t item, Ring& ring) {
    first_column_ = int(item) * kColumns;
    named_barrier::sync<kThreads>(1);  // what lay there has been read
    const int count = Shape::kSlots * b_.p.num_tokens * Shape::kOutPitch;
    for (int i = threadIdx.x; i < count; i += kThreads) sums_[i] = 0.f;
    named_barrier::sync<kThreads>(1);
    const uint32_t slots = b_.down_slots(), parts = b_.down_parts();
    for (uint32_t first = 0; first < slots; first += Shape::kSlots) {
      const uint32_t slot = first + slot_;
      const bool live = slot_ < Shape::kSlots && slot < slots;
      if (live)
        run_slot(slot / parts, slot % parts, ring);
      else
        mbarrier::wait(ring.full(), ring.parity);
      __syncwarp();
      if (lane_ == 0) mbarrier::arrive(ring.empty());
      ring.advance();
    }
    named_barrier::sync<kThreads>(1);
    write();
  }

 private:
  __device__ __forceinline__ void run_slot(uint32_t index, uint32_t part, const Ring& ring) {
    const MonoTile tile = b_.tile(index);
    const int live = (tile.rows + 7) / 8;
    const int steps =
        min(b_.p.intermediate_size - int(part) * Shape::kDownK, Shape::kDownK) * Shape::kBytes / 32;
    float scale[2] = {1.f, 1.f};
    load_scale(tile.expert, part, scale);
    mbarrier::wait(ring.full(), ring.parity);
    const uint32_t stage = b_.base + Shape::kRing + ring.stage * Shape::kStageBytes;
    const uint32_t rows = stage + Shape::kWeightBytes + slot_ * Shape::kSlotRows;
    float value[kTiles][4] = {};
    multiply(stage + slot_ * Shape::kDownBox, rows, steps, live, scale, value);
    add(tile, live, scale, value);
  }

  // Of features g and g + 8, or (blocks) of the first and the second 128 of K.
  __device__ void load_scale(int expert, uint32_t part, float (&scale)[2]) const {
    const MonoParams& p = b_.p;
    const int column = first_column_ + 16 * strip_;
    if constexpr (Config::kQuant == kQuantTensor) scale[0] = scale[1] = p.w2_scale[expert];
    if constexpr (Config::kQuant == kQuantChannel) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scale[i] =
            p.w2_scale[int64_t(expert) * p.hidden_size + min(column + lane_ / 4 + 8 * i, p.hidden_size - 1)];
    }
    if constexpr (Config::kQuant == kQuantBlock) {
      const int blocks = (p.hidden_size + kScaleBlock - 1) / kScaleBlock;
      const int along = (p.intermediate_size + kScaleBlock - 1) / kScaleBlock;
      const float* w =
          p.w2_scale + (int64_t(expert) * blocks + min(column / kScaleBlock, blocks - 1)) * along;
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] = w[min(int(part) * (Shape::kDownK / kScaleBlock) + i, along - 1)];
    }
  }

  __device__ __forceinline__ void multiply(uint32_t weights, uint32_t rows, int steps, int live,
                                           const float (&scale)[2], float (&value)[kTiles][4]) {
    // Matrix lane / 8 of four: rows 0 to 7 and 8 to 15 of the first 16 bytes, then of the second.
    const int row = 16 * strip_ + lane_ % 16, half = lane_ / 16;
    const uint32_t own = weights + row * Shape::kDownChunk;
    const uint32_t swizzle = row / 2 % 4;
    const uint32_t x_rows = rows + lane_ % 8 * Shape::kHiddenPitch + lane_ / 8 * 16;
    const uint32_t row_scales =
        rows + Shape::kRows * Shape::kHiddenPitch + 2 * (lane_ % 4) * Shape::kScalePitch;
#pragma unroll
    for (int pair = 0; pair < Shape::kDownChunks; ++pair) {  // a chunk of 64 bytes: two steps
      if (2 * pair >= steps) break;
      uint32_t x[kTiles][4];
      float4 factor[kTiles][2];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j >= live) continue;
        mma::ldmatrix_x4(x[j], x_rows + j * 8 * Shape::kHiddenPitch + pair * Shape::kDownChunk);
        if constexpr (Shape::kScaled) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            factor[j][c] = load_scales(row_scales + (8 * j + c) * Shape::kScalePitch + pair * 16);
        }
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t word[4], a[Fragments::kProducts][4];
        mma::ldmatrix_x4(word,
                         own + pair * (kColumns * Shape::kDownChunk) + (((2 * s + half) ^ swizzle) * 16));
        Fragments::weights(word, a);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j >= live) continue;
          uint32_t b[Fragments::kProducts][2];
          Fragments::rows({x[j][2 * s], x[j][2 * s + 1]}, b);
#pragma unroll
          for (int i = 0; i < Fragments::kProducts; ++i) {
            if constexpr (Shape::kScaled) {
              float part[4] = {};
              mma::m16n8k16<typename Fragments::operand_t>(part, a[i], b[i]);
              const float block = Config::kQuant == kQuantBlock ? scale[pair / 2] : 1.f;
#pragma unroll
              for (int c = 0; c < 4; ++c)
                value[j][c] += part[c] * (block * component(factor[j][c % 2], 2 * s + i));
            } else {
              mma::m16n8k16<typename Fragments::operand_t>(value[j], a[i], b[i]);
            }
          }
        }
      }
    }
  }

  static __device__ float4 load_scales(uint32_t address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
    return x;
  }
  static __device__ float component(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
  }

  // To the sums of the rows' tokens. Rows of a tile are of different tokens.
  __device__ __forceinline__ void add(const MonoTile& tile, int live, const float (&scale)[2],
                                      const float (&value)[kTiles][4]) {
    constexpr bool kOfFeatures = Config::kQuant == kQuantTensor || Config::kQuant == kQuantChannel;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= live) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t column = 8 * j + 2 * (lane_ % 4) + c;
        if (column >= tile.rows) continue;
        const float weight = b_.weight_of(tile.first + column);
        float* sum = sums_ + (slot_ * b_.p.num_tokens + b_.token_of(tile.first + column)) * Shape::kOutPitch +
                     16 * strip_ + lane_ / 4;
        sum[0] += weight * (value[j][c] * (kOfFeatures ? scale[0] : 1.f));
        sum[8] += weight * (value[j][c + 2] * (kOfFeatures ? scale[1] : 1.f));
      }
    }
  }

  __device__ __forceinline__ void write() const {
    constexpr int kVec = 4;
    const MonoParams& p = b_.p;
    const int vecs = p.num_tokens * (kColumns / kVec);
    for (int i = threadIdx.x; i < vecs; i += kThreads) {
      const int token = i / (kColumns / kVec), column = i % (kColumns / kVec) * kVec;
      if (first_column_ + column >= p.hidden_size) continue;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int slot = 0; slot < Shape::kSlots; ++slot) {
        const float4 other = *reinterpret_cast<const float4*>(
            sums_ + (slot * p.num_tokens + token) * Shape::kOutPitch + column);
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
      }
      if constexpr (Config::kHasShared) {
        const uint2 raw = *reinterpret_cast<const uint2*>(p.shared_output + token * p.shared_stride +
                                                          first_column_ + column);
        sum.x += to_float(bf16{uint16_t(raw.x)}), sum.y += to_float(bf16{uint16_t(raw.x >> 16)});
        sum.z += to_float(bf16{uint16_t(raw.y)}), sum.w += to_float(bf16{uint16_t(raw.y >> 16)});
      }
      *reinterpret_cast<uint2*>(p.out + token * p.out_stride + first_column_ + column) =
          make_uint2(pack2<bf16>(sum.x, sum.y), pack2<bf16>(sum.z, sum.w));
    }
  }

  const MonoBlock<Config>& b_;
  int warp_, lane_, slot_, strip_, first_column_ = 0;
  float* sums_;  // [slot][token][kOutPitch]
};

}  // namespace hpcjit::moe
