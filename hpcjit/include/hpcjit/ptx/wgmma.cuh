// Warpgroup matrix products of 16-bit operands with fp32 sums (SM 9.0a): D[64, n] += A[64, 16] * B[n, 16]^T.
//
// A lies in registers, in the layout of m16n8k16 with 16 rows for each of the four warps; B in shared memory, K-major,
// named by a descriptor. Thread (warp w, lane 4 g + t) holds of D, for each 8 columns j: d[4 j + {0, 1}] of row 16 w + g
// and d[4 j + {2, 3}] of row 16 w + g + 8, columns 8 j + 2 t + {0, 1}.
//
// Order of use: write A and D, fence(), products, commit(), wait<n>(); between fence() and the wait that covers a product
// neither its A nor its D may be touched. `hold` keeps the compiler from moving such an access across.
#pragma once
#include "hpcjit/types.cuh"

namespace hpcjit::wgmma {

__device__ __forceinline__ void fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int n>
__device__ __forceinline__ void hold(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n>
__device__ __forceinline__ void hold(uint32_t (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// A K-major operand whose rows of kRowBytes (64 or 128, also its swizzle) lie densely, 8 rows to a swizzle atom. The
// tile starts at a multiple of 8 * kRowBytes. Adding bytes / 16 to the result steps along K within a row.
template <int kRowBytes>
__device__ __forceinline__ uint64_t descriptor(uint32_t shared_address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kAtom = 8 * kRowBytes / 16;  // from one 8 rows to the next
  return uint64_t((shared_address & 0x3ffff) >> 4) | uint64_t(1) << 16 | kAtom << 32 | kSwizzle << 62;
}

// d = a * b, or d += a * b where `add`. kColumns: 8, 16, 32, 64, 96, 128, 160, 192 or 256.
template <class T, int kColumns>
struct Product;

#define HPCJIT_LIST_4 "%0, %1, %2, %3"
#define HPCJIT_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HPCJIT_LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HPCJIT_LIST_32 \
  HPCJIT_LIST_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HPCJIT_LIST_48 \
  HPCJIT_LIST_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HPCJIT_LIST_64 \
  HPCJIT_LIST_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HPCJIT_LIST_80 \
  HPCJIT_LIST_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HPCJIT_LIST_96 \
  HPCJIT_LIST_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HPCJIT_LIST_128                                                                          \
  HPCJIT_LIST_96                                                                                 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HPCJIT_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HPCJIT_SUMS_8(i) HPCJIT_SUMS_4(i), HPCJIT_SUMS_4(i + 4)
#define HPCJIT_SUMS_16(i) HPCJIT_SUMS_8(i), HPCJIT_SUMS_8(i + 8)
#define HPCJIT_SUMS_32(i) HPCJIT_SUMS_16(i), HPCJIT_SUMS_16(i + 16)
#define HPCJIT_SUMS_48(i) HPCJIT_SUMS_32(i), HPCJIT_SUMS_16(i + 32)
#define HPCJIT_SUMS_64(i) HPCJIT_SUMS_32(i), HPCJIT_SUMS_32(i + 32)
#define HPCJIT_SUMS_80(i) HPCJIT_SUMS_64(i), HPCJIT_SUMS_16(i + 64)
#define HPCJIT_SUMS_96(i) HPCJIT_SUMS_64(i), HPCJIT_SUMS_32(i + 64)
#define HPCJIT_SUMS_128(i) HPCJIT_SUMS_64(i), HPCJIT_SUMS_64(i + 64)
#define HPCJIT_PRODUCT(Type, type, columns, sums, a0, a1, a2, a3, b, add_)                                \
  template <>                                                                                             \
  struct Product<Type, columns> {                                                                         \
    static constexpr int kSums = sums;                                                                    \
    __device__ static __forceinline__ void run(float (&d)[sums], const uint32_t (&a)[4], uint64_t b_tile, \
                                               bool add) {                                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add_                                             \
                   ", 0;\n"                                                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                  \
                   " {" HPCJIT_LIST_##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b            \
                                           ", p, 1, 1, 0;\n}"                                             \
                   : HPCJIT_SUMS_##sums(0)                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "r"(int(add)));             \
    }                                                                                                     \
  };
#define HPCJIT_PRODUCTS(columns, sums, a0, a1, a2, a3, b, add)        \
  HPCJIT_PRODUCT(bf16, "bf16", columns, sums, a0, a1, a2, a3, b, add) \
  HPCJIT_PRODUCT(fp16, "f16", columns, sums, a0, a1, a2, a3, b, add)
HPCJIT_PRODUCTS(8, 4, 4, 5, 6, 7, 8, 9)
HPCJIT_PRODUCTS(16, 8, 8, 9, 10, 11, 12, 13)
HPCJIT_PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21)
HPCJIT_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
HPCJIT_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53)
HPCJIT_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)
HPCJIT_PRODUCTS(160, 80, 80, 81, 82, 83, 84, 85)
HPCJIT_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101)
HPCJIT_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace hpcjit::wgmma
