// Router GEMM for few tokens and their gate, in one launch: gemm/router_stream.cuh, then moe/router_gate.cuh.
//
// Block r of a cluster takes a ticket of its token tile and rank when it starts. The last one of each rank gates tokens r,
// r + kSplits, ... of the tile: when it starts, every other block of that rank has started, and with it all of that
// block's cluster. Tickets wrap to 0. Others end when they have written their logits.
//
// counters: unsigned tickets[token tiles][kSplits], then the rows. Shared memory: that of the product, over which the
// gating warps then lay a row and a list of candidates each.
#pragma once
#include "gemm/router_stream.cuh"
#include "moe/router_gate.cuh"

namespace hpcjit::moe {

struct RouterTopkStreamParams : gemm::RouterStreamParams {
  RouterGateParams gate;
};

template <class Config>
struct TopkStreamShape {
  using Product = gemm::StreamShape<Config>;
  static constexpr int kTokens = (Product::kTokens + Config::kSplits - 1) / Config::kSplits;  // of a rank
  static constexpr int kWarps = kTokens < Config::kWarps ? kTokens : Config::kWarps;          // that gate
  static constexpr int kStaged = PassedRow<Config>::kStaged;
  static constexpr int kGateBytes = kWarps * (4 * kStaged + int(sizeof(CandidateList)));
  static constexpr int kSmemBytes = Product::kSmemBytes > kGateBytes ? Product::kSmemBytes : kGateBytes;
};

// A Sink: logits go to their token's row, and to `out` if that is wanted.
template <class Config>
struct StreamRows {
  static constexpr bool kTriggersLate = true;  // dependents read the rows
  const RouterTopkStreamParams& p;

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void put(int64_t token, int64_t expert, float value) const {
    global::pass(passed_row(p.gate, p.num_experts, token) + expert, value);
    if constexpr (Config::kHasLogits) static_cast<float*>(p.out)[token * p.out_stride + expert] = value;
  }
};

// The Sink of the one launch.
template <class Config>
struct StreamGate : StreamRows<Config> {
  static constexpr bool kTriggersLate = false;
  using StreamRows<Config>::p;
  unsigned ticket = 0;  // of thread 0

  __device__ __forceinline__ explicit StreamGate(const RouterTopkStreamParams& p) : StreamRows<Config>{p} {}

  __device__ __forceinline__ unsigned last_ticket() const {
    constexpr int kRows = gemm::StreamShape<Config>::kRows;
    return unsigned((p.num_experts + kRows - 1) / kRows) - 1;
  }

  __device__ __forceinline__ void begin() {
    if (threadIdx.x != 0) return;
    const unsigned last = last_ticket();
    const unsigned place =
        blockIdx.x / Config::kSplits / (last + 1) * Config::kSplits + blockIdx.x % Config::kSplits;
    unsigned* tickets = static_cast<unsigned*>(p.gate.counters) + place;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(tickets), "r"(last)
                 : "memory");
  }

  // By all threads, when the block's logits are written.
  __device__ __forceinline__ void gate() const {
    using Shape = TopkStreamShape<Config>;
    extern __shared__ float4 gate_memory[];
    if (!__syncthreads_or(threadIdx.x == 0 && ticket == last_ticket())) return;
    const int warp = int(Config::kWarps) - 1 - int(threadIdx.x / 32);  // those that have no sums come first
    if (warp >= Shape::kWarps) return;
    auto* lists = reinterpret_cast<CandidateList*>(gate_memory);
    float* staged = reinterpret_cast<float*>(lists + Shape::kWarps) + warp * Shape::kStaged;
    const gemm::StreamPlace<Config> place(p);
    const int64_t end = min(place.first_token + Shape::Product::kTokens, p.num_tokens);
    gate_passed<Config>(p.gate, p.num_experts, place.first_token + place.rank + warp * Config::kSplits,
                        Shape::kWarps * Config::kSplits, end, staged, lists[warp]);
  }
};

template <class Config>
__global__ void __launch_bounds__(gemm::StreamShape<Config>::kThreads, Config::kBlocksPerSm)
    router_topk_stream_kernel(const __grid_constant__ RouterTopkStreamParams p) {
  StreamGate<Config> sink(p);
  gemm::router_stream<Config>(p, sink);
  sink.gate();
}

template <class Config>
struct RouterTopkStream {
  using Params = RouterTopkStreamParams;
  using Shape = TopkStreamShape<Config>;

  static cudaError_t prepare() {
    return gemm::prepare_router_stream<Config>(router_topk_stream_kernel<Config>, Shape::kSmemBytes);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const LaunchShape shape = gemm::router_stream_launch<Config>(p, Shape::kSmemBytes);
    return hpcjit::launch(router_topk_stream_kernel<Config>, shape, stream, p);
  }
};

}  // namespace hpcjit::moe
