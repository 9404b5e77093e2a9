// Attention of up to 320 keys, as of a vision tower, with a head of 64, 72 or 80. This file follows common.cu.
//
// A block has 64 queries and all S keys of a head at once, so it needs no running maximum. A row's first 128 bytes come
// swizzled through a tensor map; the rest of it comes in chunks of 16 bytes, and a head of 72 is filled up to 80 with
// zeros, in shared memory only. Each of two warpgroups has half of the keys.

#define CHUNKS (D / 8)                  // A chunk is 16 bytes.
#define REST (CHUNKS - 8)               // These chunks lie beyond the first 128 bytes of a row.
#define KEYS ((S + 63) / 64 * 64)
#define PART (KEYS / 2)                 // A warpgroup has so many keys.
#define FIRST ((CHUNKS + 1) / 2)        // The first warpgroup writes so many chunks, the second the rest.

__device__ __forceinline__ void store(const Output& out, u64 at, float first, float second) {
#if QUANT
  *(u16*)((unsigned char*)out.data + at) = pack_output(out, first, second);
#else
  *(u32*)((u16*)out.data + at) = pack_output(out, first, second);
#endif
}

// p = 2^(scale s - max), packed as the left operand of PV; the lane's own p are added to low_sum and high_sum. `low`
// and `high`: scale times the maximum of rows g and g + 8.
template <int N>
__device__ __forceinline__ void exponentials(float (&s)[N], u32 (&p)[N / 2], float scale, float low, float high,
                                           float& low_sum, float& high_sum) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float a = exp2_fast(s[i] * scale - low), b = exp2_fast(s[i + 1] * scale - low);
    const float c = exp2_fast(s[i + 2] * scale - high), d = exp2_fast(s[i + 3] * scale - high);
    low_sum += a + b;
    high_sum += c + d;
    p[i / 2] = pack_half2(a, b);
    p[i / 2 + 1] = pack_half2(c, d);
  }
}

// This copies what does not fit a swizzled row of 128 bytes: chunk j of row r goes to (j * ROWS + r) * 16. A row beyond
// `last` becomes zeros.
template <int ROWS>
__device__ __forceinline__ void load_rest(u32 to, const u16* from, u64 stride, int last) {
#pragma unroll
  for (int n = 0; n < (REST * ROWS + 255) / 256; ++n) {
    const int i = threadIdx.x + n * 256, row = REST == 2 ? i / 2 : i, j = REST == 2 ? i % 2 : 0;
    if (REST * ROWS % 256 == 0 || row < ROWS)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + (j * ROWS + row) * 16),
                   "l"(from + (u64)min(row, last) * stride + 64 + j * 8), "r"(row <= last ? 16 : 0)
                   : "memory");
  }
}

// Shared memory: rows' first 128 bytes, swizzled; the rest of the rows; barriers of q with k, and of v; the exchange.
struct Layout {
  static constexpr u32 Q_BYTES = 64 * 128, K_BYTES = KEYS * 128, REST_BYTES = REST ? (2 * 64 + 4 * KEYS) * 16 : 0;
  u32 q, k, v, q_rest, k_rest, v_rest, qk_full, v_full;
  float* exchange;

  __device__ __forceinline__ Layout() {
    q = smem_of(shared_memory), k = q + Q_BYTES, v = k + K_BYTES;
    q_rest = v + K_BYTES, k_rest = q_rest + 2 * 64 * 16, v_rest = k_rest + 2 * KEYS * 16;
    qk_full = q_rest + REST_BYTES, v_full = qk_full + 8;
    exchange = (float*)(shared_memory + Q_BYTES + 2 * K_BYTES + REST_BYTES + 16);
  }
};

