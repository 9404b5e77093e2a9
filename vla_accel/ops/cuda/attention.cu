// Attention of many queries, on Hopper's warpgroup products. Two kernels, for what the two stacks ask:
//
// `whole` (a vision tower): up to 256 keys and a head of 64, 72 or 80. A block has 64 queries and all keys of a head at once:
// no running maximum. A row's first 128 bytes come swizzled through a tensor map; what is left of it comes in pieces of 16
// bytes, and 72 is filled up to 80 with zeros, in shared memory only. Each of two warpgroups has half of the keys.
//
// `shared_keys` (a prefix): many query heads read the same key head, so a tile of 64 rows is a few tokens times all these
// heads. Two warpgroups share the rows and take every other tile of keys, each from a ring of its own; their parts meet in
// shared memory.
//
// Sizes arrive as macros: D head size, QUANT (FP8 output), HALF (FP16 instead of BF16); for `whole` S keys; for `shared_keys`
// GROUP query heads a key head, KV key heads, SLOTS of a ring. `product_*` wrap wgmma and are generated beside the macros.

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
__device__ __forceinline__ void store(const Output& out, u64 at, float first, float second) {
#if QUANT
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(second * out.inverse_scale), "f"(first * out.inverse_scale));
  *(u16*)((unsigned char*)out.data + at) = v;
#else
  *(u32*)((u16*)out.data + at) = narrow(first, second);
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
// Scores to weights, packed as the next product's operand; the lane's sums.
template <int N>
__device__ __forceinline__ void weights_of(float (&s)[N], u32 (&p)[N / 2], float scale, float low, float high,
                                           float& low_sum, float& high_sum) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float a = exp2_fast(s[i] * scale - low), b = exp2_fast(s[i + 1] * scale - low);
    const float c = exp2_fast(s[i + 2] * scale - high), d = exp2_fast(s[i + 3] * scale - high);
    low_sum += a + b;
    high_sum += c + d;
    p[i / 2] = narrow(a, b);
    p[i / 2 + 1] = narrow(c, d);
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

#ifdef WHOLE
// -- all keys at once ---------------------------------------------------------------------------------------------------

#define CHUNKS (D / 8)                  // of 16 bytes
#define REST (CHUNKS - 8)               // chunks beyond the first 128 bytes of a row
#define KEYS ((S + 63) / 64 * 64)
#define PART (KEYS / 2)                 // keys of a warpgroup
#define FIRST ((CHUNKS + 1) / 2)        // chunks that the first warpgroup puts out; the second has the rest

struct WholeMaps {
  Map q, k, v;
};
struct Whole {
  const u16 *q, *k, *v;
  u64 q_batch, q_token, q_head, k_batch, k_token, k_head;  // elements
  Output out;
  float scale;
  int tokens, tiles, heads;
};

