// Attention of many queries on Hopper's wgmma: this file holds what the two kernels share, `whole.cu` (a vision tower)
// and `shared_keys.cu` (a prefix). Each is compiled with this file before it.
//
// Sizes arrive as macros: D head size, QUANT (FP8 output), HALF (FP16 instead of BF16); each kernel's file names
// more. `wgmma.py` generates `wgmma_qk` (QKᵀ) and `wgmma_pv` (PV). `launch.py` describes the argument blocks.

__device__ __forceinline__ u32 pack_half2(float low, float high) {
  return HALF ? pack_f16x2(low, high) : pack_bf16x2(low, high);
}
// This rounds two neighbours to the output's dtype: first in the lower half, FP8 scaled by inverse_scale.
__device__ __forceinline__ u32 pack_output(const Output& out, float first, float second) {
#if QUANT
  const float high = second * out.inverse_scale, low = first * out.inverse_scale;
  return pack_e4m3x2(low, high);
#else
  return pack_half2(first, second);
#endif
}

// -- softmax ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void sync_warpgroup(int which) { asm volatile("bar.sync %0, 128;" ::"r"(which + 1) : "memory"); }

// A warp holds 16 rows of scores in wgmma's layout: lane 4 g + t has rows g (low) and g + 8 (high), and keys 2 t and
// 2 t + 1 of every eight. low = max(low, s[row g]), high = max(high, s[row g + 8]), the same in all lanes of a quad.
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