__device__ __forceinline__ void load(const WholeMaps& maps, const Whole& c, const Layout& to, int tile, int head, int batch) {
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(to.qk_full, Layout::Q_BYTES + Layout::K_BYTES);
    tma_load_4d(to.q, maps.q, 0, head, tile * 64, batch, to.qk_full);
    // A box has at most 256 rows: each brings the keys of a warpgroup.
    tma_load_4d(to.k, maps.k, 0, head, 0, batch, to.qk_full);
    tma_load_4d(to.k + PART * 128, maps.k, 0, head, PART, batch, to.qk_full);
    mbarrier_arrive_expect_tx(to.v_full, Layout::K_BYTES);
    tma_load_4d(to.v, maps.v, 0, head, 0, batch, to.v_full);
    tma_load_4d(to.v + PART * 128, maps.v, 0, head, PART, batch, to.v_full);
  }
  if (REST) {
    const u64 kv = batch * c.k_batch + head * c.k_head;
    load_rest<64>(to.q_rest, c.q + batch * c.q_batch + head * c.q_head + (u64)tile * 64 * c.q_token, c.q_token, c.tokens - 1 - tile * 64);
    load_rest<KEYS>(to.k_rest, c.k + kv, c.k_token, S - 1);
    load_rest<KEYS>(to.v_rest, c.v + kv, c.k_token, S - 1);
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_proxy_async();
  }
}

