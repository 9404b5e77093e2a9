// Attention of many queries, on Hopper's warpgroup products: what the two kernels share, `whole.cu` (a vision tower) and
// `shared_keys.cu` (a prefix). Each is compiled with this file before it.
//
// Sizes arrive as macros: D head size, QUANT (FP8 output), HALF (FP16 instead of BF16); more in each kernel's file. `product_*`
// wrap wgmma and are generated (`wgmma.py`).

struct Output {
  void* data;  // (B, T, H * D), contiguous
  float inverse_scale;
};

// Two neighbours, the first in the lower half.
__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 v;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#endif
  return v;
}
// Two neighbours as they are put out.
__device__ __forceinline__ u32 finished(const Output& out, float first, float second) {
#if QUANT
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(second * out.inverse_scale), "f"(first * out.inverse_scale));
  return v;
#else
  return narrow(first, second);
#endif
}

// -- products ---------------------------------------------------------------------------------------------------------

// Where an operand lies: address, the two strides of its canonical layout in bytes, swizzled in 128 bytes or not at all.
__device__ __forceinline__ u64 operand(u32 address, u32 leading, u32 stride, bool swizzled) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)swizzled << 62;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// What threads wrote to shared memory is seen by the tensor cores after this and a barrier.
__device__ __forceinline__ void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void sync_warpgroup(int which) { asm volatile("bar.sync %0, 128;" ::"r"(which + 1) : "memory"); }

// Scores of 16 x N of a warp: a lane's rows are g and g + 8, of every eight keys it has 2 t and 2 t + 1.
template <int N>
__device__ __forceinline__ void maxima_of(const float (&s)[N], float& low, float& high) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    low = fmaxf(low, fmaxf(s[i], s[i + 1]));
    high = fmaxf(high, fmaxf(s[i + 2], s[i + 3]));
  }
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    low = fmaxf(low, __shfl_xor_sync(~0u, low, step));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
  }
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
#define INFINITE __int_as_float(0x7f800000)

extern __shared__ __align__(1024) unsigned char shared_memory[];

// -- copies -----------------------------------------------------------------------------------------------------------

struct alignas(64) Map {
  u64 opaque[16];
};
__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void copy_box(u32 to, const Map& map, int x, int y, int z, int w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void know(const Map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
