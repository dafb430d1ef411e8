// Row normalisation: RMSNorm and LayerNorm, with an optional residual add in front and FP8 quantisation
// behind.
//
//   s = input + residual                           (kHasResidual; s, rounded, replaces residual)
//   y = s * rsqrt(mean(s^2) + eps) * w             (RMS; w = weight, or 1 + weight with kUnitOffset)
//   y = (s - mean) * rsqrt(var + eps) * w + bias   (kLayerNorm; kHasBias)
//   q = y / scale                                  (kQuant: scale per row from max|y|, or one given value)
//
// kRowThreads threads share a row: a whole block, or one warp of a block that holds kThreads / 32 rows. With
// kVecsPerThread > 0 the row stays in registers and is read once; with 0 it is read again in every pass
// (mostly from L2) and may have any size. All arithmetic is fp32. Reductions have a fixed order: results
// repeat bit for bit and do not depend on other rows. Shared memory: one float per warp for each of at most
// three reductions, each written and read once.
//
// kLateWeight loads the weights after the reduction: registers for more resident blocks, where those matter
// more than the latency of a load that hits L1. kPrefetch: the row is pulled into L2 while the predecessor
// still runs, line by line with its weights (few rows) or by one request (many). That reads nothing, so a line
// that the predecessor writes later is read correctly after pdl::wait().
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/prefetch.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::layernorm {

constexpr int kPrefetchLines = 1, kPrefetchRow = 2;
constexpr int kQuantNone = 0, kQuantDynamic = 1, kQuantStatic = 2;

struct NormParams {
  const void* input;
  void* residual;
  const void* weight;
  const void* bias;
  void* output;
  float* scale;  // one per row, or a single one when static
  int64_t num_tokens;
  int64_t hidden_size;
  int64_t input_stride;
  int64_t residual_stride;
  int64_t output_stride;
  double eps;
};

// What both kinds of row share: pointers of this row, and loads of one vector.
template <class Config>
struct RowBase {
  using input_t = typename Config::input_t;
  using weight_t = typename Config::weight_t;
  using output_t = typename Config::output_t;
  static constexpr int kVec = Config::kVec;
  static constexpr Cache kIn = Config::kStreamIn ? Cache::kStream : Cache::kDefault;
  static constexpr Cache kOut = Config::kStreamOut ? Cache::kStream : Cache::kDefault;

  const input_t* input;
  input_t* residual;
  output_t* output;
  const weight_t* weight;
  const weight_t* bias;
  int lane;
  int num_vecs;

  __device__ RowBase(const NormParams& p, int64_t row, int lane)
      : input(static_cast<const input_t*>(p.input) + row * p.input_stride),
        residual(static_cast<input_t*>(p.residual) + row * p.residual_stride),
        output(static_cast<output_t*>(p.output) + row * p.output_stride),
        weight(static_cast<const weight_t*>(p.weight)),
        bias(static_cast<const weight_t*>(p.bias)),
        lane(lane),
        num_vecs(int(p.hidden_size / kVec)) {}

  __device__ void prefetch_vector(int i) const {
    if (lane * kVec * int(sizeof(input_t)) % 128 != 0 || !inside(i)) return;  // one thread per line
    prefetch_l2(input + offset(i));
    if constexpr (Config::kHasResidual) prefetch_l2(residual + offset(i));
    prefetch_l2(weight + offset(i));
    if constexpr (Config::kHasBias) prefetch_l2(bias + offset(i));
  }

  __device__ void prefetch_row() const {
    if (lane != 0) return;
    const uint32_t bytes = num_vecs * kVec * uint32_t(sizeof(input_t));
    prefetch_l2(input, bytes);
    if constexpr (Config::kHasResidual) prefetch_l2(residual, bytes);
  }

  __device__ int offset(int i) const { return (lane + i * Config::kRowThreads) * kVec; }
  __device__ bool inside(int i) const { return lane + i * Config::kRowThreads < num_vecs; }

  __device__ void store_residual(int i, const float (&s)[kVec]) {
    Vec<input_t, kVec> rounded;
    rounded.from(s);
    rounded.template store<kOut>(residual + offset(i));
  }

  __device__ void store_output(int i, const float (&y)[kVec]) {
    Vec<output_t, kVec> rounded;
    rounded.from(y);
    rounded.template store<kOut>(output + offset(i));
  }

  __device__ static void add(const Vec<input_t, kVec>& a, const Vec<input_t, kVec>& b, float (&s)[kVec]) {
    a.to(s);
    if constexpr (Config::kHasResidual) {
      float r[kVec];
      b.to(r);
#pragma unroll
      for (int j = 0; j < kVec; ++j) s[j] += r[j];
    }
  }
};

// A row held in registers: as it came (and converted again in every pass), or, when a residual was added, as
// the fp32 sum. `each(f)` calls f(i, s) for the vectors of this thread.
template <class Config>
struct ResidentRow : RowBase<Config> {
  using Base = RowBase<Config>;
  using typename Base::input_t;
  using typename Base::weight_t;
  static constexpr int kVec = Config::kVec;
  static constexpr int kVecs = Config::kVecsPerThread;
  static constexpr bool kReread = false;
  static constexpr bool kPacked = !Config::kHasResidual && sizeof(input_t) * kVec % 4 == 0;

  Vec<input_t, kVec> raw[kVecs];
  Vec<weight_t, kVec> raw_weight[Config::kLateWeight ? 1 : kVecs],
      raw_bias[Config::kHasBias && !Config::kLateWeight ? kVecs : 1];
  float sums[kPacked ? 1 : kVecs][kVec];

  __device__ ResidentRow(const NormParams& p, int64_t row, int lane) : Base(p, row, lane) {}

  __device__ bool inside(int i) const { return Config::kExact || Base::inside(i); }

  __device__ void prefetch() const {
    if constexpr (Config::kPrefetch == kPrefetchRow) {
      this->prefetch_row();
    } else {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) this->prefetch_vector(i);
    }
  }

  __device__ void load() {
    Vec<input_t, kVec> residual[Config::kHasResidual ? kVecs : 1];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!inside(i)) continue;
      raw[i].template load<Base::kIn>(this->input + this->offset(i));
      if constexpr (Config::kHasResidual)
        residual[i].template load<Base::kIn>(this->residual + this->offset(i));
    }
    if constexpr (!Config::kLateWeight) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (!inside(i)) continue;
        raw_weight[i].load(this->weight + this->offset(i));
        if constexpr (Config::kHasBias) raw_bias[i].load(this->bias + this->offset(i));
      }
    }
    if constexpr (!kPacked) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (!inside(i)) continue;
        Base::add(raw[i], residual[Config::kHasResidual ? i : 0], sums[i]);
        if constexpr (Config::kHasResidual) this->store_residual(i, sums[i]);
      }
    }
  }

  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!inside(i)) continue;
      if constexpr (kPacked) {
        float s[kVec];
        raw[i].forget();
        raw[i].to(s);
        f(i, s);
      } else {
        f(i, sums[i]);
      }
    }
  }

  __device__ Vec<weight_t, kVec> weight_at(int i) const {
    if constexpr (!Config::kLateWeight) return raw_weight[i];
    Vec<weight_t, kVec> w;
    w.load(this->weight + this->offset(i));
    return w;
  }
  __device__ Vec<weight_t, kVec> bias_at(int i) const {
    if constexpr (!Config::kLateWeight) return raw_bias[i];
    Vec<weight_t, kVec> w;
    w.load(this->bias + this->offset(i));
    return w;
  }
};