// What does not fit a swizzled row of 128 bytes: chunk j of row r at (j * rows + r) * 16. Zeros for rows that are not there.
template <int ROWS>
__device__ __forceinline__ void fetch_rest(u32 to, const u16* from, u64 stride, int last) {
#pragma unroll
  for (int n = 0; n < (REST * ROWS + 255) / 256; ++n) {
    const int i = threadIdx.x + n * 256, row = REST == 2 ? i / 2 : i, j = REST == 2 ? i % 2 : 0;
    if (REST * ROWS % 256 == 0 || row < ROWS)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (j * ROWS + row) * 16),
                   "l"(from + (u64)min(row, last) * stride + 64 + j * 8), "r"(row <= last ? 16 : 0)
                   : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    whole(const __grid_constant__ WholeMaps maps, const __grid_constant__ Whole c) {
  constexpr u32 q_bytes = 64 * 128, k_bytes = KEYS * 128;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, half = warp >> 2;
  const u32 q_at = smem_of(shared_memory), k_at = q_at + q_bytes, v_at = k_at + k_bytes;
  const u32 q_rest = v_at + k_bytes, k_rest = q_rest + 2 * 64 * 16, v_rest = k_rest + 2 * KEYS * 16, full = v_rest + 2 * KEYS * 16;
  float* meet = (float*)(shared_memory + q_bytes + 2 * k_bytes + (2 * 64 + 4 * KEYS) * 16 + 16);
  const int tile = blockIdx.x % c.tiles, head = blockIdx.x / c.tiles % c.heads, batch = blockIdx.x / c.tiles / c.heads;
  if (threadIdx.x == 0) {
    know(maps.q), know(maps.k), know(maps.v);
    make_barrier(full, 1);
    make_barrier(full + 8, 1);
    show_barriers();
  }
  if (REST == 1)
    for (int i = threadIdx.x; i < 64 + KEYS; i += 256) {
      const u32 at = i < 64 ? q_rest + (64 + i) * 16 : k_rest + (KEYS + i - 64) * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
  let_next_start();
  wait_for_previous();
  if (threadIdx.x == 0) {
    expect(full, q_bytes + k_bytes);
    copy_box(q_at, maps.q, 0, head, tile * 64, batch, full);
    copy_box(k_at, maps.k, 0, head, 0, batch, full);
    expect(full + 8, k_bytes);
    copy_box(v_at, maps.v, 0, head, 0, batch, full + 8);
  }
  if (REST) {
    const u64 kv = batch * c.k_batch + head * c.k_head;
    fetch_rest<64>(q_rest, c.q + batch * c.q_batch + head * c.q_head + (u64)tile * 64 * c.q_token, c.q_token, c.tokens - 1 - tile * 64);
    fetch_rest<KEYS>(k_rest, c.k + kv, c.k_token, S - 1);
    fetch_rest<KEYS>(v_rest, c.v + kv, c.k_token, S - 1);
    asm volatile("cp.async.wait_all;" ::: "memory");
    show_products();
  }
  __syncthreads();
  wait_parity(full, 0);
  float s[PART / 2];
  begin_products();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    product_scores(s, operand(q_at + i * 32, 16, 1024, true), operand(k_at + half * PART * 128 + i * 32, 16, 1024, true), i > 0);
  if (REST)
    product_scores(s, operand(q_rest, 64 * 16, 128, false), operand(k_rest + half * PART * 16, KEYS * 16, 128, false), 1);
  commit_products();
  end_products();
  if (S < KEYS)
#pragma unroll
    for (int i = 0; i < PART / 2; ++i)
      if (half * PART + i / 4 * 8 + lane % 4 * 2 + i % 2 >= S) s[i] = -INFINITE;
  float low_best = -INFINITE, high_best = -INFINITE, low_sum = 0.f, high_sum = 0.f;
  maxima_of(s, low_best, high_best);
  // The second half of the keys may be all padding: its maximum must not be infinite, its weights are 0.
  low_best = fmaxf(low_best * c.scale, -1e30f);
  high_best = fmaxf(high_best * c.scale, -1e30f);
  u32 p[PART / 4];
  weights_of(s, p, c.scale, low_best, high_best, low_sum, high_sum);
  wait_parity(full + 8, 0);
  float o[32], rest[REST ? REST * 4 : 4] = {};
  begin_products();
#pragma unroll
  for (int i = 0; i < PART / 16; ++i) {
    product_values(o, p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3],
                   operand(v_at + half * PART * 128 + i * 2048, 1024, 1024, true), i > 0);
#if D > 64
    product_rest(rest, p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3],
                 operand(v_rest + (half * PART + i * 16) * 16, 128, KEYS * 16, false), i > 0);
#endif
  }
  commit_products();
  low_sum = quad_sum(low_sum);
  high_sum = quad_sum(high_sum);
  // Each half sends the other the columns that the other puts out.
  float* from_second = meet;
  float* from_first = meet + 128 * (FIRST * 4);
  float* stats = meet + 128 * CHUNKS * 4;
  *(float4*)(stats + threadIdx.x * 4) = make_float4(low_best, low_sum, high_best, high_sum);
  end_products();
  const auto sum_of = [&](int i) -> float { return i < 32 ? o[i & 31] : rest[(i - 32) & (REST > 1 ? 7 : 3)]; };
  const int other = threadIdx.x % 128;
  const bool up = half;
#pragma unroll
  for (int j = 0; j < FIRST; ++j) {
    // Whoever has the second part of the columns may have one chunk less.
    constexpr int LAST = CHUNKS - 1;
    const int high = min(FIRST + j, LAST);
    float4 given;
    given.x = up ? sum_of(j * 4) : sum_of(high * 4), given.y = up ? sum_of(j * 4 + 1) : sum_of(high * 4 + 1);
    given.z = up ? sum_of(j * 4 + 2) : sum_of(high * 4 + 2), given.w = up ? sum_of(j * 4 + 3) : sum_of(high * 4 + 3);
    if (FIRST + j <= LAST || up) *(float4*)((up ? from_second : from_first) + (j * 128 + other) * 4) = given;
  }
  __syncthreads();
  const float4 theirs = *(const float4*)(stats + (threadIdx.x ^ 128) * 4);
  const float low_max = fmaxf(low_best, theirs.x), high_max = fmaxf(high_best, theirs.z);
  float low_mine = exp2_fast(low_best - low_max), low_theirs = exp2_fast(theirs.x - low_max);
  float high_mine = exp2_fast(high_best - high_max), high_theirs = exp2_fast(theirs.z - high_max);
  const float low_scale = 1.f / (low_mine * low_sum + low_theirs * theirs.y);
  const float high_scale = 1.f / (high_mine * high_sum + high_theirs * theirs.w);
  low_mine *= low_scale, low_theirs *= low_scale, high_mine *= high_scale, high_theirs *= high_scale;
  const int row = tile * 64 + warp % 4 * 16 + lane / 4;
  const u64 at = (((u64)batch * c.tokens + row) * c.heads + head) * D + lane % 4 * 2, below = 8ull * c.heads * D;
#pragma unroll
  for (int j = 0; j < FIRST; ++j) {
    constexpr int LAST = CHUNKS - 1;
    const int high = min(FIRST + j, LAST);
    const bool there = FIRST + j <= LAST || !up;
    const float4 t = *(const float4*)((up ? from_first : from_second) + (j * 128 + other) * 4);
    const u64 to = at + (up ? high : j) * 8;
    const float a = up ? sum_of(high * 4) : sum_of(j * 4), b = up ? sum_of(high * 4 + 1) : sum_of(j * 4 + 1);
    const float e = up ? sum_of(high * 4 + 2) : sum_of(j * 4 + 2), f = up ? sum_of(high * 4 + 3) : sum_of(j * 4 + 3);
    if (there && row < c.tokens) store(c.out, to, a * low_mine + t.x * low_theirs, b * low_mine + t.y * low_theirs);
    if (there && row + 8 < c.tokens) store(c.out, to + below, e * high_mine + t.z * high_theirs, f * high_mine + t.w * high_theirs);
  }
}
#endif

