// This kernel is q/k/v and attention of one sequence whose heads are small and whose keys are few. The file follows
// phases.cu; products.cu has the products that it uses.
//
// A cluster of GROUP_RANKS blocks owns a key head and the GROUP query heads that read it: its blocks share the columns
// of q, k and v, send every element to where it is needed, and then each attends, for whole tiles of 16 rows (token by
// token, each with its GROUP heads), to all of the head's keys, of which a warp takes every eighth block of 16. Clusters
// do not wait for each other. In a layer that crosses there are no k and v, and no position in front of the first token.

#define GROUP_TILES ((T * GROUP + 15) / 16)
#define TILES_EACH ((GROUP_TILES + GROUP_RANKS - 1) / GROUP_RANKS)
#define HEAD_UNITS (D / 16)
#define UNITS_EACH (((GROUP + 2) * HEAD_UNITS + GROUP_RANKS - 1) / GROUP_RANKS)
#define SUFFIX_KEYS ROUND_UP(T, 16)

// The units of a key head are those of its query heads, then those of its key and of its value; a block takes every
// GROUP_RANKS-th of them.
struct GroupUnits {
  int kv, rank, count;
  // This is the unit's number among those of all heads.
  __device__ __forceinline__ int at(int i) const {
    const int unit = rank + i * GROUP_RANKS, owner = unit / HEAD_UNITS;
    return (owner < GROUP ? kv * GROUP + owner : H + (owner - GROUP) * KV + kv) * HEAD_UNITS + unit % HEAD_UNITS;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    grouped(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  // Every warp's part of a tile's result takes the place of the weights, but never that of their barriers: what is stored
  // there is lost now and then where processes take turns on the GPU.
  constexpr int PARTS = WARPS * 16 * PITCH * 4;
  constexpr int PRODUCT = Room<UNITS_EACH, PARTS>::BYTES + UNITS_EACH * 8 + 4 * 16 * (WARPS * HELD_TILES + MT);
  const u64 at = (u64)step * L + layer;
  const bool crosses = CROSSES(layer);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x % GROUP_RANKS, kv = blockIdx.x / GROUP_RANKS;
  const int length = c.lengths[0], cached = max(0, min(c.s, length)), own_at = ROUND_UP(cached, 16);
  const int keys = own_at + (crosses ? 0 : SUFFIX_KEYS), room = ROUND_UP(c.s, 16) + SUFFIX_KEYS;
  const int all = (GROUP + (crosses ? 0 : 2)) * HEAD_UNITS, mine = (all - rank + GROUP_RANKS - 1) / GROUP_RANKS;
  float* const parts = (float*)shared_memory;  // (WARPS, 16, PITCH)
  unsigned char* const k_tile = shared_memory + ROUND_UP(PRODUCT, 16);
  unsigned char* const v_tile = k_tile + room * PITCH * 2;
  unsigned char* const q_tile = v_tile + room * PITCH * 2;             // (TILES_EACH, 16, PITCH)
  u16* const own = (u16*)(q_tile + TILES_EACH * 16 * PITCH * 2);       // (UNITS_EACH, T, 2, 8)
  float2* const stats = (float2*)(own + UNITS_EACH * T * 16);          // (WARPS, 16): maximum and sum
  const u32 there_barrier = smem_of(stats + WARPS * 16);
  if (threadIdx.x == 0) {
    // Of the prefix's keys and values, of the cluster's, and of the queries of the block's tiles.
    int rows = 2 * cached + (crosses ? 0 : 2 * T);
    for (int tile = rank; tile < GROUP_TILES; tile += GROUP_RANKS) rows += min(16, T * GROUP - tile * 16);
    mbarrier_init(there_barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(there_barrier, rows * D * 2);
  }
  cluster_arrive_relaxed();
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * cached; i += THREADS) {
    const u64 from = (((u64)layer * c.s + i / 2) * KV + kv) * D;
    bulk_load(smem_of((i & 1 ? v_tile : k_tile) + i / 2 * PITCH * 2), (i & 1 ? c.values : c.keys) + from, D * 2, there_barrier);
  }
  // Values that are not there become zero: their probability is zero, and 0 × NaN is NaN.
#pragma unroll 1
  for (int i = threadIdx.x; i < (own_at - cached + SUFFIX_KEYS - T) * (D / 8); i += THREADS) {
    const int beyond = cached + i / (D / 8), row = beyond < own_at ? beyond : beyond + T;
    *(uint4*)(v_tile + row * PITCH * 2 + i % (D / 8) * 16) = make_uint4(0, 0, 0, 0);
  }
  normed_pairs<UNITS_EACH, false, PARTS>(
      shared_memory, c, m.weights + m.layer_at + layer * m.layer_bytes, m.in_scale + at * W, GroupUnits{kv, rank, mine}, eps,
      [&](int unit, int row, int column) {
        return rotated_of(m, at, unit / HEAD_UNITS, unit % HEAD_UNITS * 8 + column, (crosses ? 0 : length) + row);
      },
      [&](int unit, int row, int column, float a, float b, const Rotated& held) {
        const int head = unit / HEAD_UNITS;
        const int owner = head < H ? head - kv * GROUP : GROUP + (head - H) / KV;
        held.apply(a, b, head < H + KV);
        u16* out = own + ((owner * HEAD_UNITS + unit % HEAD_UNITS) / GROUP_RANKS * T + row) * 16 + column;
        out[0] = round_bf16(a);
        out[8] = round_bf16(b);
      });
  __syncthreads();
  cluster_wait();  // The other blocks have started: their memory may be written, and their barrier counts.
#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    const int unit = rank + i * GROUP_RANKS, owner = unit / HEAD_UNITS;
    const bool query = owner < GROUP;
    // A query goes to the block that owns its tile of rows, a key or a value to all blocks.
#pragma unroll 1
    for (int n = threadIdx.x; n < 2 * T * (query ? 1 : GROUP_RANKS); n += THREADS) {
      const int half = n & 1, row = n / 2 % T, folded = row * GROUP + owner, tile = folded / 16;
      const int column = half * (D / 2) + unit % HEAD_UNITS * 8, to = query ? tile % GROUP_RANKS : n / (2 * T);
      const int place = query ? tile / GROUP_RANKS * 16 + folded % 16 : own_at + row;
      unsigned char* const area = query ? q_tile : owner == GROUP ? k_tile : v_tile;
      const uint4 sent = *(const uint4*)(own + ((i * T + row) * 2 + half) * 8);
      st_async(mapa(smem_of(area) + (place * PITCH + column) * 2, to), mapa(there_barrier, to), sent.x, sent.y, sent.z, sent.w);
    }
  }
  mbarrier_wait_cluster(there_barrier, 0);
  // From here on a block reads and writes its own shared memory alone.
  const float scale = 1.4426950408889634f * rsqrtf((float)D);
#pragma unroll 1
  for (int n = 0; n < TILES_EACH; ++n) {
    const int tile = rank + n * GROUP_RANKS;
    if (tile >= GROUP_TILES) break;
    u32 q[D / 16][4];
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      ldmatrix_x4(q[i], smem_of(q_tile) + ((n * 16 + (lane & 15)) * PITCH + i * 16 + (lane >> 4) * 8) * 2);
    float s[KEY_ROUNDS][2][4], best[2] = {-INFINITE, -INFINITE}, total[2] = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < KEY_ROUNDS; ++r) {
      const int first = (warp + WARPS * r) * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) s[r][i / 4][i % 4] = 0.f;
      if (first < keys)
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          u32 k[4];
          ldmatrix_x4(k, smem_of(k_tile) + ((first + (lane & 7) + (lane >> 4) * 8) * PITCH + i * 16 + (lane >> 3 & 1) * 8) * 2);
          mma_m16n8k16(s[r][0], q[i][0], q[i][1], q[i][2], q[i][3], k[0], k[1]);
          mma_m16n8k16(s[r][1], q[i][0], q[i][1], q[i][2], q[i][3], k[2], k[3]);
        }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = first + i / 4 * 8 + 2 * t + (i & 1), half = i / 2 % 2, query = (tile * 16 + g + half * 8) / GROUP;
        const bool seen = key < own_at ? key < cached : key < keys && key - own_at < T && sees(query, key - own_at);
        s[r][i / 4][i % 4] = seen ? s[r][i / 4][i % 4] * scale : -INFINITE;
        best[half] = fmaxf(best[half], s[r][i / 4][i % 4]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = fmaxf(best[half], __shfl_xor_sync(~0u, best[half], 1));
      best[half] = fmaxf(best[half], __shfl_xor_sync(~0u, best[half], 2));
    }
    float o[D / 8][4];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i / 4][i % 4] = 0.f;
