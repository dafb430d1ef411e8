// Warpgroup matrix products with both operands in shared memory (SM 9.0a): D[64, n] += A[64, k] * B[n, k]^T with fp32
// sums, k = 16 for bf16, 32 for e4m3: 32 bytes of each row. Both are K-major and named by `wgmma::descriptor`; D and the
// order of use are those of wgmma.cuh. Shared memory that threads wrote themselves must be fenced for the asynchronous
// proxy (`copy::fence_async`) by the writer, before a barrier that the multiplying warps wait for.
#pragma once
#include "hpcjit/ptx/wgmma.cuh"

namespace hpcjit::wgmma {

// d = a * b, or d += a * b where `add`. kColumns: 8, 16, 32, 64, 96, 128, 160 or 192.
template <class T, int kColumns>
struct SharedProduct;

#define HPCJIT_SHARED_PRODUCT(Type, k, type, transposed, columns, sums, a, b, add_)                \
  template <>                                                                                      \
  struct SharedProduct<Type, columns> {                                                            \
    static constexpr int kSums = sums;                                                             \
    __device__ static __forceinline__ void run(float (&d)[sums], uint64_t a_tile, uint64_t b_tile, \
                                               bool add) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add_                                      \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns k ".f32." type "." type            \
                   " {" HPCJIT_LIST_##sums "}, %" #a ", %" #b ", p, 1, 1" transposed ";\n}"        \
                   : HPCJIT_SUMS_##sums(0)                                                         \
                   : "l"(a_tile), "l"(b_tile), "r"(int(add)));                                     \
    }                                                                                              \
  };
#define HPCJIT_SHARED_PRODUCTS(columns, sums, a, b, add)                         \
  HPCJIT_SHARED_PRODUCT(bf16, "k16", "bf16", ", 0, 0", columns, sums, a, b, add) \
  HPCJIT_SHARED_PRODUCT(e4m3, "k32", "e4m3", "", columns, sums, a, b, add)
HPCJIT_SHARED_PRODUCTS(8, 4, 4, 5, 6)
HPCJIT_SHARED_PRODUCTS(16, 8, 8, 9, 10)
HPCJIT_SHARED_PRODUCTS(32, 16, 16, 17, 18)
HPCJIT_SHARED_PRODUCTS(64, 32, 32, 33, 34)
HPCJIT_SHARED_PRODUCTS(96, 48, 48, 49, 50)
HPCJIT_SHARED_PRODUCTS(128, 64, 64, 65, 66)
HPCJIT_SHARED_PRODUCTS(160, 80, 80, 81, 82)
HPCJIT_SHARED_PRODUCTS(192, 96, 96, 97, 98)

}  // namespace hpcjit::wgmma
