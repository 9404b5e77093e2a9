// What CUDA C++ has and C++ has not: qualifiers, vector types, built-in variables and functions, as far as the kernels
// use them. A kernel's source follows this file and instructions.h.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(bytes) alignas(bytes)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {
struct Index {
  int x;
};
// The runtime knows which thread runs. A thread never becomes another, so a compiler may keep its answers.
__attribute__((const)) Index thread_index();
__attribute__((const)) Index block_index();
__attribute__((const)) Index grid_size();
__attribute__((const)) unsigned char* dynamic_shared();
// The place of the source's `number`-th declaration of static shared memory, the same in every block.
__attribute__((const)) void* static_shared(int number, size_t bytes, size_t alignment);

// A kernel's arguments arrive as addresses of values, as the driver takes them, wherever these lie.
template <class Value>
__attribute__((no_sanitize("thread", "alignment"))) Value copied(const void* from) {
  Value value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}
template <class... Parameters, size_t... I>
__attribute__((no_sanitize("thread", "alignment"))) void call(void (*kernel)(Parameters...), void** arguments,
                                                              std::index_sequence<I...>) {
  kernel(copied<std::remove_cv_t<std::remove_reference_t<Parameters>>>(arguments[I])...);
}
template <class... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Parameters...>{});
}
}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define gridDim (emulator::grid_size())

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
size_t __cvta_generic_to_shared(const void* p);
void __syncthreads();
void __syncwarp();
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
