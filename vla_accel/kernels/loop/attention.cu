// These two kernels are q/k/v and attention, for any batch and any head; `attend.cu` and `grouped.cu` do both in one for
// a single sequence. Of a layer that crosses, `qkv` has the blocks of the queries alone. The file follows phases.cu.

#define ROW_TILES ((T * GROUP + 15) / 16)

extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    qkv(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  const u64 at = (u64)step * L + layer;
  normed_pairs<1>(
      shared_memory, c, m.weights + m.layer_at + layer * m.layer_bytes, m.in_scale + at * W, Units{(int)blockIdx.x, 1, 1}, eps,
      [&](int unit, int row, int column) {
        return rotated_of(m, at, unit / (D / 16), unit % (D / 16) * 8 + column, (CROSSES(layer) ? 0 : c.lengths[row / T]) + row % T);
      },
      [&](int unit, int row, int column, float a, float b, const Rotated& held) {
        const int head = unit / (D / 16), i = (unit % (D / 16)) * 8 + column;
        held.apply(a, b, head < H + KV);
        u16* out = c.q + ((u64)row * H + head) * D + i;
        int apart = D / 2;
        if (head >= H) out = c.ks + ((u64)row * KV + head - H) * D + i;
        if (head >= H + KV) {
          constexpr int TP = ((T + KEYS - 1) / KEYS) * KEYS;
          out = c.vts + (((u64)(row / T) * KV + head - H - KV) * D + i) * TP + row % T;
          apart = D / 2 * TP;
        }
        out[0] = round_bf16(a);
        out[apart] = round_bf16(b);
      });
}

// This keeps the first `count` of eight values and makes the others zero.
__device__ __forceinline__ uint4 first_values(const uint4& v, int count) {
  const auto pair = [&](u32 two, int at) { return count > at + 1 ? two : count > at ? two & 0xffffu : 0u; };
  return make_uint4(pair(v.x, 0), pair(v.y, 2), pair(v.z, 4), pair(v.w, 6));
}

// A cluster of blocks shares a tile of 16 query rows (tokens x heads of one key head); each block takes every
// CLUSTER-th tile of 64 keys, and the parts meet in the cluster's shared memory. The prefix's keys are fetched before
// the wait for q.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ Model m, const __grid_constant__ Call c, int layer) {
  constexpr int DB = D / 32;                       // The head has DB blocks of 32.
  constexpr int VT = (D / 8 + WARPS - 1) / WARPS;  // A warp has VT tiles of eight value columns.
  constexpr int TP = ((T + KEYS - 1) / KEYS) * KEYS;
  __shared__ float maxima[WARPS * 16], totals[WARPS * 16], part[16 * (D + 4)], stat[32];
  __shared__ __align__(16) u16 p_of[16 * (KEYS + 8)];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int prefix_splits = c.sp / KEYS, splits = prefix_splits + (CROSSES(layer) ? 0 : TP / KEYS);
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;
  const int tile = group % ROW_TILES, pair = group / ROW_TILES, batch = pair / KV, kv = pair % KV;
  const float scale = 1.4426950408889634f * rsqrtf((float)D);
  const int low = tile * 16 + g, high = low + 8, low_token = low / GROUP, high_token = high / GROUP;
  uint4 k[DB], v[VT][2], q_low[DB], q_high[DB];
  float o[VT][4], low_best = -INFINITE, high_best = -INFINITE, low_total = 0.f, high_total = 0.f;