// Each warpgroup sends the other its sums of the columns that the other writes, and both combine and store theirs.
// sum_of(i): the lane's i-th sum, which the wgmma that still runs may change. up: this is the second warpgroup.
template <class SumOf>
__device__ __forceinline__ void combine_and_store(const Whole& c, const Layout& at, SumOf sum_of, float low_best, float high_best,
                                                float low_sum, float high_sum, u64 to, int row, bool up) {
  constexpr int LAST = CHUNKS - 1;
  const int other = threadIdx.x % 128;
  float *from_second = at.exchange, *from_first = from_second + 128 * (FIRST * 4), *stats = from_second + 128 * CHUNKS * 4;
  *(float4*)(stats + threadIdx.x * 4) = make_float4(low_best, low_sum, high_best, high_sum);
  wgmma_wait<0>();
#pragma unroll
  for (int j = 0; j < FIRST; ++j) {
    // The second warpgroup may have one chunk less: CHUNKS - FIRST <= FIRST.
    const int high = min(FIRST + j, LAST);
    float4 sent;
    sent.x = up ? sum_of(j * 4) : sum_of(high * 4), sent.y = up ? sum_of(j * 4 + 1) : sum_of(high * 4 + 1);
    sent.z = up ? sum_of(j * 4 + 2) : sum_of(high * 4 + 2), sent.w = up ? sum_of(j * 4 + 3) : sum_of(high * 4 + 3);
    if (FIRST + j <= LAST || up) *(float4*)((up ? from_second : from_first) + (j * 128 + other) * 4) = sent;
  }
  __syncthreads();
  const float4 theirs = *(const float4*)(stats + (threadIdx.x ^ 128) * 4);
  const float low_max = fmaxf(low_best, theirs.x), high_max = fmaxf(high_best, theirs.z);
  float low_mine = exp2_fast(low_best - low_max), low_theirs = exp2_fast(theirs.x - low_max);
  float high_mine = exp2_fast(high_best - high_max), high_theirs = exp2_fast(theirs.z - high_max);
  const float low_scale = 1.f / (low_mine * low_sum + low_theirs * theirs.y);
  const float high_scale = 1.f / (high_mine * high_sum + high_theirs * theirs.w);
  low_mine *= low_scale, low_theirs *= low_scale, high_mine *= high_scale, high_theirs *= high_scale;
  const u64 below = 8ull * c.heads * D;
#pragma unroll
  for (int j = 0; j < FIRST; ++j) {
    const int high = min(FIRST + j, LAST);
    const bool there = FIRST + j <= LAST || !up;
    const float4 t = *(const float4*)((up ? from_first : from_second) + (j * 128 + other) * 4);
    const u64 chunk = to + (up ? high : j) * 8;
    const float a = up ? sum_of(high * 4) : sum_of(j * 4), b = up ? sum_of(high * 4 + 1) : sum_of(j * 4 + 1);
    const float e = up ? sum_of(high * 4 + 2) : sum_of(j * 4 + 2), f = up ? sum_of(high * 4 + 3) : sum_of(j * 4 + 3);
    if (there && row < c.tokens) store(c.out, chunk, a * low_mine + t.x * low_theirs, b * low_mine + t.y * low_theirs);
    if (there && row + 8 < c.tokens) store(c.out, chunk + below, e * high_mine + t.z * high_theirs, f * high_mine + t.w * high_theirs);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    whole(const __grid_constant__ WholeMaps maps, const __grid_constant__ Whole c) {
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, half = warp >> 2;
  const Layout at;
  const int tile = blockIdx.x % c.tiles, head = blockIdx.x / c.tiles % c.heads, batch = blockIdx.x / c.tiles / c.heads;
  if (threadIdx.x == 0) {
    prefetch_tensormap(maps.q), prefetch_tensormap(maps.k), prefetch_tensormap(maps.v);
    mbarrier_init(at.qk_full, 1);
    mbarrier_init(at.v_full, 1);
    fence_mbarrier_init();
  }
  if (REST == 1)
    for (int i = threadIdx.x; i < 64 + KEYS; i += 256) {
      const u32 zeros = i < 64 ? at.q_rest + (64 + i) * 16 : at.k_rest + (KEYS + i - 64) * 16;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(zeros), "r"(0) : "memory");
    }
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  load(maps, c, at, tile, head, batch);
  __syncthreads();
  mbarrier_wait(at.qk_full, 0);
  float s[PART / 2];
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    wgmma_qk(s, wgmma_descriptor(at.q + i * 32, 16, 1024, true), wgmma_descriptor(at.k + half * PART * 128 + i * 32, 16, 1024, true), i > 0);
  if (REST)
    wgmma_qk(s, wgmma_descriptor(at.q_rest, 64 * 16, 128, false), wgmma_descriptor(at.k_rest + half * PART * 16, KEYS * 16, 128, false), 1);
  wgmma_commit();
  wgmma_wait<0>();
  if (S < KEYS)
#pragma unroll
    for (int i = 0; i < PART / 2; ++i)
      if (half * PART + i / 4 * 8 + lane % 4 * 2 + i % 2 >= S) s[i] = -INFINITE;
  float low_best = -INFINITE, high_best = -INFINITE, low_sum = 0.f, high_sum = 0.f;
  maxima_of(s, low_best, high_best);
  // The second half of the keys may be all padding. Its maximum must not be -inf, because -inf - -inf is NaN; with
  // -1e30 its weights are 0.
  low_best = fmaxf(low_best * c.scale, -1e30f);
  high_best = fmaxf(high_best * c.scale, -1e30f);
  u32 p[PART / 4];
  exponentials(s, p, c.scale, low_best, high_best, low_sum, high_sum);
  mbarrier_wait(at.v_full, 0);
  float o[32], rest[REST ? REST * 4 : 4] = {};
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < PART / 16; ++i) {
    wgmma_pv(o, p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3],
             wgmma_descriptor(at.v + half * PART * 128 + i * 2048, 1024, 1024, true), i > 0);
#if D > 64
    wgmma_pv_rest(rest, p[i * 4], p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3],
                  wgmma_descriptor(at.v_rest + (half * PART + i * 16) * 16, 128, KEYS * 16, false), i > 0);
#endif
  }
  wgmma_commit();
  low_sum = quad_sum(low_sum);
  high_sum = quad_sum(high_sum);
  const int row = tile * 64 + warp % 4 * 16 + lane / 4;
  const u64 to = (((u64)batch * c.tokens + row) * c.heads + head) * D + lane % 4 * 2;
  const auto sum_of = [&](int i) -> float { return i < 32 ? o[i & 31] : rest[(i - 32) & (REST > 1 ? 7 : 3)]; };
  combine_and_store(c, at, sum_of, low_best, high_best, low_sum, high_sum, to, row, half);
}
