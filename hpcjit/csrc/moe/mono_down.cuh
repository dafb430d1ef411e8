// kColumns features of the result for all tokens, by all warps that compute; see mono.cuh.
//
// Groups of warps take turns of stages. Warps of one slot share out its features, slots the tiles of rows. Each slot
// of a group has sums of its own of every token in shared memory, so that no two threads ever add to one; at the end
// they are added in order.
#pragma once
#include "hpcjit/ptx/named_barrier.cuh"
#include "moe/mono_fragments.cuh"

namespace hpcjit::moe {

template <class Config>
class MonoDown {
  using Shape = MonoShape<Config>;
  using Fragments = MonoFragments<typename Config::weight_t>;
  static constexpr int kTiles = Shape::kTokenTiles, kColumns = Shape::kColumns,
                       kProducts = Fragments::kProducts;
  static constexpr int kThreads = 32 * Shape::kGroups * Shape::kComputing;
  static constexpr int kAhead =
      kTiles < 4 ? 1 : 0;  // operands loaded before they are needed; registers end there
  using Ring = MonoRing<Shape::kStages>;

 public:
  __device__ MonoDown(const MonoBlock<Config>& block, int warp, int lane)
      : b_(block),
        group_(warp / Shape::kComputing),
        lane_(lane),
        slot_(warp % Shape::kComputing / Shape::kColumnTiles),
        strip_(warp % Shape::kComputing % Shape::kColumnTiles),
        sums_(block.template at<float>(0)) {}

  __device__ __forceinline__ void run(uint32_t item, Ring& ring) {
    first_column_ = int(item) * kColumns;
    // The sums of an item before this one have been read; and all stages before these: a slot of the ring may change
    // groups here.
    named_barrier::sync<kThreads>(1);
    const int count = Shape::kGroups * Shape::kSlots * b_.p.num_tokens * Shape::kOutPitch;
    for (int i = threadIdx.x; i < count; i += kThreads) sums_[i] = 0.f;
    named_barrier::sync<kThreads>(1);
    const uint32_t slots = b_.down_slots(), parts = b_.down_parts();
    const uint32_t stages = (slots + Shape::kSlots - 1) / Shape::kSlots;
    constexpr uint32_t kStep = Shape::kGroups * Shape::kSlots;
    const uint32_t whole = kStep / parts, rest = kStep - whole * parts;
    Slot slot, next;
    uint32_t number = group_ * Shape::kSlots + slot_;
    next.index = number / parts;
    next.part = number - next.index * parts;
    next.load(*this, number);
    ring.advance(min(uint32_t(group_), stages));
    for (uint32_t stage = group_; stage < stages; stage += Shape::kGroups) {
      slot = next;
      number += kStep;
      next.part += rest;
      next.index += whole + (next.part >= parts);
      if (next.part >= parts) next.part -= parts;
      next.load(*this, number);
      mbarrier::wait(ring.full(), ring.parity);
      float value[kTiles][4] = {};
      if (slot.live > 0) multiply(slot, b_.base + Shape::kRing + ring.stage * Shape::kStageBytes, value);
      __syncwarp();
      if (lane_ == 0) mbarrier::arrive(ring.empty());
      ring.advance(min(uint32_t(Shape::kGroups), stages - stage));
      if (slot.live > 0) add(slot, value);
    }
    named_barrier::sync<kThreads>(1);
    write();
  }

 private:
  // A part of a tile, and what is known of it before its data is there.
  struct Slot {
    uint32_t index, part;
    int live, steps;          // token tiles with rows; of 32 bytes of K
    float scale[2];           // see load_scale
    float weight[kTiles][2];  // of two columns
    int token[kTiles][2];     // likewise, -1 past the end of the tile

