// Gate and up of 16 features for the rows of a tile; see mono.cuh.
//
// A product's 16 rows of weights are 8 gate rows and the 8 up rows of the same features, so a thread has both of a
// feature and a token. Groups of warps take turns of stages; each warp sums its own chunks of K and goes on; others
// add all sums (two buffers).
#pragma once
#include "hpcjit/math/activation.cuh"
#include "hpcjit/ptx/global.cuh"
#include "hpcjit/ptx/named_barrier.cuh"
#include "moe/mono_fragments.cuh"

namespace hpcjit::moe {

// What both kinds of warps know of an item.
template <class Config>
struct MonoGateUpItem {
  using Shape = MonoShape<Config>;
  const MonoBlock<Config>& b;
  uint32_t index;
  TokenTile tile;
  int feature, live;  // first feature; token tiles with rows

  __device__ MonoGateUpItem(const MonoBlock<Config>& block, uint32_t item)
      : b(block),
        index(item / block.features()),
        tile(block.tile(index)),
        feature(int(item - index * block.features()) * Shape::kFeatures),
        live((tile.rows + 7) / 8) {}

  // Of a column of the tile; past its end, of its last row.
  __device__ float x_scale(uint32_t column, int group) const {
    const uint32_t row = tile.first + min(column, uint32_t(tile.rows) - 1);
    return b.p.x_scale[b.token_of(row) * b.p.x_scale_token_stride + group * b.p.x_scale_group_stride];
  }
};

// Column i of two that a thread has of token tile j.
__device__ __forceinline__ uint32_t mono_column(int lane, int j, int i) {
  return 8 * j + 2 * (lane % 4) + i;
}

// A warp that computes: its chunks of K.
template <class Config>
class MonoGateUp {
  using Shape = MonoShape<Config>;
  using Item = MonoGateUpItem<Config>;
  using Fragments = MonoFragments<typename Config::weight_t>;
  static constexpr int kTiles = Shape::kTokenTiles, kSteps = Shape::kChunk / 32,
                       kProducts = Fragments::kProducts;
  static constexpr int kWarps = Shape::kGroups * Shape::kComputing;
  static constexpr bool kBlocks = Config::kQuant == kQuantBlock;
  static constexpr bool kLate =
      Shape::kGroups > 1;  // scales are loaded when they are needed, for want of registers
  using Sums = float[2][kTiles][4];
  using Ring = MonoRing<Shape::kStages>;

 public:
  __device__ MonoGateUp(const MonoBlock<Config>& block, int warp, int lane)
      : b_(block),
        group_(warp / Shape::kComputing),
        warp_(warp % Shape::kComputing),
        lane_(lane),
        buffers_{block.base + Shape::kSumBarriersAt} {}

  __device__ __forceinline__ void run(uint32_t index, Ring& ring) {
    const Item item(b_, index);
    // Of the stages of K, not of the warp: which group has the first may depend on what the block had before.
    const int place = (group_ ^ turn_) * Shape::kComputing + warp_;
    Sums value = {};
    accumulate(item, ring, value);
    mbarrier::wait(buffers_.empty(), buffers_.parity ^ 1);
    float4* sums = b_.template at<float4>(0) + (buffers_.stage * kWarps + place) * Shape::kSumVecs + lane_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        if (j < item.live)
          sums[(i * kTiles + j) * 32] =
              make_float4(value[i][j][0], value[i][j][1], value[i][j][2], value[i][j][3]);
    }
    __syncwarp();
    if (lane_ == 0) mbarrier::arrive(buffers_.full());
    buffers_.advance();
  }

  // Until the sums of all items have been read.
  __device__ void drain() {
    for (int i = 0; i < 2; ++i) {
      mbarrier::wait(buffers_.empty(), buffers_.parity ^ 1);
      buffers_.advance();
    }
  }

 private:
  // What the sums of a warp's chunk count: scales of its K, of gate and up, and of two columns of each token tile.
  struct ChunkScale {
    float weight[2], row[kTiles][2];

