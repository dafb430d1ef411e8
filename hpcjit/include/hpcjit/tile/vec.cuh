// A vector of kN elements moved by one access of up to 16 bytes, and its fp32 view.
#pragma once
#include "hpcjit/types.cuh"

namespace hpcjit {

enum class Cache { kDefault, kStream };  // kStream: read or written once, leave L1 and L2 to others

template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <class T, int kN>
struct alignas(sizeof(T) * kN > 16 ? 16 : sizeof(T) * kN) Vec {
  static constexpr int kBytes = sizeof(T) * kN;
  static constexpr int kWordBytes = kBytes > 16 ? 16 : kBytes;
  static constexpr int kWords = kBytes / kWordBytes;
  static_assert(kBytes % kWordBytes == 0 && (kBytes & (kBytes - 1)) == 0,
                "a vector is a power of two of bytes");
  using word_t = typename Word<kWordBytes>::type;

  T data[kN];

  __device__ __forceinline__ word_t& word(int i) { return reinterpret_cast<word_t*>(this)[i]; }
  __device__ __forceinline__ const word_t& word(int i) const {
    return reinterpret_cast<const word_t*>(this)[i];
  }

  template <Cache kCache = Cache::kDefault>
  __device__ __forceinline__ void load(const T* source) {
    const word_t* p = reinterpret_cast<const word_t*>(source);
#pragma unroll
    for (int i = 0; i < kWords; ++i) word(i) = kCache == Cache::kStream ? __ldcs(p + i) : p[i];
  }

  template <Cache kCache = Cache::kDefault>
  __device__ __forceinline__ void store(T* target) const {
    word_t* p = reinterpret_cast<word_t*>(target);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kCache == Cache::kStream) {
        __stcs(p + i, word(i));
      } else {
        p[i] = word(i);
      }
    }
  }

  // Makes the compiler convert again at the next use instead of keeping fp32 copies of everything in
  // registers.
  __device__ __forceinline__ void forget() {
    static_assert(kBytes % 4 == 0, "whole registers");
    uint32_t* w = reinterpret_cast<uint32_t*>(this);
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) asm volatile("" : "+r"(w[i]));
  }

  __device__ __forceinline__ void to(float (&x)[kN]) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = to_float(data[i]);
  }

  __device__ __forceinline__ void from(const float (&x)[kN]) {
    if constexpr (sizeof(T) == 2 && kN % 2 == 0) {
      uint32_t* w = reinterpret_cast<uint32_t*>(this);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) w[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
    } else if constexpr (sizeof(T) == 1 && kN % 2 == 0) {
      uint16_t* w = reinterpret_cast<uint16_t*>(this);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) w[i] = pack2_e4m3(x[2 * i], x[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) data[i] = from_float<T>(x[i]);
    }
  }
};

}  // namespace hpcjit
