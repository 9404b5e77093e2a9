// Attention of a prefix, where many query heads read the same key head. This file follows common.cu.
//
// A tile of 64 rows is 64 / GROUP tokens times the GROUP heads of a key head. A block has two such tiles, one for each
// of two warpgroups; a third warpgroup fetches keys and values into a ring that both read. A few tiles would leave most
// of the chip idle: then the blocks of a cluster split the keys of the same rows. Each block writes a share of the
// columns, and the others send their parts of these into its shared memory.
//
// Macros: GROUP (query heads a key head), KV (key heads), SLOTS (of the ring), MAX_SPLITS (blocks of a cluster at
// most).

#define TILE 64                 // A warpgroup has so many rows, and takes so many keys at a time.
#define PANELS (D / 64)         // A panel has 128 bytes of each row.
#define PANEL (TILE * 128)
#define BYTES (TILE * D * 2)
#define HEADS (GROUP * KV)
#define TOKENS (TILE / GROUP)   // A warpgroup has so many tokens.
#define WARPS 8                 // So many warps multiply.
#define STRIPS (D / 32)         // A strip is 32 columns of the result: 16 sums a lane.
#define PIECE 1024              // A piece is a warp's 16 rows of a strip in 16 bits: 16 x 32 x 2 bytes.
#define STATS (8 * 16)          // 16 bytes for each of a warp's eight pairs of rows: (max, sum) of g and g + 8.

// -- where a block works, and its shared memory ------------------------------------------------------------------------

// A block has two tiles of rows of a key head, and every c.splits-th tile of its keys.
struct Work {
  int rank, splits, tile, kv, batch;

  __device__ __forceinline__ Work(const SharedKeys& c) {
    splits = c.splits;
    rank = blockIdx.x % splits;
    const int place = blockIdx.x / splits;
    tile = place % c.tiles, kv = place / c.tiles % KV, batch = place / c.tiles / KV;
  }
  __device__ __forceinline__ int length(const SharedKeys& c) const { return c.lengths ? min(c.source, c.lengths[batch]) : c.source; }
  // The block's i-th tile of keys begins here.
  __device__ __forceinline__ int first_of(int i) const { return (rank + i * splits) * TILE; }
  // A block without a tile takes one all the same, of which every key is masked: its weights are zero.
  __device__ __forceinline__ int count_of(int length) const { return max(1, ((length + TILE - 1) / TILE - rank + splits - 1) / splits); }
};

// The ring of SLOTS tiles of keys and values, which one thread fills and eight warps read. Each side has its own copy.
struct Ring {
  u32 tiles, full, empty;
  int slot = 0, round = 0;

  __device__ __forceinline__ u32 wait_full() const {
    mbarrier_wait(full + slot * 8, round & 1);
    return tiles + slot * BYTES;
  }
  __device__ __forceinline__ void wait_empty() const {
    if (round) mbarrier_wait(empty + slot * 8, (round + 1) & 1);
  }
  __device__ __forceinline__ void release(u32 at, int lane) const {
    if (lane == 0) mbarrier_arrive(empty + (at - tiles) / BYTES * 8);
  }
  __device__ __forceinline__ void advance() { ++slot == SLOTS ? (slot = 0, ++round) : 0; }
};

// Two tiles of queries, the ring, and barriers: of both tiles, of the ring, and of each warp's parts from other blocks.
struct Layout {
  u32 queries, queries_full, met;
  Ring ring;

  __device__ __forceinline__ Layout() {
    queries = smem_of(shared_memory);
    ring.tiles = queries + 2 * BYTES;
    queries_full = ring.tiles + SLOTS * BYTES;
    ring.full = queries_full + 16, ring.empty = ring.full + SLOTS * 8, met = ring.empty + SLOTS * 8;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2; ++i) mbarrier_init(queries_full + i * 8, 1);
    for (int i = 0; i < SLOTS; ++i) {
      mbarrier_init(ring.full + i * 8, 1);
      mbarrier_init(ring.empty + i * 8, WARPS);
    }
    for (int i = 0; i < WARPS; ++i) mbarrier_init(met + i * 8, 1);
    fence_mbarrier_init();
  }
};

// -- load -------------------------------------------------------------------------------------------------------------

