// These two kernels are q/k/v and attention, for any batch and any head; `attend.cu` and `grouped.cu` do both in one
// for a single sequence. In a layer that crosses, `qkv` has only the blocks of the queries. The file follows phases.cu.

#define QUERY_TILES ((TOKENS * GROUP + 15) / 16)
#define PADDED_TOKENS ROUND_UP(TOKENS, KEYS)
#define KEY_BLOCKS (HEAD_DIM / 32)                          // of 32 elements of a head
#define VALUE_TILES ((HEAD_DIM / 8 + WARPS - 1) / WARPS)    // of eight columns, of a warp
#define PART_PITCH (HEAD_DIM + 4)
#define P_PITCH (KEYS + 8)

extern "C" __global__ void __launch_bounds__(THREADS, MANY_ROWS ? 1 : 2)
    qkv(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  const u64 at = (u64)step * DEPTH + layer;
  normed_pairs<1, QKV_BYTES>(
      c, layer_weights(m, layer), m.in_scale + at * WIDTH, Units{(int)blockIdx.x, 1, 1}, eps, [] {}, [] {},
      [&](int unit, int row, int column) {
        return rotated_of(m, at, unit / (HEAD_DIM / 16), unit % (HEAD_DIM / 16) * 8 + column,
                          (CROSSES(layer) ? 0 : c.lengths[row / TOKENS]) + row % TOKENS);
      },
      [&](int unit, int row, int column, float a, float b, const Rotated& held) {
        const int head = unit / (HEAD_DIM / 16), i = (unit % (HEAD_DIM / 16)) * 8 + column;
        held.apply(a, b, head < HEADS + KV_HEADS);
        u16* out = c.q + ((u64)row * HEADS + head) * HEAD_DIM + i;
        int apart = HEAD_DIM / 2;
        if (head >= HEADS) out = c.ks + ((u64)row * KV_HEADS + head - HEADS) * HEAD_DIM + i;
        if (head >= HEADS + KV_HEADS) {
          const u64 kv_row = ((u64)(row / TOKENS) * KV_HEADS + head - HEADS - KV_HEADS) * HEAD_DIM + i;
          out = c.vts + kv_row * PADDED_TOKENS + row % TOKENS;
          apart = HEAD_DIM / 2 * PADDED_TOKENS;
        }
        out[0] = round_bf16(a);
        out[apart] = round_bf16(b);
      });
}

// Keeps the first `count` of eight values and makes the others zero.
__device__ __forceinline__ uint4 first_values(const uint4& v, int count) {
  const auto pair = [&](u32 two, int at) { return count > at + 1 ? two : count > at ? two & 0xffffu : 0u; };
  return make_uint4(pair(v.x, 0), pair(v.y, 2), pair(v.z, 4), pair(v.w, 6));
}

struct AttentionMemory {
  float maxima[WARPS * 16], totals[WARPS * 16], part[16 * PART_PITCH], stat[32];
  __align__(16) u16 probabilities[16 * P_PITCH];
};

// A block's share of a tile of 16 query rows: tokens x heads of one key head. A warp has eight keys of a tile of KEYS,
// and VALUE_TILES of the values' columns; a lane has rows g (low) and g + 8 (high).
struct TileAttention {
  const Call& c;
  AttentionMemory& memory;
  const int layer, batch, kv, tile;
  const Lane at;
  const int g = at.lane >> 2, t = at.lane & 3;
  const int prefix_splits = c.padded_prefix_tokens / KEYS;
  const int low = tile * 16 + g, high = low + 8, low_token = low / GROUP, high_token = high / GROUP;
  uint4 k[KEY_BLOCKS], v[VALUE_TILES][2], q_low[KEY_BLOCKS], q_high[KEY_BLOCKS];
  float o[VALUE_TILES][4], low_best = -INFINITE, high_best = -INFINITE, low_total = 0.f, high_total = 0.f;

