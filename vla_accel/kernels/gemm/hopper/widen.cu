// Weights of one byte become BF16 on their way to the tensor cores, exactly: they are the first operand of wgmma, which
// may come from registers. Lane 4 g + t of a warp needs rows g and g + 8 of its 16, and of each eight columns of K the
// two from 2 t on.
//
// A stage has 64 bytes of a weight row. The copy engine exchanges the four pieces of 16 bytes of a row by bits 7 and 8
// of its address (SWIZZLE_64B), so the eight rows that a warp reads at once are in different banks.
//
// Macro: WIDEN (1 E4M3, 2 INT8; gemm.cu includes this file's functions only then).

constexpr u32 WIDEN_BLOCK = 64 * 64;  // Bytes of 64 weight rows in a stage.

using Pairs = u16[16];  // Two neighbouring weights of each eight columns of K, of two rows: [eight * 2 + row].

__device__ __forceinline__ void load_pairs(Pairs& pairs, u32 block) {
  const u32 lane = threadIdx.x & 31, row = ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
  const u32 first = block + row * 64 + ((row >> 1 & 3) << 4) + (lane & 3) * 2;
#pragma unroll
  for (int eight = 0; eight < 8; ++eight)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pairs[eight * 2 + i] = ld_shared_u16((first ^ (eight / 2) << 4) + eight % 2 * 8 + i * 8 * 64);
}

// Two weights of one byte, the first in the lower half of the result.
__device__ __forceinline__ u32 widen_pair(u16 pair) {
#if WIDEN == 1
  // The bits of E4M3, moved to BF16's places, are the number times 2^-120: the biases of the exponents are 7 and 127.
  // Each byte goes behind eight copies of its sign, so that one of them comes to BF16's sign.
  const u32 apart = permute_bytes<0x9180>(pair, 0);
  return mul_bf16x2(apart << 4 & 0x87f087f0u, 0x7b807b80u);
#else
  // The lower seven bits behind the exponent of 128 are 128 more; the sign is worth -128.
  const u32 apart = permute_bytes<0x4140>(pair, 0);
  return sub_bf16x2((apart & 0x007f007fu) | 0x43004300u, (apart & 0x00800080u) | 0x43004300u);
#endif
}

// The first operand of a wgmma over 16 columns of K, by the pairs of its two eights.
__device__ __forceinline__ void widen_operand(u32 (&a)[4], const u16* pairs) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = widen_pair(pairs[i]);
}
