// What the GEMM does for the rows of a suffix: norms whose moments are of any tiles, with a shift; q, k and v rotated;
// gate and up; a gated residual. This file comes before epilogue.cu; `arguments.py` describes the block `Suffix`.
//
// Macro SUFFIX: 0 nothing of this, 1 out += gate ∘ product, with the moments for the next norm, 2 GeGLU or SwiGLU of
// normed rows, 3 heads of normed rows. With 2 and 3 the weight's rows are pairs, HALF rows apart within groups of 2
// HALF (a side of a head, all of the gate), and come by a tensor map of five dimensions as eight of the first side,
// eight of the second, by turns: so a thread's two rows are a pair (`store_tile`).

#if SUFFIX
// A block of 64 rows in the order of the pairs begins at `row`, of the group `row / (2 half)`. This is the place, on its
// side, of the pair of 16 rows that begin at `inside` of the group, which this lane has.
__device__ __forceinline__ int pair_of(int inside, int lane) { return inside / 16 * 8 + (lane >> 2); }

// Where eight columns of heads go, those from `place` on in the order of the pairs.
__device__ __forceinline__ u16* head_columns(u16* q, int place, int token, const Suffix& s) {
  const int size = 2 * s.half, head = place / size, inside = place % size;
  const int column = inside / 16 * 8 + (inside / 8 & 1) * s.half;
  if (head < s.heads) return q + ((u64)token * s.heads + head) * size + column;
  if (head < s.heads + s.kv_heads) return s.k + ((u64)token * s.kv_heads + head - s.heads) * size + column;
  return s.v + ((u64)token * s.kv_heads + head - s.heads - s.kv_heads) * size + column;
}

__device__ __forceinline__ void tma_load_5d(u32 to, const TensorMap& map, int x, int eights, int group, u32 barrier,
                                            u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(&map), "r"(x), "r"(0), "r"(eights), "r"(group),
      "r"(barrier), "l"(policy) : "memory");
}
#endif