  // Loads a tile of keys and its values: of the prefix, or of the suffix.
  __device__ __forceinline__ void load_keys(int split) {
    const bool prefix = split < prefix_splits;
    const int first = (prefix ? split : split - prefix_splits) * KEYS, last = (prefix ? c.prefix_tokens : TOKENS) - 1;
    const int key = min(first + at.warp * 8 + g, last), stride = prefix ? c.padded_prefix_tokens : PADDED_TOKENS;
    const u64 sequence = (u64)layer * BATCH + batch;
    const u16* k_at = prefix ? c.keys + ((sequence * c.prefix_tokens + key) * KV_HEADS + kv) * HEAD_DIM
                             : c.ks + (((u64)batch * TOKENS + key) * KV_HEADS + kv) * HEAD_DIM;
    const u16* v_at = prefix ? c.values_t + (sequence * KV_HEADS + kv) * HEAD_DIM * c.padded_prefix_tokens
                             : c.vts + ((u64)batch * KV_HEADS + kv) * HEAD_DIM * PADDED_TOKENS;
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) k[i] = ld_cg_v4(k_at + i * 32 + t * 8);
#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[i][j] = ld_cg_v4(v_at + (u64)((at.warp * VALUE_TILES + i) * 8 + g) * stride + first + j * 32 + t * 8);
  }

  // Loads the queries. Rows beyond the last token repeat it and are masked.
  __device__ __forceinline__ void load_queries() {
    const u64 low_row = ((u64)batch * TOKENS + min(low_token, TOKENS - 1)) * HEADS + kv * GROUP + low % GROUP;
    const u64 high_row = ((u64)batch * TOKENS + min(high_token, TOKENS - 1)) * HEADS + kv * GROUP + high % GROUP;
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
      q_low[i] = ld_cg_v4(c.q + low_row * HEAD_DIM + i * 32 + t * 8);
      q_high[i] = ld_cg_v4(c.q + high_row * HEAD_DIM + i * 32 + t * 8);
    }
  }

  // Masked scores of the loaded tile of keys.
  __device__ __forceinline__ void score(bool prefix, int first, int limit, float (&s)[4]) {
    const float scale = 1.4426950408889634f * rsqrtf((float)HEAD_DIM);
    float other[4];
    clear<4>(s);
    clear<4>(other);
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; i += 2) {
      mma32(s, q_low[i], q_high[i], k[i]);
      if (i + 1 < KEY_BLOCKS) mma32(other, q_low[i + 1], q_high[i + 1], k[i + 1]);
    }
    const int my_key = first + at.warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = my_key + (i & 1), token = i < 2 ? low_token : high_token;
      const bool seen = key < limit && token < TOKENS && (prefix || sees(token, key));
      s[i] = seen ? (s[i] + other[i]) * scale : -INFINITE;
    }
  }

  // The largest score of each row so far, in all warps.
  __device__ __forceinline__ void find_maxima(const float (&s)[4], float& low_max, float& high_max) {
    low_max = quad_max(fmaxf(s[0], s[1]));
    high_max = quad_max(fmaxf(s[2], s[3]));
    __syncthreads();
    if (t == 0) {
      memory.maxima[at.warp * 16 + g] = low_max;
      memory.maxima[at.warp * 16 + g + 8] = high_max;
    }
    __syncthreads();
    low_max = low_best;
    high_max = high_best;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      low_max = fmaxf(low_max, memory.maxima[w * 16 + g]);
      high_max = fmaxf(high_max, memory.maxima[w * 16 + g + 8]);
    }
  }

  // Adds a tile of keys: scores, softmax so far, and the product with the values.
  __device__ __forceinline__ void add(int split, int limit) {
    const bool prefix = split < prefix_splits;
    const int first = (prefix ? split : split - prefix_splits) * KEYS;
    // A value beyond the length has probability zero, but may be NaN, and 0 × NaN is NaN.
    if (prefix && first + KEYS > limit)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int real = limit - (first + j * 32 + t * 8);
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i) v[i][j] = first_values(v[i][j], real);
      }
    float s[4], low_max, high_max;
    score(prefix, first, limit, s);
    find_maxima(s, low_max, high_max);
    // If every key of a row is masked so far, -inf - -inf would be NaN.
    const float low_safe = low_max == -INFINITE ? 0.f : low_max, high_safe = high_max == -INFINITE ? 0.f : high_max;
    const float low_shrink = exp2_fast(low_best - low_safe), high_shrink = exp2_fast(high_best - high_safe);
    low_best = low_max;
    high_best = high_max;
    const float p0 = exp2_fast(s[0] - low_safe), p1 = exp2_fast(s[1] - low_safe);
    const float p2 = exp2_fast(s[2] - high_safe), p3 = exp2_fast(s[3] - high_safe);
    // A lane sums its own keys; the lanes and warps of a row are added at the end.
    low_total = low_total * low_shrink + p0 + p1;
    high_total = high_total * high_shrink + p2 + p3;
    u16* const p_of = memory.probabilities;
    *(u32*)(p_of + g * P_PITCH + at.warp * 8 + 2 * t) = pack_bf16x2(p0, p1);
    *(u32*)(p_of + (g + 8) * P_PITCH + at.warp * 8 + 2 * t) = pack_bf16x2(p2, p3);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i) {
      o[i][0] *= low_shrink;
      o[i][1] *= low_shrink;
      o[i][2] *= high_shrink;
      o[i][3] *= high_shrink;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 a_low = *(const uint4*)(p_of + g * P_PITCH + j * 32 + t * 8);
      const uint4 a_high = *(const uint4*)(p_of + (g + 8) * P_PITCH + j * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < VALUE_TILES; ++i) mma32(o[i], a_low, a_high, v[i][j]);
    }
  }

  // Stores the block's part of the result, and the maximum and total of each row.
  __device__ __forceinline__ void store() {
    low_total = quad_sum(low_total);
    high_total = quad_sum(high_total);
    if (t == 0) {
      memory.totals[at.warp * 16 + g] = low_total;
      memory.totals[at.warp * 16 + g + 8] = high_total;
      if (at.warp == 0) {
        memory.stat[g] = low_best;
        memory.stat[g + 8] = high_best;
      }
    }
#pragma unroll
    for (int i = 0; i < VALUE_TILES; ++i) {
      const int column = (at.warp * VALUE_TILES + i) * 8 + 2 * t;
      *(float2*)(memory.part + g * PART_PITCH + column) = make_float2(o[i][0], o[i][1]);
      *(float2*)(memory.part + (g + 8) * PART_PITCH + column) = make_float2(o[i][2], o[i][3]);
    }
    __syncthreads();
    if (threadIdx.x < 16) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total += memory.totals[w * 16 + threadIdx.x];
      memory.stat[16 + threadIdx.x] = total;
    }
  }

  // Combines the parts of the cluster: Σ 2^(max_i - max) o_i / Σ 2^(max_i - max) sum_i. Each block computes a slice of
  // the columns.
  __device__ __forceinline__ void combine(int rank) const {
    constexpr int SLICE = (HEAD_DIM + CLUSTER - 1) / CLUSTER;
    for (int e = threadIdx.x; e < 16 * SLICE; e += THREADS) {
      const int row = e / SLICE, column = rank * SLICE + e % SLICE, r = tile * 16 + row, token = r / GROUP;
      if (column < HEAD_DIM && token < TOKENS) {
        float bests[CLUSTER], sums[CLUSTER], parts[CLUSTER], best = -INFINITE, total = 0.f, sum = 0.f;
#pragma unroll
        for (int other = 0; other < CLUSTER; ++other) {
          bests[other] = ld_cluster(smem_of(memory.stat + row), other);
          sums[other] = ld_cluster(smem_of(memory.stat + 16 + row), other);
          parts[other] = ld_cluster(smem_of(memory.part + row * PART_PITCH + column), other);
        }
#pragma unroll
        for (int other = 0; other < CLUSTER; ++other) best = fmaxf(best, bests[other]);
#pragma unroll
        for (int other = 0; other < CLUSTER; ++other) {
          const float weight = exp2_fast(bests[other] - best);
          total += weight * sums[other];
          sum += weight * parts[other];
        }
        const int to = (kv * GROUP + r % GROUP) * HEAD_DIM + column;
        c.context[place_of(batch * TOKENS + token, to, HEADS * HEAD_DIM)] = round_bf16(sum / total);
      }
    }
  }
};

