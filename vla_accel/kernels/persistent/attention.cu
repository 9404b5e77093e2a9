// Attention of the suffix to the prefix and to itself: a block has a head and KEYS keys of the prefix, or the suffix's
// own; then the parts of a head are combined. This file follows epilogues.cu.

#define GROUP (HEADS / KV_HEADS)
#define ROW_BYTES (HEAD_DIM * 2)
#define P_PITCH (KEYS + 8)  // Eight rows of probabilities are in different banks.
#define COLUMN_GROUPS (HEAD_DIM / 16)
#define WARP_GROUPS ((COLUMN_GROUPS + WARPS - 1) / WARPS)

// Items: (sequence, head, part of the keys). The last part is the suffix.
struct Item {
  int batch, head, part, keys, first;  // keys of the part, the first of them
  bool suffix;
  __device__ __forceinline__ Item(int at, int parts, int length) {
    part = at % parts, head = at / parts % HEADS, batch = at / parts / HEADS;
    suffix = part == parts - 1;
    first = part * KEYS;
    keys = suffix ? TOKENS : max(0, min(KEYS, length - first));
  }
};
__device__ __forceinline__ int parts_of(const Call& c) { return (c.prefix_tokens + KEYS - 1) / KEYS + 1; }
__device__ __forceinline__ int items_of(const Call& c) { return BATCH * HEADS * parts_of(c); }
__device__ __forceinline__ int length_of(const Call& c, int batch) { return __ldg(c.lengths + batch); }

// Rows of a head in shared memory, swizzled as in `Producer::push_keys`.
__device__ __forceinline__ u32 row_part(u32 rows, int row, int part) { return rows + row * ROW_BYTES + ((part ^ (row & 7)) * LANE_BYTES); }

// Copies 16 rows of a head to shared memory; those behind TOKENS become zeros.
__device__ __forceinline__ void stage_rows(unsigned char* to, const u16* from, int distance) {
#pragma unroll 1
  for (int i = threadIdx.x; i < 16 * HEAD_DIM / 8; i += WARPS * 32) {
    const int row = i / (HEAD_DIM / 8), part = i % (HEAD_DIM / 8);
    *(uint4*)(to + row * ROW_BYTES + ((part ^ (row & 7)) * LANE_BYTES)) =
        row < TOKENS ? *(const uint4*)(from + row * distance + part * 8) : make_uint4(0, 0, 0, 0);
  }
}

// Scores of all rows and the eight keys at `keys`.
__device__ __forceinline__ void score(u32 keys, float (&sum)[4]) {
  const int lane = threadIdx.x & 31;
  const u32 q = smem_of(shared_memory + Q_AT);
  float chains[4][4];
  clear<16>((float*)chains);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; ++i) {
    u32 k[4], lo[4], hi[4];
    ldmatrix_x4(k, row_part(keys, lane & 7, 4 * i + (lane >> 3)));
    ldmatrix_x4(lo, row_part(q, lane & 15, 4 * i + (lane >> 4)));
    ldmatrix_x4(hi, row_part(q, lane & 15, 4 * i + 2 + (lane >> 4)));
    mma(chains[i % 2 * 2], lo, k[0], k[1]);
    mma(chains[i % 2 * 2 + 1], hi, k[2], k[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
}

// π0's state attends to the prefix and itself, not to actions.
__device__ __forceinline__ bool sees(int query, int token) { return !STATE || query > 0 || token == 0; }

// Scores to weights: stores the probabilities of the warp's eight keys, relative to the row's maximum of the item, and
// the warp's sum of each row. Returns the maxima of rows g and g + 8.
__device__ __forceinline__ float2 weigh(const Item& item, float (&s)[4]) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  float *maxima = (float*)(shared_memory + MAXIMA_AT), *totals = (float*)(shared_memory + TOTALS_AT);
  u16* p = (u16*)(shared_memory + P_AT);
  const float scale = 1.4426950408889634f * rsqrtf((float)HEAD_DIM);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = warp * 8 + 2 * t + (i & 1);
    const bool seen = key < item.keys && (!item.suffix || sees(g + (i >> 1) * 8, key));
    s[i] = seen ? s[i] * scale : NO_SCORE;
  }
  const float low = quad_max(fmaxf(s[0], s[1])), high = quad_max(fmaxf(s[2], s[3]));
  if (t == 0) maxima[g * WARPS + warp] = low, maxima[(g + 8) * WARPS + warp] = high;
  consumers_sync();
  float best[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = g + half * 8;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) best[half] = fmaxf(best[half], maxima[row * WARPS + w]);
    const float base = best[half] == NO_SCORE ? 0.f : best[half];  // -inf - -inf would be NaN.
    const float p0 = exp2_fast(s[half * 2] - base), p1 = exp2_fast(s[half * 2 + 1] - base);
    *(u32*)(p + row * P_PITCH + warp * 8 + 2 * t) = pack_bf16x2(p0, p1);
    const float total = quad_sum(p0 + p1);
    if (t == 0) totals[row * WARPS + warp] = total;
  }
  consumers_sync();
  return make_float2(best[0], best[1]);
}