#ifdef SHARED_KEYS
// -- keys that all heads of a group share -------------------------------------------------------------------------------

#define TILE 64                 // keys at a time
#define PANELS (D / 64)         // of 128 bytes a row
#define PANEL (64 * 128)
#define BYTES (D * 128)         // 64 rows
#define H (GROUP * KV)
#define TOKENS (64 / GROUP)     // a tile

// k and v twice: boxes of 64 keys and of 16.
struct Maps {
  Map q, k, k_tail, v, v_tail;
};
struct SharedKeys {
  const int* lengths;  // (B,) or null
  Output out;
  float scale;
  int tokens, tiles, source;
};

// Keys (or values) first ... first + count - 1 of a key head; count a multiple of 16, at most 64. One thread.
__device__ __forceinline__ void fetch_keys(u32 to, const Map& map, const Map& tail, int first, int count, int kv, int batch, u32 barrier) {
  expect(barrier, count * D * 2);
  if (count == TILE) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p) copy_box(to + p * PANEL, map, p * 64, kv, first, batch, barrier);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; i += 16)
#pragma unroll
    for (int p = 0; p < PANELS; ++p) copy_box(to + p * PANEL + i * 128, tail, p * 64, kv, first + i, batch, barrier);
}
extern "C" __global__ void __launch_bounds__(256, 1)
    shared_keys(const __grid_constant__ Maps maps, const __grid_constant__ SharedKeys c) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, half = warp >> 2;
  // Each warpgroup has a ring of its own for the keys and values of its tiles: K V K V ...
  const u32 q_at = smem_of(shared_memory), ring = q_at + BYTES + half * SLOTS * BYTES, q_full = q_at + BYTES + 2 * SLOTS * BYTES;
  const u32 full = q_full + 8 + half * SLOTS * 16, empty = full + SLOTS * 8;
  const int tile = blockIdx.x % c.tiles, kv = blockIdx.x / c.tiles % KV, batch = blockIdx.x / c.tiles / KV;
  if (threadIdx.x == 0) {
    know(maps.q), know(maps.k), know(maps.v), know(maps.k_tail), know(maps.v_tail);
    make_barrier(q_full, 1);
    for (int i = 0; i < 4 * SLOTS; ++i) make_barrier(q_full + 8 + i * 8, i / SLOTS % 2 ? 4 : 1);
    show_barriers();
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  const bool fetches = threadIdx.x % 128 == 0;
  if (threadIdx.x == 0) {
    expect(q_full, BYTES);
#pragma unroll
    for (int p = 0; p < PANELS; ++p) copy_box(q_at + p * PANEL, maps.q, p * 64, kv * GROUP, tile * TOKENS, batch, q_full);
  }
  const int limit = c.lengths ? min(c.source, c.lengths[batch]) : c.source;
  // The n-th piece of this warpgroup: keys, then values, of every other tile.
  const auto fetch = [&](int n) {
    const int first = (n / 2 * 2 + half) * TILE, slot = n % SLOTS;
    // The very first key is there whatever the length, whose value takes a while to come.
    const int bound = n + half ? limit : c.source;
    if (first >= bound) return;
    if (n >= SLOTS) wait_parity(empty + slot * 8, (n / SLOTS - 1) & 1);
    fetch_keys(ring + slot * BYTES, n % 2 ? maps.v : maps.k, n % 2 ? maps.v_tail : maps.k_tail, first,
               min(TILE, (bound - first + 15) / 16 * 16), kv, batch, full + slot * 8);
  };
  if (fetches)
#pragma unroll 1
    for (int n = 0; n < SLOTS; ++n) fetch(n);
  float o[D / 2], low_best = -1e30f, high_best = -1e30f, low_sum = 0.f, high_sum = 0.f;
#pragma unroll
  for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
  wait_parity(q_full, 0);
  // The two warpgroups take turns: one multiplies while the other is at its exponentials.
  int n = 0, slot = 0, round = 0;
#pragma unroll 1
  for (int first = half * TILE; first < limit; first += 2 * TILE) {
    float s[TILE / 2];
    u32 p[TILE / 4];
    const u32 k_at = ring + slot * BYTES;
    wait_parity(full + slot * 8, round & 1);
    begin_products();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      product_scores(s, operand(q_at + i / 4 * PANEL + i % 4 * 32, 16, 1024, true),
                     operand(k_at + i / 4 * PANEL + i % 4 * 32, 16, 1024, true), i > 0);
    commit_products();
    end_products();
    if (lane == 0) arrive(empty + slot * 8);
    if (fetches) fetch(n + SLOTS);
    ++n, ++slot == SLOTS ? (slot = 0, ++round) : 0;
    const int real = min(TILE, limit - first);
    if (real < TILE)
#pragma unroll
      for (int i = 0; i < TILE / 2; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= real) s[i] = -INFINITE;
    float low_max = -INFINITE, high_max = -INFINITE;
    maxima_of(s, low_max, high_max);
    low_max = fmaxf(low_best, low_max * c.scale);
    high_max = fmaxf(high_best, high_max * c.scale);
    const float low_shrink = exp2_fast(low_best - low_max), high_shrink = exp2_fast(high_best - high_max);
    low_best = low_max;
    high_best = high_max;
    low_sum *= low_shrink;
    high_sum *= high_shrink;
    weights_of(s, p, c.scale, low_best, high_best, low_sum, high_sum);
    if (__any_sync(~0u, low_shrink != 1.f || high_shrink != 1.f))
#pragma unroll
      for (int i = 0; i < D / 2; i += 4) {
        o[i] *= low_shrink;
        o[i + 1] *= low_shrink;
        o[i + 2] *= high_shrink;
        o[i + 3] *= high_shrink;
      }
    const u32 v_at = ring + slot * BYTES;
    wait_parity(full + slot * 8, round & 1);
    if (real < TILE) {
      // A value behind the last key may be NaN, and 0 × NaN is NaN. Whole rows: no swizzle to mind.
#pragma unroll 1
      for (int i = threadIdx.x % 128; i < (TILE - real) * D / 8; i += 128) {
        const u32 at = v_at + i % (D / 8) / 8 * PANEL + (real + i / (D / 8)) * 128 + i % 8 * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
      show_products();
      sync_warpgroup(half);
    }
    begin_products();
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
      product_values(o, p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3], operand(v_at + i * 2048, PANEL, 1024, true), 1);
    commit_products();
    end_products();
    if (lane == 0) arrive(empty + slot * 8);
    if (fetches) fetch(n + SLOTS);
    ++n, ++slot == SLOTS ? (slot = 0, ++round) : 0;
  }
  low_sum = quad_sum(low_sum);
  high_sum = quad_sum(high_sum);
  // Each half puts out half of the columns, and gets the other's part of them: where keys and values were, once both have done.
  const int other = threadIdx.x % 128;
  float* parts = (float*)(shared_memory + BYTES);
  float* stats = parts + 128 * (D / 2);
  asm volatile("bar.sync 3, 256;" ::: "memory");
  *(float4*)(stats + threadIdx.x * 4) = make_float4(low_best, low_sum, high_best, high_sum);
  constexpr int SLICE = D / 4;
#pragma unroll
  for (int i = 0; i < SLICE; i += 4) {
    const bool up = half == 0;
    const float4 given = make_float4(up ? o[i + SLICE] : o[i], up ? o[i + 1 + SLICE] : o[i + 1], up ? o[i + 2 + SLICE] : o[i + 2],
                                     up ? o[i + 3 + SLICE] : o[i + 3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) o[i + j] = up ? o[i + j] : o[i + j + SLICE];
    *(float4*)(parts + ((half * SLICE + i) * 128 + other * 4)) = given;
  }
  asm volatile("bar.sync 3, 256;" ::: "memory");
  const float4 theirs = *(const float4*)(stats + (threadIdx.x ^ 128) * 4);
  const float low_max = fmaxf(low_best, theirs.x), high_max = fmaxf(high_best, theirs.z);
  float low_mine = exp2_fast(low_best - low_max), low_theirs = exp2_fast(theirs.x - low_max);
  float high_mine = exp2_fast(high_best - high_max), high_theirs = exp2_fast(theirs.z - high_max);
  const float low_scale = 1.f / (low_mine * low_sum + low_theirs * theirs.y);
  const float high_scale = 1.f / (high_mine * high_sum + high_theirs * theirs.w);
  low_mine *= low_scale, low_theirs *= low_scale, high_mine *= high_scale, high_theirs *= high_scale;
  const int low = warp % 4 * 16 + lane / 4, high = low + 8;
  const int low_token = tile * TOKENS + low / GROUP, high_token = tile * TOKENS + high / GROUP;
  const u64 low_at = (((u64)batch * c.tokens + low_token) * H + kv * GROUP + low % GROUP) * D + lane % 4 * 2;
  const u64 high_at = (((u64)batch * c.tokens + high_token) * H + kv * GROUP + high % GROUP) * D + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < SLICE; i += 4) {
    const float4 t = *(const float4*)(parts + (((1 - half) * SLICE + i) * 128 + other * 4));
    const int column = half * (D / 2) + i * 2;
    if (low_token < c.tokens) store(c.out, low_at + column, o[i] * low_mine + t.x * low_theirs, o[i + 1] * low_mine + t.y * low_theirs);
    if (high_token < c.tokens)
      store(c.out, high_at + column, o[i + 2] * high_mine + t.z * high_theirs, o[i + 3] * high_mine + t.w * high_theirs);
  }
}
#endif