// One thread fetches keys (or values) first ... first + count - 1 of a key head; count is a multiple of 16 from 0 to
// 64.
__device__ __forceinline__ void load_keys(u32 to, const TensorMap& map, const TensorMap& tail, int first, int count, int kv, int batch, u32 barrier) {
  mbarrier_arrive_expect_tx(barrier, count * D * 2);
  if (count == TILE) {
#pragma unroll
    for (int p = 0; p < PANELS; ++p) tma_load_4d(to + p * PANEL, map, p * 64, kv, first, batch, barrier);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; i += 16)
#pragma unroll
    for (int p = 0; p < PANELS; ++p) tma_load_4d(to + p * PANEL + i * 128, tail, p * 64, kv, first + i, batch, barrier);
}

// The thread that fetches, in the order in which tiles are used: K0, K1, V0, K2, V1, ..., the last V.
__device__ __forceinline__ void fetch_all(const Maps& maps, const SharedKeys& c, const Work& work, const Layout& at) {
  Ring ring = at.ring;
  const auto fetch = [&](const TensorMap& map, const TensorMap& tail, int i, int bound) {
    const int first = work.first_of(i);
    ring.wait_empty();
    load_keys(ring.tiles + ring.slot * BYTES, map, tail, first, max(0, min(TILE, (bound - first + 15) / 16 * 16)), work.kv, work.batch,
              ring.full + ring.slot * 8);
    ring.advance();
  };
  const auto fetch_queries = [&](int i) {
    mbarrier_arrive_expect_tx(at.queries_full + i * 8, BYTES);
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      tma_load_4d(at.queries + i * BYTES + p * PANEL, maps.q, p * 64, work.kv * GROUP, (work.tile * 2 + i) * TOKENS, work.batch,
                  at.queries_full + i * 8);
  };
  // The first warpgroup begins while the second's queries are on their way.
  fetch_queries(0);
  // The first keys are fetched before the length is known, because its value takes a while to arrive.
  fetch(maps.k, maps.k_tail, 0, c.source);
  fetch_queries(1);
  const int length = work.length(c), count = work.count_of(length);
#pragma unroll 1
  for (int i = 1; i < count; ++i) {
    fetch(maps.k, maps.k_tail, i, length);
    fetch(maps.v, maps.v_tail, i - 1, length);
  }
  fetch(maps.v, maps.v_tail, count - 1, length);
}
// A value behind the last key may be NaN, and 0 × NaN is NaN. Whole rows are zeroed, so the swizzle does not matter.
// Both warpgroups write all of them, which is quicker than to wait for each other.
__device__ __forceinline__ void zero_rows_from(int real, u32 v_at, int half) {
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < (TILE - real) * D / 8; i += 128) {
    const u32 at = v_at + i % (D / 8) / 8 * PANEL + (real + i / (D / 8)) * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_proxy_async();
  sync_warpgroup(half);
}

// -- score, softmax, weigh --------------------------------------------------------------------------------------------

// This waits until at most the last LEFT committed groups still run. `sums` belongs to an older group and may then be
// read.
template <int LEFT, int N>
__device__ __forceinline__ void wgmma_wait_for(float (&sums)[N]) {
  wgmma_wait<LEFT>();
  wgmma_hold(sums);
}
// s = 2^(scale s - max) in place; the lane's own are added to low_sum and high_sum. `low` and `high`: scale times the
// running maximum of rows g and g + 8.
template <int N>
__device__ __forceinline__ void exponentials(float (&s)[N], float scale, float low, float high, float& low_sum, float& high_sum) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    s[i] = exp2_fast(s[i] * scale - low), s[i + 1] = exp2_fast(s[i + 1] * scale - low);
    s[i + 2] = exp2_fast(s[i + 2] * scale - high), s[i + 3] = exp2_fast(s[i + 3] * scale - high);
    low_sum += s[i] + s[i + 1];
    high_sum += s[i + 2] + s[i + 3];
  }
}
// This rounds the weights to 16 bits, as the left operand of PV.
template <int N>
__device__ __forceinline__ void pack(const float (&s)[N], u32 (&p)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p[i] = pack_half2(s[i * 2], s[i * 2 + 1]);
}

// s = QKᵀ of a tile of keys.
__device__ __forceinline__ void score(float (&s)[TILE / 2], u64 queries, u32 k_at) {
  const u64 keys = wgmma_descriptor(k_at, 16, 1024, true);
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    wgmma_qk(s, queries + (i / 4 * PANEL + i % 4 * 32) / 16, keys + (i / 4 * PANEL + i % 4 * 32) / 16, i > 0);
  wgmma_commit();
}
// o += PV of a tile of values.
__device__ __forceinline__ void weigh(float (&o)[D / 2], const u32 (&p)[TILE / 4], u32 v_at) {
  const u64 values = wgmma_descriptor(v_at, PANEL, 1024, true);
#pragma unroll
  for (int i = 0; i < TILE / 16; ++i)
    wgmma_pv(o, p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3], values + i * 2048 / 16, 1);
  wgmma_commit();
}