#pragma unroll
  for (int i = 0; i < VT; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  const auto load_tile = [&](int split) {
    const bool prefix = split < prefix_splits;
    const int first = (prefix ? split : split - prefix_splits) * KEYS, last = (prefix ? c.s : T) - 1;
    const int key = min(first + warp * 8 + g, last), stride = prefix ? c.sp : TP;
    const u16* k_at = prefix ? c.keys + ((((u64)layer * BATCH + batch) * c.s + key) * KV + kv) * D
                             : c.ks + (((u64)batch * T + key) * KV + kv) * D;
    const u16* v_at = prefix ? c.values_t + (((u64)layer * BATCH + batch) * KV + kv) * D * c.sp
                             : c.vts + ((u64)batch * KV + kv) * D * TP;
#pragma unroll
    for (int i = 0; i < DB; ++i) k[i] = ld_cg_v4(k_at + i * 32 + t * 8);
#pragma unroll
    for (int i = 0; i < VT; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[i][j] = ld_cg_v4(v_at + (u64)((warp * VT + i) * 8 + g) * stride + first + j * 32 + t * 8);
  };
  griddepcontrol_launch_dependents();
  if (rank < prefix_splits) load_tile(rank);
  const int prefix_length = c.lengths[batch];
  griddepcontrol_wait();
  // Rows beyond the last token repeat it and are masked.
  const u64 low_at = (((u64)batch * T + min(low_token, T - 1)) * H + kv * GROUP + low % GROUP) * D;
  const u64 high_at = (((u64)batch * T + min(high_token, T - 1)) * H + kv * GROUP + high % GROUP) * D;
#pragma unroll
  for (int i = 0; i < DB; ++i) {
    q_low[i] = ld_cg_v4(c.q + low_at + i * 32 + t * 8);
    q_high[i] = ld_cg_v4(c.q + high_at + i * 32 + t * 8);
  }
  for (int split = rank; split < splits; split += CLUSTER) {
    const bool prefix = split < prefix_splits;
    const int first = (prefix ? split : split - prefix_splits) * KEYS, limit = prefix ? prefix_length : T;
    if (split != rank || !prefix) load_tile(split);
    // A value behind the length has probability zero, but may be NaN, and 0 × NaN is NaN.
    if (prefix && first + KEYS > limit)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int real = limit - (first + j * 32 + t * 8);
#pragma unroll
        for (int i = 0; i < VT; ++i) v[i][j] = first_values(v[i][j], real);
      }
    float s[4] = {0.f, 0.f, 0.f, 0.f}, s2[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < DB; i += 2) {
      mma32(s, q_low[i], q_high[i], k[i]);
      if (i + 1 < DB) mma32(s2, q_low[i + 1], q_high[i + 1], k[i + 1]);
    }
    const int my_key = first + warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = my_key + (i & 1), token = i < 2 ? low_token : high_token;
      const bool seen = at < limit && token < T && (prefix || sees(token, at));
      s[i] = seen ? (s[i] + s2[i]) * scale : -INFINITE;
    }
    float low_max = fmaxf(s[0], s[1]), high_max = fmaxf(s[2], s[3]);
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
      low_max = fmaxf(low_max, __shfl_xor_sync(~0u, low_max, step));
      high_max = fmaxf(high_max, __shfl_xor_sync(~0u, high_max, step));
    }
    __syncthreads();
    if (t == 0) {
      maxima[warp * 16 + g] = low_max;
      maxima[warp * 16 + g + 8] = high_max;
    }
    __syncthreads();
    low_max = low_best;
    high_max = high_best;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      low_max = fmaxf(low_max, maxima[w * 16 + g]);
      high_max = fmaxf(high_max, maxima[w * 16 + g + 8]);
    }
    // Where every key of a row is masked so far, -inf - -inf would be NaN.
    const float low_safe = low_max == -INFINITE ? 0.f : low_max, high_safe = high_max == -INFINITE ? 0.f : high_max;
    const float low_shrink = exp2_fast(low_best - low_safe), high_shrink = exp2_fast(high_best - high_safe);
    low_best = low_max;
    high_best = high_max;
    const float p0 = exp2_fast(s[0] - low_safe), p1 = exp2_fast(s[1] - low_safe);
    const float p2 = exp2_fast(s[2] - high_safe), p3 = exp2_fast(s[3] - high_safe);
    // A lane sums its own keys; the lanes and warps of a row are added at the end.
    low_total = low_total * low_shrink + p0 + p1;
    high_total = high_total * high_shrink + p2 + p3;
    *(u32*)(p_of + g * (KEYS + 8) + warp * 8 + 2 * t) = pack_bf16x2(p0, p1);
    *(u32*)(p_of + (g + 8) * (KEYS + 8) + warp * 8 + 2 * t) = pack_bf16x2(p2, p3);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VT; ++i) {
      o[i][0] *= low_shrink;
      o[i][1] *= low_shrink;
      o[i][2] *= high_shrink;
      o[i][3] *= high_shrink;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 a_low = *(const uint4*)(p_of + g * (KEYS + 8) + j * 32 + t * 8);
      const uint4 a_high = *(const uint4*)(p_of + (g + 8) * (KEYS + 8) + j * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < VT; ++i) mma32(o[i], a_low, a_high, v[i][j]);
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    low_total += __shfl_xor_sync(~0u, low_total, step);
    high_total += __shfl_xor_sync(~0u, high_total, step);
  }
  if (t == 0) {
    totals[warp * 16 + g] = low_total;
    totals[warp * 16 + g + 8] = high_total;
    if (warp == 0) {
      stat[g] = low_best;
      stat[g + 8] = high_best;
    }
  }
#pragma unroll
  for (int i = 0; i < VT; ++i) {
    const int column = (warp * VT + i) * 8 + 2 * t;
    *(float2*)(part + g * (D + 4) + column) = make_float2(o[i][0], o[i][1]);
    *(float2*)(part + (g + 8) * (D + 4) + column) = make_float2(o[i][2], o[i][3]);
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += totals[w * 16 + threadIdx.x];
    stat[16 + threadIdx.x] = total;
  }
  cluster_sync();
  // Each block computes a slice of the columns: Σ 2^(max_i - max) o_i / Σ 2^(max_i - max) sum_i over the cluster's
  // blocks.
  constexpr int SLICE = (D + CLUSTER - 1) / CLUSTER;
  for (int e = threadIdx.x; e < 16 * SLICE; e += THREADS) {
    const int row = e / SLICE, column = rank * SLICE + e % SLICE, r = tile * 16 + row, token = r / GROUP;
    if (column < D && token < T) {
      float bests[CLUSTER], sums[CLUSTER], parts[CLUSTER], best = -INFINITE, total = 0.f, sum = 0.f;
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) {
        bests[other] = ld_cluster(smem_of(stat + row), other);
        sums[other] = ld_cluster(smem_of(stat + 16 + row), other);
        parts[other] = ld_cluster(smem_of(part + row * (D + 4) + column), other);
      }
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) best = fmaxf(best, bests[other]);
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) {
        const float weight = exp2_fast(bests[other] - best);
        total += weight * sums[other];
        sum += weight * parts[other];
      }
      c.context[place_of(batch * T + token, (kv * GROUP + r % GROUP) * D + column, H * D)] = round_bf16(sum / total);
    }
  }
  // No block may leave while another still reads its part.
  cluster_sync();
}