    __device__ __forceinline__ void load(const MonoDown& own, uint32_t slot) {
      live = 0;
      if (own.slot_ >= Shape::kSlots || slot >= own.b_.down_slots()) return;
      const TokenTile tile = own.b_.tile(index);
      live = (tile.rows + 7) / 8;
      steps = min(own.b_.p.intermediate_size - int(part) * Shape::kDownK, Shape::kDownK) * Shape::kBytes / 32;
      own.load_scale(tile.expert, part, scale);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t column = 8 * j + 2 * (own.lane_ % 4) + c;
          token[j][c] = column < tile.rows ? own.b_.token_of(tile.first + column) : -1;
          weight[j][c] = column < tile.rows ? own.b_.weight_of(tile.first + column) : 0.f;
        }
      }
    }
  };

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

  // Operands of 64 bytes of K: two steps.
  struct Operands {
    uint32_t word[2][4], x[kTiles][4];
    float4 factor[kTiles][2];  // scales of the hidden activation, of two columns
  };

  __device__ __forceinline__ void load(uint32_t weights, uint32_t rows, int pair, int live,
                                       Operands& o) const {
    // Matrix lane / 8 of four: rows 0 to 7 and 8 to 15 of the first 16 bytes, then of the second.
    const int row = 16 * strip_ + lane_ % 16, half = lane_ / 16;
    const uint32_t own = weights + pair * (kColumns * Shape::kDownChunk) + row * Shape::kDownChunk;
#pragma unroll
    for (int s = 0; s < 2; ++s) mma::ldmatrix_x4(o.word[s], own + (((2 * s + half) ^ (row / 2 % 4)) * 16));
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= live) continue;
      const uint32_t tile = rows + j * 8 * Shape::kHiddenRow;
      mma::ldmatrix_x4(o.x[j],
                       tile + lane_ % 8 * Shape::kHiddenRow + lane_ / 8 * 16 + pair * Shape::kDownChunk);
      if constexpr (Shape::kScaled) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          o.factor[j][c] = load_scales(tile + 256 + (2 * (lane_ % 4) + c) * Shape::kHiddenRow + pair * 16);
      }
    }
  }

  __device__ __forceinline__ void multiply(const Slot& slot, uint32_t stage,
                                           float (&value)[kTiles][4]) const {
    const uint32_t weights = stage + slot_ * Shape::kDownBox;
    const uint32_t rows = stage + Shape::kWeightBytes + slot_ * Shape::kSlotRows;
    Operands operands[kAhead + 1];
    if (kAhead > 0) load(weights, rows, 0, slot.live, operands[0]);
#pragma unroll
    for (int pair = 0; pair < Shape::kDownChunks; ++pair) {
      if (2 * pair >= slot.steps) break;
      const int later = pair + kAhead;
      if (later < Shape::kDownChunks && 2 * later < slot.steps)
        load(weights, rows, later, slot.live, operands[later % (kAhead + 1)]);
      const float block = Config::kQuant == kQuantBlock ? slot.scale[pair / 2] : 1.f;
      multiply_pair(operands[pair % (kAhead + 1)], slot.live, block, value);
    }
  }

  static __device__ __forceinline__ void multiply_pair(const Operands& o, int live, float block,
                                                       float (&value)[kTiles][4]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t a[kProducts][4];
      Fragments::weights(o.word[s], a);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j >= live) continue;
        uint32_t b[kProducts][2];
        Fragments::rows({o.x[j][2 * s], o.x[j][2 * s + 1]}, b);
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          if constexpr (Shape::kScaled) {
            float part[4] = {};
            mma::m16n8k16<typename Fragments::operand_t>(part, a[i], b[i]);
#pragma unroll
            for (int c = 0; c < 4; ++c)
              value[j][c] += part[c] * (block * component(o.factor[j][c % 2], 2 * s + i));
          } else {
            mma::m16n8k16<typename Fragments::operand_t>(value[j], a[i], b[i]);
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
  __device__ __forceinline__ void add(const Slot& slot, const float (&value)[kTiles][4]) {
    constexpr bool kOfFeatures = Config::kQuant == kQuantTensor || Config::kQuant == kQuantChannel;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (slot.token[j][c] < 0) continue;
        float* sum =
            sums_ +
            ((group_ * Shape::kSlots + slot_) * b_.p.num_tokens + slot.token[j][c]) * Shape::kOutPitch +
            16 * strip_ + lane_ / 4;
        const float first = sum[0], second = sum[8];
        sum[0] = first + slot.weight[j][c] * (value[j][c] * (kOfFeatures ? slot.scale[0] : 1.f));
        sum[8] = second + slot.weight[j][c] * (value[j][c + 2] * (kOfFeatures ? slot.scale[1] : 1.f));
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
      for (int slot = 0; slot < Shape::kGroups * Shape::kSlots; ++slot) {
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
  int group_, lane_, slot_, strip_, first_column_ = 0;
  float* sums_;  // [group][slot][token][kOutPitch]
};

}  // namespace hpcjit::moe