// Adds the values of `steps` x 16 keys times their probabilities to the warp's columns. `rows_at(key)`: where eight keys
// lie.
template <class RowsAt>
__device__ __forceinline__ void multiply_values(int steps, const RowsAt& rows_at, float (&o)[WARP_GROUPS][2][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 p = smem_of(shared_memory + P_AT) + ((lane & 15) * P_PITCH + (lane >> 4) * 8) * 2;
  clear<WARP_GROUPS * 8>((float*)o);
#pragma unroll 2
  for (int step = 0; step < steps; ++step) {
    u32 a[4];
    ldmatrix_x4(a, p + step * 32);
    const u32 rows = rows_at(step * 16 + (lane & 8));
#pragma unroll
    for (int i = 0; i < WARP_GROUPS; ++i) {
      const int columns = warp + i * WARPS;
      if (columns >= COLUMN_GROUPS) break;
      u32 v[4];
      ldmatrix_x4_trans(v, row_part(rows, lane & 7, columns * 2 + (lane >> 4)));
      mma(o[i][0], a, v[0], v[1]);
      mma(o[i][1], a, v[2], v[3]);
    }
  }
}

// Stores the part: sums of weighted values (item, TOKENS, HEAD_DIM), and maximum and total of each row (item, 16, 2).
__device__ __forceinline__ void store_part(const Call& c, int at, const float (&o)[WARP_GROUPS][2][4], const float2& best) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = g + half * 8;
    if (row >= TOKENS) continue;
#pragma unroll
    for (int i = 0; i < WARP_GROUPS * 2; ++i) {
      const int column = (warp + i / 2 * WARPS) * 16 + i % 2 * 8 + 2 * t;
      const float* v = o[i / 2][i % 2];
      if (column < HEAD_DIM)
        *(float2*)(c.parts + ((u64)at * TOKENS + row) * HEAD_DIM + column) = make_float2(v[half * 2], v[half * 2 + 1]);
    }
    if (warp == 0 && t == 0) {
      const float* totals = (const float*)(shared_memory + TOTALS_AT) + row * WARPS;
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total += totals[w];
      *(float2*)(c.statistics + (at * 16 + row) * 2) = make_float2(half ? best.y : best.x, total);
    }
  }
}