// Of rows g (low) and g + 8 (high): scale times the running maximum, the sum of the lane's weights, and the factor of
// what was summed before the newest tile.
struct Softmax {
  float low_best = -1e30f, high_best = -1e30f, low_sum = 0.f, high_sum = 0.f, low_shrink, high_shrink;

  // This makes weights of the scores of a tile, of which the first `real` keys count. They stay in `s`, because the PV
  // before may still read the packed ones.
  __device__ __forceinline__ void update(float (&s)[TILE / 2], int real, float scale, int lane) {
    if (real < TILE)
#pragma unroll
      for (int i = 0; i < TILE / 2; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= real) s[i] = -INFINITE;
    float low_max = -INFINITE, high_max = -INFINITE;
    maxima_of(s, low_max, high_max);
    low_max = fmaxf(low_best, low_max * scale);
    high_max = fmaxf(high_best, high_max * scale);
    low_shrink = exp2_fast(low_best - low_max), high_shrink = exp2_fast(high_best - high_max);
    low_best = low_max;
    high_best = high_max;
    low_sum *= low_shrink;
    high_sum *= high_shrink;
    exponentials(s, scale, low_best, high_best, low_sum, high_sum);
  }
  __device__ __forceinline__ void shrink(float (&o)[D / 2]) const {
    if (__any_sync(~0u, low_shrink != 1.f || high_shrink != 1.f))
#pragma unroll
      for (int j = 0; j < D / 2; j += 4) {
        o[j] *= low_shrink;
        o[j + 1] *= low_shrink;
        o[j + 2] *= high_shrink;
        o[j + 3] *= high_shrink;
      }
  }
};

// -- combine and store ------------------------------------------------------------------------------------------------

// A quad holds four chunks of eight columns, lane t columns 2 t and 2 t + 1 of each. Afterwards lane t holds all of
// chunk t and writes it at once, to `at`.
__device__ __forceinline__ void store_chunks(const Output& out, u64 at, const float (&first)[4], const float (&second)[4], int lane,
                                             bool there) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = pack_output(out, first[i], second[i]);
  // This is a transposition of 4 x 4 over the quad: v[i] of lane t becomes v[t] of lane i.
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    const bool odd = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & step)) {
        const u32 got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + step], step);
        (odd ? v[i] : v[i + step]) = got;
      }
  }
  if (!there) return;
#if QUANT
  *(uint2*)((unsigned char*)out.data + at) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
#else
  *(uint4*)((u16*)out.data + at) = make_uint4(v[0], v[1], v[2], v[3]);
#endif
}
// This is the inverse of `pack_half2`.
__device__ __forceinline__ float2 unpack_half2(u32 v) {
#if HALF
  float low, high;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(v));
  return make_float2(low, high);
#else
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
#endif
}

// Block (warp + g) % splits writes strip g of a warp. The others send it o / sum of their own keys in 16 bits, to where
// its queries were, with (max, sum) behind all parts: result = Σ o_i / sum_i · w_i / Σ w_i, w_i = sum_i 2^(max_i - max).
static_assert((MAX_SPLITS - 1) * WARPS * ((STRIPS + MAX_SPLITS - 1) / MAX_SPLITS * PIECE + STATS) <= 2 * BYTES, "the parts do not fit");
struct Parts {
  u32 pieces_at, stats_at, met;
  int rank, splits, warp, lane, pieces;  // A block gets at most `pieces` strips of a warp.