// A row of any size, read again in every pass.
template <class Config>
struct StreamedRow : RowBase<Config> {
  using Base = RowBase<Config>;
  using typename Base::input_t;
  using typename Base::weight_t;
  static constexpr int kVec = Config::kVec;
  static constexpr bool kReread = true;

  __device__ StreamedRow(const NormParams& p, int64_t row, int lane) : Base(p, row, lane) {}

  __device__ void prefetch() const { this->prefetch_vector(0); }  // whichever kind
  __device__ void load() {}

  template <class F>
  __device__ void each(F f) {
    for (int i = 0; this->inside(i); ++i) {
      Vec<input_t, kVec> a, b;
      float s[kVec];
      a.load(this->input + this->offset(i));
      if constexpr (Config::kHasResidual) b.load(this->residual + this->offset(i));
      Base::add(a, b, s);
      f(i, s);
    }
  }

  __device__ Vec<weight_t, kVec> weight_at(int i) const {
    Vec<weight_t, kVec> w;
    w.load(this->weight + this->offset(i));
    return w;
  }
  __device__ Vec<weight_t, kVec> bias_at(int i) const {
    Vec<weight_t, kVec> b;
    b.load(this->bias + this->offset(i));
    return b;
  }
};

template <class Config, class Row>
__device__ __forceinline__ void normalise(Row& row, const NormParams& p, int64_t row_index, float* scratch) {
  constexpr int kVec = Config::kVec;
  constexpr int kWarps = Config::kRowThreads / 32;
  const float hidden_size = float(p.hidden_size);

  float mean = 0.f;
  if constexpr (Config::kLayerNorm) {
    row.each([&](int, float (&s)[kVec]) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) mean += s[j];
    });
    mean = reduce_block<Add, Config::kRowThreads>(mean, scratch) / hidden_size;
  }
  float squares = 0.f;
  row.each([&](int, float (&s)[kVec]) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float d = Config::kLayerNorm ? s[j] - mean : s[j];
      squares += d * d;
    }
  });
  squares = reduce_block<Add, Config::kRowThreads>(squares, scratch + kWarps);
  const float rstd = rsqrtf(squares / hidden_size + float(p.eps));

  auto affine = [&](int i, const float (&s)[kVec], float (&y)[kVec]) {
    float w[kVec], b[kVec];
    row.weight_at(i).to(w);
    if constexpr (Config::kHasBias) row.bias_at(i).to(b);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      y[j] = (Config::kLayerNorm ? s[j] - mean : s[j]) * rstd * (Config::kUnitOffset ? 1.f + w[j] : w[j]);
      if constexpr (Config::kHasBias) y[j] += b[j];
    }
  };

  float inverse_scale = 1.f;
  if constexpr (Config::kQuant == kQuantDynamic) {
    float largest = 0.f;
    row.each([&](int i, float (&s)[kVec]) {
      float y[kVec];
      affine(i, s, y);
#pragma unroll
      for (int j = 0; j < kVec; ++j) largest = fmaxf(largest, fabsf(y[j]));
    });
    largest = reduce_block<Max, Config::kRowThreads>(largest, scratch + 2 * kWarps);
    const float scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
    inverse_scale = 1.f / scale;
    if (row.lane == 0) p.scale[row_index] = scale;
  } else if constexpr (Config::kQuant == kQuantStatic) {
    inverse_scale = 1.f / *p.scale;
  }

  row.each([&](int i, float (&s)[kVec]) {
    if constexpr (Row::kReread && Config::kHasResidual) row.store_residual(i, s);
    float y[kVec];
    affine(i, s, y);
    if constexpr (Config::kQuant != kQuantNone) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] *= inverse_scale;
    }
    row.store_output(i, y);
  });
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    norm_kernel(const __grid_constant__ NormParams p) {
  using Row = std::conditional_t<(Config::kVecsPerThread > 0), ResidentRow<Config>, StreamedRow<Config>>;
  constexpr int kRows = Config::kThreads / Config::kRowThreads;
  static_assert(kRows == 1 || Config::kRowThreads == 32, "several rows per block: one warp each");
  __shared__ float scratch[3 * (Config::kRowThreads / 32)];

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  const int64_t index = int64_t(blockIdx.x) * kRows + threadIdx.x / Config::kRowThreads;
  if (index >= p.num_tokens) return;
  Row row(p, index, threadIdx.x % Config::kRowThreads);
  if constexpr (Config::kPrefetch != 0) row.prefetch();
  pdl::wait();
  row.load();
  pdl::trigger_at<Config::kTrigger, pdl::kAfterLoads>();
  normalise<Config>(row, p, index, scratch);
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct Norm {
  using Params = NormParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, norm_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.num_tokens, Config::kThreads / Config::kRowThreads);
    return hpcjit::launch(norm_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::layernorm
