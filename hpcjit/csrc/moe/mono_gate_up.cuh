// Gate and up of 16 features for the rows of a tile, by all warps that compute; see mono.cuh.
//
// A product's 16 rows of weights are 8 gate rows and the 8 up rows of the same features, so a thread has both of a feature
// and a token. Each warp sums its own chunks of K; then warps take turns to add the eight sums, one token tile each.
#pragma once
#include "hpcjit/math/activation.cuh"
#include "hpcjit/ptx/global.cuh"
#include "hpcjit/ptx/named_barrier.cuh"
#include "moe/mono_fragments.cuh"

namespace hpcjit::moe {

template <class Config>
class MonoGateUp {
  using Shape = MonoShape<Config>;
  using weight_t = typename Config::weight_t;
  using Fragments = MonoFragments<weight_t>;
  static constexpr int kTiles = Shape::kTokenTiles, kComputing = Shape::kComputing,
                       kSteps = Shape::kChunk / 32;
  static constexpr bool kBlocks = Config::kQuant == kQuantBlock;
  static constexpr bool kOfRows = Config::kQuant == kQuantTensor || Config::kQuant == kQuantChannel;
  using Ring = MonoRing<Shape::kStages>;

 public:
  __device__ MonoGateUp(const MonoBlock<Config>& block, int warp, int lane)
      : b_(block), warp_(warp), lane_(lane), sums_(block.template at<float4>(0)) {}

  __device__ __forceinline__ void run(uint32_t item, Ring& ring) {
    tile_index_ = item / b_.features();
    tile_ = b_.tile(tile_index_);
    feature_ = int(item % b_.features()) * Shape::kFeatures;
    const int live = (tile_.rows + 7) / 8, turn = (warp_ + kComputing - int(turn_)) % kComputing;
    ScaleOfResult scale;
    if (turn < live) scale.load(*this, turn);
    float value[2][kTiles][4] = {};
    accumulate(ring, live, value);
    float4* sums = sums_ + (parity_ ? kComputing * Shape::kSumVecs : 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        if (j < live)
          sums[warp_ * Shape::kSumVecs + (i * kTiles + j) * 32 + lane_] =
              make_float4(value[i][j][0], value[i][j][1], value[i][j][2], value[i][j][3]);
    }
    named_barrier::sync<32 * kComputing>(1);  // also: the sums of the item before last have been read
    if (turn < live) finish(sums, turn, scale);
    parity_ ^= 1;
    turn_ = (turn_ + live) % kComputing;
  }

 private:
  // What the sums of a warp's chunk count: scales of its K, of gate and up, and of two columns of each token tile.
  struct ChunkScale {
    float weight[2], row[kTiles][2];

    __device__ void load(const MonoGateUp& own, int chunk, int live) {
      if constexpr (kBlocks) {
        const MonoParams& p = own.b_.p;
        const int blocks = (p.intermediate_size + kScaleBlock - 1) / kScaleBlock,
                  along = own.b_.gate_up_chunks();
        const float* w = p.w13_scale +
                         (int64_t(own.tile_.expert) * 2 * blocks + own.feature_ / kScaleBlock) * along +
                         chunk;
        weight[0] = w[0];
        weight[1] = w[int64_t(blocks) * along];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (j < live) row[j][i] = own.x_scale(own.column(j, i), chunk);
        }
      }
    }
  };

  // Of the result of one token tile: columns, and features (gate and up of two).
  struct ScaleOfResult {
    float row[2] = {1.f, 1.f}, weight[2][2] = {{1.f, 1.f}, {1.f, 1.f}};

