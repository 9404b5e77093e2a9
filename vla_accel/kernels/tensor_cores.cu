// Products of a warp's tensor cores, and sums of what they leave in its lanes. Every GPU from Ampere on has them.

__device__ __forceinline__ u16 round_bf16(float x) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(x));
  return v;
}
__device__ __forceinline__ float low_of(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_of(u32 v) { return __uint_as_float(v & 0xffff0000u); }

// Sets N accumulators to zero.
template <int N>
__device__ __forceinline__ void clear(float* sums) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] = 0.f;
}
// The largest value, and the sum, over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_m16n8k16(c, a[0], a[1], a[2], a[3], b0, b1);
}
// c += a wᵀ over 32 of K: lane 4 g + t has k = 8 t ... 8 t + 7 of rows g (lo) and g + 8 (hi) of a, and of column g (w).
__device__ __forceinline__ void mma32(float (&c)[4], const uint4& lo, const uint4& hi, const uint4& w) {
  mma_m16n8k16(c, lo.x, hi.x, lo.y, hi.y, w.x, w.y);
  mma_m16n8k16(c, lo.z, hi.z, lo.w, hi.w, w.z, w.w);
}
// Loads four matrices of 8 rows of 16 bytes, whose addresses the lanes pass: lane 4 g + t gets word t of row g of each.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// Each lane gets words of columns instead, as a second operand whose rows are K needs them.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
