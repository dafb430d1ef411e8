// The launch ABI of a finished binary: three C functions, and nothing else is exported (the link uses a version script).
//
//   int hpcjit_launch(const void* params, int device, void* stream)   0 or a cudaError_t
//   int hpcjit_prepare(int device)                                    loads the module, raises shared-memory limits
//   const char* hpcjit_error(int code)                                cudaGetErrorString; for -1 the kinds of the slots
//
// `params` points at an array of 64-bit slots that is the operator's `Params` struct. Each field is a pointer ('p'), a
// signed 64-bit integer ('i') or a double ('d'); the kinds are found at compile time, so the host side knows without
// being told whether `1` is an integer or the number 1.0.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#ifndef HPCJIT_DEBUG
#define HPCJIT_DEBUG 0
#endif

namespace hpcjit::abi {

// Initialises one field of Params and notes which kind of value the field took. Any other type (float, int, a struct) has
// no conversion or an ambiguous one: a compile error in `kinds_of` means that a field is not of the three kinds.
struct Recorder {
  char* kind;
  template <class T>
  constexpr operator T*() const {
    *kind = 'p';
    return nullptr;
  }
  constexpr operator long() const {
    *kind = 'i';
    return 0;
  }
  constexpr operator long long() const {
    *kind = 'i';
    return 0;
  }
  constexpr operator double() const {
    *kind = 'd';
    return 0;
  }
};

template <int kSlots>
struct Kinds {
  char text[kSlots + 1];
};

template <class Params, int kSlots, std::size_t... kFields>
constexpr Kinds<kSlots> kinds_of(std::index_sequence<kFields...>) {
  Kinds<kSlots> kinds = {};
  static_cast<void>(Params{Recorder{&kinds.text[kFields]}...});
  return kinds;
}

template <class Params, int kSlots>
struct Slots {
  static_assert(sizeof(Params) == 8 * kSlots && alignof(Params) == 8,
                "Params must have exactly one 64-bit field for each name in Template.params");
  static constexpr Kinds<kSlots> kKinds = kinds_of<Params, kSlots>(std::make_index_sequence<kSlots>{});
};

// Runs `work` with `device` current and restores the caller's device. A failed call also leaves its code in the runtime's
// "last error", which the next unrelated check (torch's, for one) would report as its own: it is taken off here.
template <class Work>
int on_device(int device, Work&& work) {
  int previous = 0;
  cudaError_t status = cudaGetDevice(&previous);
  const bool moved = status == cudaSuccess && previous != device;
  if (moved) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = work();
  if (moved) {
    const cudaError_t restored = cudaSetDevice(previous);
    if (status == cudaSuccess) status = restored;
  }
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return static_cast<int>(status);
}

// Debug builds report a fault at the launch that caused it. A stream that is being captured must not be waited on.
inline cudaError_t finish(cudaStream_t stream) {
#if HPCJIT_DEBUG
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t status = cudaStreamIsCapturing(stream, &capture);
  if (status != cudaSuccess || capture != cudaStreamCaptureStatusNone) return status;
  return cudaStreamSynchronize(stream);
#else
  static_cast<void>(stream);
  return cudaSuccess;
#endif
}

template <class Operator, int kSlots>
int launch(const void* params, int device, void* stream) {
  return on_device(device, [&] {
    const auto queue = static_cast<cudaStream_t>(stream);
    const cudaError_t status =
        Operator::launch(*static_cast<const typename Operator::Params*>(params), queue);
    return status == cudaSuccess ? finish(queue) : status;
  });
}

template <class Operator, int kSlots>
const char* error(int code) {
  using Layout = Slots<typename Operator::Params, kSlots>;
  return code == -1 ? Layout::kKinds.text : cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // namespace hpcjit::abi

#define HPCJIT_PUBLIC extern "C" __attribute__((visibility("default")))

#define HPCJIT_EXPORT(Operator, kSlots)                                           \
  HPCJIT_PUBLIC int hpcjit_launch(const void* params, int device, void* stream) { \
    return ::hpcjit::abi::launch<Operator, kSlots>(params, device, stream);       \
  }                                                                               \
  HPCJIT_PUBLIC int hpcjit_prepare(int device) {                                  \
    return ::hpcjit::abi::on_device(device, [] { return Operator::prepare(); });  \
  }                                                                               \
  HPCJIT_PUBLIC const char* hpcjit_error(int code) {                              \
    return ::hpcjit::abi::error<Operator, kSlots>(code);                          \
  }