// A cluster of blocks shares a tile of 16 query rows; each block takes every CLUSTER-th tile of KEYS keys, and the
// parts meet in the cluster's shared memory. The prefix's keys are loaded before the kernel waits for q.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ Model m, const __grid_constant__ Call c, int layer) {
  __shared__ AttentionMemory memory;
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER, pair = group / QUERY_TILES;
  TileAttention tile{c, memory, layer, pair / KV_HEADS, pair % KV_HEADS, group % QUERY_TILES};
  const int splits = tile.prefix_splits + (CROSSES(layer) ? 0 : PADDED_TOKENS / KEYS);
  clear<VALUE_TILES * 4>((float*)tile.o);
  griddepcontrol_launch_dependents();
  if (rank < tile.prefix_splits) tile.load_keys(rank);
  const int prefix_length = c.lengths[tile.batch];
  griddepcontrol_wait();
  tile.load_queries();
  for (int split = rank; split < splits; split += CLUSTER) {
    const bool prefix = split < tile.prefix_splits;
    if (split != rank || !prefix) tile.load_keys(split);
    tile.add(split, prefix ? prefix_length : TOKENS);
  }
  tile.store();
  cluster_sync();
  tile.combine(rank);
  // No block may end while another still reads its part.
  cluster_sync();
}