    __device__ void load(const Item& item, int chunk, int lane) {
      if constexpr (kBlocks) {
        const MonoParams& p = item.b.p;
        const int blocks = (p.intermediate_size + kScaleBlock - 1) / kScaleBlock,
                  along = item.b.gate_up_chunks();
        const float* w = p.w13_scale +
                         (int64_t(item.tile.expert) * 2 * blocks + item.feature / kScaleBlock) * along +
                         chunk;
        weight[0] = w[0];
        weight[1] = w[int64_t(blocks) * along];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (j < item.live) row[j][i] = item.x_scale(mono_column(lane, j, i), chunk);
        }
      }
    }
  };

  __device__ __forceinline__ void accumulate(const Item& item, Ring& ring, Sums& value) {
    const int chunks = b_.gate_up_chunks(), stages = b_.gate_up_stages();
    int k = group_ ^ turn_;  // the group's first stage
    ring.advance(uint32_t(min(k, stages)));
    for (; k < stages; k += Shape::kGroups) {
      const int chunk = b_.gate_up_stage(item.feature, k) * Shape::kChunks + warp_;
      ChunkScale scale;
      scale.load(item, min(chunk, chunks - 1), lane_);
      mbarrier::wait(ring.full(), ring.parity);
      if (chunk < chunks) {
        const uint32_t stage = b_.base + Shape::kRing + ring.stage * Shape::kStageBytes;
        if constexpr (kBlocks) {
          Sums part = {};
          multiply_chunk(stage, item.live, part);
          promote(part, item.live, scale, value);
        } else {
          multiply_chunk(stage, item.live, value);
        }
      }
      __syncwarp();
      if (lane_ == 0) mbarrier::arrive(ring.empty());
      ring.advance(uint32_t(min(Shape::kGroups, stages - k)));
    }
    if (Shape::kGroups > 1) turn_ ^= stages % 2;
  }

  static __device__ __forceinline__ void promote(const Sums& part, int live, const ChunkScale& scale,
                                                 Sums& value) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (j < live) value[i][j][c] += part[i][j][c] * (scale.weight[c / 2] * scale.row[j][c % 2]);
      }
    }
  }

  __device__ __forceinline__ void multiply_chunk(uint32_t stage, int live, Sums& sum) const {
    // Matrix lane / 8 of four: gate and up rows of the first 16 bytes, then of the second.
    const int row = lane_ % 8, half = lane_ / 16;
    const uint32_t weights = stage + lane_ / 8 % 2 * Shape::kGateUpBox +
                             warp_ * (Shape::kFeatures * Shape::kChunk) + row * Shape::kChunk;
    const uint32_t rows =
        stage + Shape::kWeightBytes + row * Shape::kRowPitch + warp_ * Shape::kChunk + lane_ / 8 * 16;
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t word[2][2][4], x[kTiles][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          mma::ldmatrix_x4(word[s][i],
                           weights + i * 8 * Shape::kChunk + ((4 * pair + 2 * s + half) ^ row) * 16);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        if (j < live) mma::ldmatrix_x4(x[j], rows + j * 8 * Shape::kRowPitch + pair * 64);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t a[2][kProducts][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) Fragments::weights(word[s][i], a[i]);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j >= live) continue;
          uint32_t b[kProducts][2];
          Fragments::rows({x[j][2 * s], x[j][2 * s + 1]}, b);
#pragma unroll
          for (int k = 0; k < kProducts; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              mma::m16n8k16<typename Fragments::operand_t>(sum[i][j], a[i][k], b[k]);
          }
        }
      }
    }
  }

  const MonoBlock<Config>& b_;
  int group_, warp_, lane_;  // the warp's number is that in its group
  int turn_ = 0;             // which group has the first stage of an item
  MonoRing<2> buffers_;      // of sums
};

// A warp that finishes: every kFinishing-th item, whose sums it adds, to which it applies the activation, and whose
// hidden rows it writes.
template <class Config>
class MonoHidden {
  using Shape = MonoShape<Config>;
  using Item = MonoGateUpItem<Config>;
  using weight_t = typename Config::weight_t;
  static constexpr int kTiles = Shape::kTokenTiles;
  static constexpr int kWarps = Shape::kGroups * Shape::kComputing;
  static constexpr bool kOfRows = Config::kQuant == kQuantTensor || Config::kQuant == kQuantChannel;