__device__ __forceinline__ void attend(Consumer& me) {
  const Call& c = me.c;
  const int warp = threadIdx.x >> 5, parts = parts_of(c), items = items_of(c);
#pragma unroll 1
  for (int at = blockIdx.x; at < items; at += gridDim.x) {
    const int batch = at / parts / HEADS;
    const Item item(at, parts, length_of(c, batch));
    const int key_head = item.head / GROUP, row = item.batch * TOKENS;
    if (at == (int)blockIdx.x)
      me.heads.wait();
    else
      consumers_sync();
    stage_rows(shared_memory + Q_AT, c.q + (row * HEADS + item.head) * HEAD_DIM, HEADS * HEAD_DIM);
    if (item.suffix) {
      stage_rows(shared_memory + K_AT, c.k + (row * KV_HEADS + key_head) * HEAD_DIM, KV_HEADS * HEAD_DIM);
      stage_rows(shared_memory + V_AT, c.v + (row * KV_HEADS + key_head) * HEAD_DIM, KV_HEADS * HEAD_DIM);
    }
    consumers_sync();
    float s[4] = {0.f, 0.f, 0.f, 0.f}, o[WARP_GROUPS][2][4];
    if (!item.suffix) {
      score(me.ring.wait_full(warp * 8 / STAGE_KEYS) + warp * 8 % STAGE_KEYS * ROW_BYTES, s);
      me.ring.release(KEYS / STAGE_KEYS);
    } else if (warp < 2) {
      score(smem_of(shared_memory + K_AT) + warp * 8 * ROW_BYTES, s);
    }
    const float2 best = weigh(item, s);
    if (item.suffix) {
      const u32 values = smem_of(shared_memory + V_AT);
      multiply_values(1, [&](int key) { return values + key * ROW_BYTES; }, o);
    } else {
      u32 stages[KEYS / STAGE_KEYS];
#pragma unroll
      for (int i = 0; i < KEYS / STAGE_KEYS; ++i) stages[i] = me.ring.wait_full(i);
      multiply_values(KEYS / 16, [&](int key) {
        return (key < STAGE_KEYS ? stages[0] : stages[KEYS / STAGE_KEYS - 1]) + key % STAGE_KEYS * ROW_BYTES;
      }, o);
      me.ring.release(KEYS / STAGE_KEYS);
    }
    store_part(c, at, o, best);
  }
}

// Combines the parts of each row and head: Σ 2^(max_i - max) o_i / Σ 2^(max_i - max) total_i. A warp has 64 columns.
#define COMBINED (ROWS * HEADS * (HEAD_DIM / 64))
#define PARTS_AT_ONCE 12
__device__ __forceinline__ void combine(Consumer& me) {
  const Call& c = me.c;
  const int lane = threadIdx.x & 31, parts = parts_of(c);
  me.parts.wait();
#pragma unroll 1
  for (int at = blockIdx.x + gridDim.x * (threadIdx.x >> 5); at < COMBINED; at += gridDim.x * WARPS) {
    const int column = at % (HEAD_DIM / 64) * 64 + lane * 2, head = at / (HEAD_DIM / 64) % HEADS, row = at / (HEAD_DIM / 64) / HEADS;
    const int first = (row / TOKENS * HEADS + head) * parts, token = row % TOKENS;
    float best = NO_SCORE, total = 0.f, x = 0.f, y = 0.f;
#pragma unroll 1
    for (int from = 0; from < parts; from += PARTS_AT_ONCE) {
      float2 statistic[PARTS_AT_ONCE], o[PARTS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i) {
        const bool real = from + i < parts;
        const int part = first + from + i;
        statistic[i] = real ? *(const float2*)(c.statistics + (part * 16 + token) * 2) : make_float2(NO_SCORE, 0.f);
        o[i] = real ? *(const float2*)(c.parts + ((u64)part * TOKENS + token) * HEAD_DIM + column) : none2();
      }
      const float before = best;
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i) best = fmaxf(best, statistic[i].x);
      const float base = best == NO_SCORE ? 0.f : best, shrink = exp2_fast(before - base);
      total *= shrink, x *= shrink, y *= shrink;
#pragma unroll
      for (int i = 0; i < PARTS_AT_ONCE; ++i) {
        const float weight = exp2_fast(statistic[i].x - base);
        total += weight * statistic[i].y, x += weight * o[i].x, y += weight * o[i].y;
      }
    }
    *(u32*)(c.context + place_of(row, head * HEAD_DIM + column)) = pack_bf16x2(x / total, y / total);
  }
}