    __device__ void load(const MonoGateUp& own, int j) {
      if constexpr (kOfRows) {
        const MonoParams& p = own.b_.p;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          row[i] = own.x_scale(own.column(j, i), 0);
          const int feature = own.feature_ + 8 * i + own.lane_ / 4;
#pragma unroll
          for (int up = 0; up < 2; ++up)
            weight[i][up] =
                p.w13_scale[Config::kQuant == kQuantTensor
                                ? int64_t(own.tile_.expert)
                                : (int64_t(own.tile_.expert) * 2 + up) * p.intermediate_size + feature];
        }
      }
    }
  };

  __device__ uint32_t column(int j, int i) const { return 8 * j + 2 * (lane_ % 4) + i; }

  __device__ float x_scale(uint32_t column, int group) const {
    const uint32_t row = tile_.first + min(column, uint32_t(tile_.rows) - 1);
    return b_.p.x_scale[b_.token_of(row) * b_.p.x_scale_token_stride + group * b_.p.x_scale_group_stride];
  }

  __device__ __forceinline__ void accumulate(Ring& ring, int live, float (&value)[2][kTiles][4]) {
    const int chunks = b_.gate_up_chunks();
    ChunkScale scale, next;
    next.load(*this, min(warp_, chunks - 1), live);
    for (int chunk = warp_; chunk - warp_ < chunks; chunk += Shape::kChunks) {
      scale = next;
      next.load(*this, min(chunk + Shape::kChunks, chunks - 1), live);
      mbarrier::wait(ring.full(), ring.parity);
      if (chunk < chunks)
        multiply_chunk(b_.base + Shape::kRing + ring.stage * Shape::kStageBytes, live, scale, value);
      __syncwarp();
      if (lane_ == 0) mbarrier::arrive(ring.empty());
      ring.advance();
    }
  }

  __device__ __forceinline__ void multiply_chunk(uint32_t stage, int live, const ChunkScale& scale,
                                                 float (&value)[2][kTiles][4]) {
    // Matrix lane / 8 of four: gate and up rows of the first 16 bytes, then of the second.
    const int row = lane_ % 8, half = lane_ / 16;
    const uint32_t weights = stage + lane_ / 8 % 2 * Shape::kGateUpBox +
                             warp_ * (Shape::kFeatures * Shape::kChunk) + row * Shape::kChunk;
    const uint32_t rows =
        stage + Shape::kWeightBytes + row * Shape::kRowPitch + warp_ * Shape::kChunk + lane_ / 8 * 16;
    float part[2][kTiles][4] = {};
    auto& sum = kBlocks ? part : value;
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t x[kTiles][4];
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        if (j < live) mma::ldmatrix_x4(x[j], rows + j * 8 * Shape::kRowPitch + pair * 64);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t word[4], a[Fragments::kProducts][4];
          mma::ldmatrix_x4(word, weights + i * 8 * Shape::kChunk + ((4 * pair + 2 * s + half) ^ row) * 16);
          Fragments::weights(word, a);
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
            if (j < live) multiply(a, {x[j][2 * s], x[j][2 * s + 1]}, sum[i][j]);
        }
      }
    }
    if constexpr (kBlocks) {
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
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[Fragments::kProducts][4],
                                                  const uint32_t (&word)[2], float (&sum)[4]) {
    uint32_t b[Fragments::kProducts][2];
    Fragments::rows(word, b);
#pragma unroll
    for (int i = 0; i < Fragments::kProducts; ++i)
      mma::m16n8k16<typename Fragments::operand_t>(sum, a[i], b[i]);
  }

  // Token tile `j`: sums over the warps, activation, and the way to memory. A warp does it.
  __device__ __forceinline__ void finish(const float4* sums, int j, const ScaleOfResult& scale) {
    float h[2][2], largest[2] = {0.f, 0.f};  // [features 8 i + g][columns]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 sum = sums[(i * kTiles + j) * 32 + lane_];
#pragma unroll
      for (int w = 1; w < kComputing; ++w) {
        const float4 other = sums[w * Shape::kSumVecs + (i * kTiles + j) * 32 + lane_];
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
      }
      const float gate[2] = {sum.x, sum.y}, up[2] = {sum.z, sum.w};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        h[i][c] =
            activate<Activation(Config::kActivation), false>(gate[c] * (scale.row[c] * scale.weight[i][0])) *
            (up[c] * (scale.row[c] * scale.weight[i][1]));
        largest[c] = fmaxf(largest[c], fabsf(h[i][c]));  // fmaxf drops NaN
      }
    }
    float scale_of[2] = {1.f, 1.f};
    if constexpr (Shape::kScaled) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          largest[c] = fmaxf(largest[c], __shfl_xor_sync(0xffffffffu, largest[c], offset));
        scale_of[c] = fmaxf(largest[c], kQuantFloor) / kE4m3Max;
      }
    }
    weight_t* hidden = static_cast<weight_t*>(b_.p.hidden);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (column(j, c) >= tile_.rows) continue;
      const int64_t row = tile_.first + column(j, c);
      const float inverse = Shape::kScaled ? 1.f / scale_of[c] : 1.f;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        hidden[row * b_.p.intermediate_size + feature_ + 8 * i + lane_ / 4] =
            from_float<weight_t>(h[i][c] * inverse);
      if constexpr (Shape::kScaled)
        if (lane_ < 4) b_.p.hidden_scale[row * b_.features() + feature_ / Shape::kFeatures] = scale_of[c];
    }
    global::fence_async();
    __syncwarp();
    if (lane_ == 0) global::add_release(b_.p.counters + 2 + tile_index_, 1);
  }

  const MonoBlock<Config>& b_;
  int warp_, lane_;
  float4* sums_;
  MonoTile tile_;
  uint32_t tile_index_;
  int feature_;
  int parity_ = 0, turn_ = 0;  // which buffer of sums; which warp is first to finish
};

}  // namespace hpcjit::moe