 public:
  __device__ MonoHidden(const MonoBlock<Config>& block, int number)
      : b_(block), items_(block), number_(number), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    const uint32_t end = b_.gate_up_items();
    uint32_t index;
    for (int count = 0; (index = items_.next(lane_)) < end; ++count)
      if (count % Shape::kFinishing == number_) finish(Item(b_, index), count % 2, count / 2 % 2);
    items_.leave(lane_, b_.items(), index);
  }

 private:
  // Of the result: columns, and gate and up of two features.
  struct Scale {
    float row[2] = {1.f, 1.f}, weight[2][2] = {{1.f, 1.f}, {1.f, 1.f}};

    __device__ void load(const Item& item, int lane, int j) {
      if constexpr (kOfRows) {
        const MonoParams& p = item.b.p;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          row[i] = item.x_scale(mono_column(lane, j, i), 0);
          const int feature = item.feature + 8 * i + lane / 4;
#pragma unroll
          for (int up = 0; up < 2; ++up)
            weight[i][up] =
                p.w13_scale[Config::kQuant == kQuantTensor
                                ? int64_t(item.tile.expert)
                                : (int64_t(item.tile.expert) * 2 + up) * p.intermediate_size + feature];
        }
      }
    }
  };

  __device__ __forceinline__ void finish(const Item& item, int buffer, uint32_t parity) {
    const uint32_t barriers = b_.base + Shape::kSumBarriersAt + 16 * buffer;  // full, empty
    Scale scale[kTiles];
    float h[kTiles][2][2];  // [features 8 i + g][columns]
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      if (j < item.live) scale[j].load(item, lane_, j);
    mbarrier::wait(barriers, parity);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      if (j < item.live) activate_sums(buffer, j, scale[j], h[j]);
    __syncwarp();
    if (lane_ == 0) mbarrier::arrive(barriers + 8);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      if (j < item.live) write(item, j, h[j]);
    global::fence_async();
    __syncwarp();
    if (lane_ == 0) global::add_release(b_.p.counters + 2 + item.index, 1);
  }

  __device__ __forceinline__ void activate_sums(int buffer, int tile, const Scale& scale,
                                                float (&h)[2][2]) const {
    const float4* sums = b_.template at<float4>(0) + buffer * kWarps * Shape::kSumVecs + lane_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 sum = sums[(i * kTiles + tile) * 32];
#pragma unroll 5  // registers end there
      for (int w = 1; w < kWarps; ++w) {
        const float4 other = sums[w * Shape::kSumVecs + (i * kTiles + tile) * 32];
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
      }
      const float gate[2] = {sum.x, sum.y}, up[2] = {sum.z, sum.w};
#pragma unroll
      for (int c = 0; c < 2; ++c)
        h[i][c] =
            activate<Activation(Config::kActivation), false>(gate[c] * (scale.row[c] * scale.weight[i][0])) *
            (up[c] * (scale.row[c] * scale.weight[i][1]));
    }
  }

  __device__ __forceinline__ void write(const Item& item, int tile, const float (&h)[2][2]) const {
    const uint32_t part = unsigned(item.feature) / Shape::kDownK,
                   place = unsigned(item.feature) % Shape::kDownK;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float scale = 1.f;
      if constexpr (Shape::kScaled) scale = scale_of(h[0][c], h[1][c]);
      const uint32_t column = mono_column(lane_, tile, c);
      if (column >= item.tile.rows) continue;
      uint8_t* row = b_.hidden_row(part, item.tile.first + column);
      const float inverse = 1.f / scale;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        reinterpret_cast<weight_t*>(row)[place + 8 * i + lane_ / 4] = from_float<weight_t>(h[i][c] * inverse);
      if constexpr (Shape::kScaled)
        if (lane_ < 4) reinterpret_cast<float*>(row + 256)[place / Shape::kFeatures] = scale;
    }
  }

  // Of the 16 features of a column.
  static __device__ __forceinline__ float scale_of(float first, float second) {
    float largest = fmaxf(fabsf(first), fabsf(second));  // fmaxf drops NaN
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    return fmaxf(largest, kQuantFloor) / kE4m3Max;
  }

  const MonoBlock<Config>& b_;
  MonoItems<Config> items_;
  int number_, lane_;
};

}  // namespace hpcjit::moe