  __device__ __forceinline__ Parts(const Layout& at, const Work& work, int warp, int lane)
      : pieces_at(at.queries), stats_at(at.queries + 2 * BYTES - (MAX_SPLITS - 1) * WARPS * STATS), met(at.met + warp * 8),
        rank(work.rank), splits(work.splits), warp(warp), lane(lane), pieces((STRIPS + work.splits - 1) / work.splits) {}
  __device__ __forceinline__ u32 piece(int from, int index) const { return pieces_at + ((from * WARPS + warp) * pieces + index) * PIECE + lane * 16; }
  __device__ __forceinline__ u32 stats(int from) const { return stats_at + (from * WARPS + warp) * STATS + lane / 4 * 16; }
  // Of the blocks but `to`, this one is number ...
  __device__ __forceinline__ int seen_by(int to) const { return rank < to ? rank : rank - 1; }
  // This calls visit(strip, owner, index of the strip among the owner's) for all strips of the warp.
  template <class Visit>
  __device__ __forceinline__ void each_strip(Visit visit) const {
    int owner = warp % splits, turn = 0, index = 0;
#pragma unroll
    for (int g = 0; g < STRIPS; ++g) {
      visit(g, owner, index);
      ++owner == splits ? owner = 0 : 0;
      ++turn == splits ? (turn = 0, ++index) : 0;
    }
  }

  __device__ __forceinline__ void send(const float (&o)[D / 2], const Softmax& mine) const {
    if (lane == 0) {
      int own = 0;
      for (int g = 0; g < STRIPS; ++g) own += (warp + g) % splits == rank;
      mbarrier_arrive_expect_tx(met, (splits - 1) * (own * PIECE + STATS));
    }
    const float low_part = mine.low_sum > 0.f ? 1.f / mine.low_sum : 0.f, high_part = mine.high_sum > 0.f ? 1.f / mine.high_sum : 0.f;
#pragma unroll
    for (int to = 0; to < MAX_SPLITS; ++to)
      if (to < splits && to != rank && lane % 4 == 0)
        st_async(mapa(stats(seen_by(to)), to), mapa(met, to), __float_as_uint(mine.low_best), __float_as_uint(mine.low_sum),
                 __float_as_uint(mine.high_best), __float_as_uint(mine.high_sum));
    each_strip([&](int g, int owner, int index) {
      if (owner == rank) return;
      const u32 to = mapa(piece(seen_by(owner), index), owner), barrier = mapa(met, owner);
      u32 low[4], high[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low[j] = pack_half2(o[g * 16 + j * 4] * low_part, o[g * 16 + j * 4 + 1] * low_part);
        high[j] = pack_half2(o[g * 16 + j * 4 + 2] * high_part, o[g * 16 + j * 4 + 3] * high_part);
      }
      st_async(to, barrier, low[0], low[1], low[2], low[3]);
      st_async(to + 512, barrier, high[0], high[1], high[2], high[3]);
    });
  }
};

// The factors of this block's sums and of the other blocks' parts.
struct Weights {
  float low_mine = 1.f, high_mine = 1.f;
  float4 others[MAX_SPLITS - 1];  // (maximum, weight) of both rows
  float low_scale, high_scale;

  __device__ __forceinline__ Weights(const Parts& parts, Softmax& mine) {
    float low_max = mine.low_best, high_max = mine.high_best;
    if (parts.splits > 1) {
      mbarrier_wait(parts.met, 0);
#pragma unroll
      for (int i = 0; i < MAX_SPLITS - 1; ++i) {
        others[i] = make_float4(-1e30f, 0.f, -1e30f, 0.f);
        if (i < parts.splits - 1) {
          const uint4 v = ld_shared_v4(parts.stats(i));
          others[i] = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
        }
        low_max = fmaxf(low_max, others[i].x);
        high_max = fmaxf(high_max, others[i].z);
      }
      low_mine = exp2_fast(mine.low_best - low_max);
      high_mine = exp2_fast(mine.high_best - high_max);
      mine.low_sum *= low_mine;
      mine.high_sum *= high_mine;
#pragma unroll
      for (int i = 0; i < MAX_SPLITS - 1; ++i) {
        others[i].y *= exp2_fast(others[i].x - low_max);
        others[i].w *= exp2_fast(others[i].z - high_max);
        mine.low_sum += others[i].y;
        mine.high_sum += others[i].w;
      }
    }
    low_scale = 1.f / mine.low_sum, high_scale = 1.f / mine.high_sum;
    low_mine *= low_scale;
    high_mine *= high_scale;
  }
};

