// A sum over blocks that goes through scratch: the block with the last ticket adds up what all have left there.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"

namespace ticket_test {

struct TicketParams {
  float* out;        // 1 + 2 + ... + blocks
  float* workspace;  // one value per block
  int* counters;     // the last of them counts tickets
  int64_t num_counters;
  int64_t blocks;
  int64_t delay;  // clock cycles that the first block takes
};

__global__ void ticket_kernel(const __grid_constant__ TicketParams p) {
  hpcjit::pdl::trigger();
  hpcjit::pdl::wait();
  int* tickets = p.counters + p.num_counters - 1;
  p.workspace[blockIdx.x] = float(blockIdx.x + 1);
  for (const int64_t end = clock64() + p.delay; blockIdx.x == 0 && clock64() < end;) {
  }
  __threadfence();
  if (atomicAdd(tickets, 1) != int(p.blocks) - 1) return;
  __threadfence();
  float sum = 0.f;
  for (int i = 0; i < int(p.blocks); ++i) sum += __ldcg(p.workspace + i);
  *p.out = sum;
  *tickets = 0;
}

template <class Config>
struct Ticket {
  using Params = TicketParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, ticket_kernel);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    return hpcjit::launch(ticket_kernel, {p.blocks, 1, 0, true}, stream, p);
  }
};

}  // namespace ticket_test