#pragma unroll
    for (int r = 0; r < KEY_ROUNDS; ++r) {
      const int first = (warp + WARPS * r) * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Where every key of a warp is masked, -inf - -inf would be NaN.
        const float one = best[i / 2 % 2] == -INFINITE ? 0.f : best[i / 2 % 2];
        total[i / 2 % 2] += s[r][i / 4][i % 4] = exp2_fast(s[r][i / 4][i % 4] - one);
      }
      if (first < keys) {
        const u32 p[4] = {pack_bf16x2(s[r][0][0], s[r][0][1]), pack_bf16x2(s[r][0][2], s[r][0][3]),
                          pack_bf16x2(s[r][1][0], s[r][1][1]), pack_bf16x2(s[r][1][2], s[r][1][3])};
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          u32 v[4];
          ldmatrix_x4_trans(v, smem_of(v_tile) + ((first + (lane & 15)) * PITCH + i * 16 + (lane >> 4) * 8) * 2);
          mma_m16n8k16(o[2 * i], p[0], p[1], p[2], p[3], v[0], v[1]);
          mma_m16n8k16(o[2 * i + 1], p[0], p[1], p[2], p[3], v[2], v[3]);
        }
      }
    }
    if (n) __syncthreads();  // The tile before has been read.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] += __shfl_xor_sync(~0u, total[half], 1);
      total[half] += __shfl_xor_sync(~0u, total[half], 2);
      if (t == 0) stats[warp * 16 + g + half * 8] = make_float2(best[half], total[half]);
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        *(float2*)(parts + (warp * 16 + g + half * 8) * PITCH + i * 8 + 2 * t) = make_float2(o[i][half * 2], o[i][half * 2 + 1]);
    }
    __syncthreads();
    // Σ 2^(max_w - max) o_w / Σ 2^(max_w - max) sum_w over the warps; a thread has four columns of a row.
#pragma unroll 1
    for (int e = threadIdx.x; e < 16 * (D / 4); e += THREADS) {
      const int row = e / (D / 4), column = e % (D / 4) * 4, folded = tile * 16 + row, token = folded / GROUP;
      if (token >= T) continue;
      float one = -INFINITE, sum = 0.f;
      float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) one = fmaxf(one, stats[w * 16 + row].x);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 stat = stats[w * 16 + row];
        const float4 part = *(const float4*)(parts + (w * 16 + row) * PITCH + column);
        const float weight = exp2_fast(stat.x - one);
        sum += weight * stat.y;
        result.x += weight * part.x;
        result.y += weight * part.y;
        result.z += weight * part.z;
        result.w += weight * part.w;
      }
      *(uint2*)(c.context + place_of(token, (kv * GROUP + folded % GROUP) * D + column, H * D)) =
          make_uint2(pack_bf16x2(result.x / sum, result.y / sum), pack_bf16x2(result.z / sum, result.w / sum));
    }
  }
}