__device__ __forceinline__ void store_strips(const SharedKeys& c, const Work& work, const Parts& parts, const Weights& w, const float (&o)[D / 2]) {
  const int lane = parts.lane, low = parts.warp * 16 + lane / 4, high = low + 8;
  const int low_token = work.tile * 2 * TOKENS + low / GROUP, high_token = work.tile * 2 * TOKENS + high / GROUP;
  const u64 low_at = (((u64)work.batch * c.tokens + low_token) * HEADS + work.kv * GROUP + low % GROUP) * D + lane % 4 * 8;
  const u64 high_at = (((u64)work.batch * c.tokens + high_token) * HEADS + work.kv * GROUP + high % GROUP) * D + lane % 4 * 8;
  parts.each_strip([&](int g, int owner, int index) {
    if (owner != parts.rank) return;
    float a[4], b[4], e[4], f[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a[j] = o[g * 16 + j * 4] * w.low_mine;
      b[j] = o[g * 16 + j * 4 + 1] * w.low_mine;
      e[j] = o[g * 16 + j * 4 + 2] * w.high_mine;
      f[j] = o[g * 16 + j * 4 + 3] * w.high_mine;
    }
#pragma unroll
    for (int i = 0; i < MAX_SPLITS - 1; ++i)
      if (i < parts.splits - 1) {
        const u32 at = parts.piece(i, index);
        const float low_theirs = w.others[i].y * w.low_scale, high_theirs = w.others[i].w * w.high_scale;
        const uint4 v = ld_shared_v4(at), u = ld_shared_v4(at + 512);
        const u32 lows[4] = {v.x, v.y, v.z, v.w}, highs[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 low_pair = unpack_half2(lows[j]), high_pair = unpack_half2(highs[j]);
          a[j] += low_pair.x * low_theirs;
          b[j] += low_pair.y * low_theirs;
          e[j] += high_pair.x * high_theirs;
          f[j] += high_pair.y * high_theirs;
        }
      }
    store_chunks(c.out, low_at + g * 32, a, b, lane, low_token < c.tokens);
    store_chunks(c.out, high_at + g * 32, e, f, lane, high_token < c.tokens);
  });
}

// -- the kernel -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(384, 1)
    shared_keys(const __grid_constant__ Maps maps, const __grid_constant__ SharedKeys c) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, half = warp >> 2;
  const Work work(c);
  const Layout at;
  if (threadIdx.x == 0) {
    prefetch_tensormap(maps.q), prefetch_tensormap(maps.k), prefetch_tensormap(maps.v), prefetch_tensormap(maps.k_tail), prefetch_tensormap(maps.v_tail);
    at.init();
  }
  __syncthreads();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  // All threads begin with equally many registers; those that multiply need more, the one that fetches hardly any.
  if (warp >= WARPS) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == WARPS * 32) fetch_all(maps, c, work, at);
    return;
  }
  setmaxnreg_inc<240>();
  const int length = work.length(c), count = work.count_of(length);
  float o[D / 2], s[TILE / 2];
  u32 p[TILE / 4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
  Softmax softmax;
  Ring ring = at.ring;
  const u64 queries = wgmma_descriptor(at.queries + half * BYTES, 16, 1024, true);
  mbarrier_wait(at.queries_full + half * 8, 0);
  u32 k_at = ring.wait_full();
  wgmma_fence();
  score(s, queries, k_at);
  ring.advance();
  wgmma_wait_for<0>(s);
  ring.release(k_at, lane);
  softmax.update(s, length - work.first_of(0), c.scale, lane);
  pack(s, p);
  // The exponentials of tile i run at the same time as the PV of tile i - 1.
#pragma unroll 1
  for (int i = 1; i < count; ++i) {
    k_at = ring.wait_full();
    wgmma_fence();
    score(s, queries, k_at);
    ring.advance();
    const u32 v_at = ring.wait_full();
    weigh(o, p, v_at);
    ring.advance();
    wgmma_wait_for<1>(s);
    ring.release(k_at, lane);
    softmax.update(s, length - work.first_of(i), c.scale, lane);
    wgmma_wait_for<0>(o);
    ring.release(v_at, lane);
    softmax.shrink(o);
    pack(s, p);
  }
  // From here on the other blocks of the cluster may write over this block's queries.
  if (c.splits > 1) cluster_arrive_relaxed();
  const u32 v_at = ring.wait_full();
  const int real = max(length - work.first_of(count - 1), 0);
  if (real < TILE) zero_rows_from(real, v_at, half);
  wgmma_fence();
  weigh(o, p, v_at);
  softmax.low_sum = quad_sum(softmax.low_sum);
  softmax.high_sum = quad_sum(softmax.high_sum);
  wgmma_wait_for<0>(o);
  const Parts parts(at, work, warp, lane);
  if (c.splits > 1) {
    cluster_wait();
    parts.send(o, softmax);
  }
  const Weights weights(parts, softmax);
  store_strips(c, work, parts, weights, o);
}
