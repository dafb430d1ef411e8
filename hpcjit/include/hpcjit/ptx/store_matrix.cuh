// Matrices of 16-bit elements from registers to shared memory (SM 9.0).
#pragma once
#include <stdint.h>

namespace hpcjit {

// 1, 2 or 4 matrices of 8 x 8, each transposed: lane l holds of matrix i its row l / 4, columns 2 (l % 4) and the next; its
// column l % 8 of matrix l / 8 becomes the 16 bytes at `target` of lane l. Lanes beyond the last matrix name no target.
template <int kMatrices>
__device__ __forceinline__ void store_matrices_transposed(uint32_t target, const uint32_t (&x)[kMatrices]) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
  if constexpr (kMatrices == 1)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(target), "r"(x[0])
                 : "memory");
  else if constexpr (kMatrices == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(target), "r"(x[0]),
                 "r"(x[1])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

}  // namespace hpcjit
