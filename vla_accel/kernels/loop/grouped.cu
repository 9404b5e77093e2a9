// This kernel is q/k/v and attention of one sequence whose heads are small and whose keys are few. The file follows
// phases.cu; it uses the products of products.cu.
//
// A cluster of GROUP_RANKS blocks owns a key head and the GROUP query heads that read it: its blocks share the columns
// of q, k and v, send every element to the blocks that need it, and then each attends, for whole tiles of 16 rows
// (token by token, each with its GROUP heads), to all keys of the head, of which a warp takes every eighth block of 16.
// Clusters do not wait for each other. A layer that crosses has no k and v, and no position before the first token.
//
// `schedule.py` lays out shared memory (`GroupedWork`): the product, which the parts of the result replace, keys,
// values, q, what the block makes of q, k and v, statistics, and a barrier.

#define GROUP_TILES ((TOKENS * GROUP + 15) / 16)
#define HEAD_UNITS (HEAD_DIM / 16)
#define SUFFIX_KEYS ROUND_UP(TOKENS, 16)

// The units of a key head are those of its query heads, then those of its key and of its value. A block takes every
// GROUP_RANKS-th of them.
struct GroupUnits {
  int kv, rank, count;
  // The number of the unit among those of all heads.
  __device__ __forceinline__ int at(int i) const {
    const int unit = rank + i * GROUP_RANKS, owner = unit / HEAD_UNITS;
    return (owner < GROUP ? kv * GROUP + owner : HEADS + (owner - GROUP) * KV_HEADS + kv) * HEAD_UNITS +
           unit % HEAD_UNITS;
  }
};

struct GroupedAttention {
  // A warp's scores and sums of one tile of rows.
  typedef float Scores[KEY_ROUNDS][2][4];
  typedef float Sums[HEAD_DIM / 8][4];
  const Call& c;
  const GroupedWork& work;
  const int layer, kv, rank;
  const bool crosses;
  const Lane at;
  const int g = at.lane >> 2, t = at.lane & 3;
  const int length = c.lengths[0], cached = max(0, min(c.prefix_tokens, length));
  // The suffix's keys begin at `own_at`, `keys` in all.
  const int own_at = ROUND_UP(cached, 16), keys = own_at + (crosses ? 0 : SUFFIX_KEYS);
  float* const parts = (float*)shared_memory;  // (WARPS, 16, PITCH): every warp's part of a tile's result
  unsigned char* const k_tile = shared_memory + work.keys;
  unsigned char* const v_tile = shared_memory + work.values;
  unsigned char* const q_tile = shared_memory + work.queries;      // (TILES_EACH, 16, PITCH)
  u16* const made = (u16*)(shared_memory + work.made);             // (units, TOKENS, 2, 8)
  float2* const stats = (float2*)(shared_memory + work.statistics);  // (WARPS, 16): maximum and sum
  const Barrier arrived{smem_of(shared_memory + work.barrier)};

  // Starts the copies of the prefix's keys and values.
  __device__ __forceinline__ void fetch_cache() const {
    if (threadIdx.x == 0) {
      // The prefix's keys and values, the cluster's, and the queries of the block's tiles.
      int rows = 2 * cached + (crosses ? 0 : 2 * TOKENS);
      for (int tile = rank; tile < GROUP_TILES; tile += GROUP_RANKS) rows += min(16, TOKENS * GROUP - tile * 16);
      arrived.init();
      fence_mbarrier_init();
      arrived.expect(rows * HEAD_DIM * 2);
    }
    cluster_arrive_relaxed();
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * cached; i += THREADS) {
      const u64 from = (((u64)layer * c.prefix_tokens + i / 2) * KV_HEADS + kv) * HEAD_DIM;
      arrived.copy(smem_of((i & 1 ? v_tile : k_tile) + i / 2 * PITCH * 2), (i & 1 ? c.values : c.keys) + from,
                   HEAD_DIM * 2);
    }
    // Missing values become zero: their probability is zero, and 0 × NaN is NaN.
#pragma unroll 1
    for (int i = threadIdx.x; i < (own_at - cached + SUFFIX_KEYS - TOKENS) * (HEAD_DIM / 8); i += THREADS) {
      const int beyond = cached + i / (HEAD_DIM / 8), row = beyond < own_at ? beyond : beyond + TOKENS;
      *(uint4*)(v_tile + row * PITCH * 2 + i % (HEAD_DIM / 8) * 16) = make_uint4(0, 0, 0, 0);
    }
  }

  // Sends the block's units: a query to the block that owns its tile of rows, a key or a value to all blocks.
  __device__ __forceinline__ void send_units(int count) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int unit = rank + i * GROUP_RANKS, owner = unit / HEAD_UNITS;
      const bool query = owner < GROUP;
#pragma unroll 1
      for (int n = threadIdx.x; n < 2 * TOKENS * (query ? 1 : GROUP_RANKS); n += THREADS) {
        const int half = n & 1, row = n / 2 % TOKENS, folded = row * GROUP + owner, tile = folded / 16;
        const int column = half * (HEAD_DIM / 2) + unit % HEAD_UNITS * 8;
        const int to = query ? tile % GROUP_RANKS : n / (2 * TOKENS);
        const int place = query ? tile / GROUP_RANKS * 16 + folded % 16 : own_at + row;
        unsigned char* const area = query ? q_tile : owner == GROUP ? k_tile : v_tile;
        const uint4 sent = *(const uint4*)(made + ((i * TOKENS + row) * 2 + half) * 8);
        st_async(mapa(smem_of(area) + (place * PITCH + column) * 2, to), mapa(arrived.address, to), sent.x, sent.y,
                 sent.z, sent.w);
      }
    }
  }

  // Masked scores of the block's n-th tile of rows, number `tile`, and their maximum in each half.
  __device__ __forceinline__ void score(int n, int tile, Scores& s, float (&best)[2]) const {
    const float scale = 1.4426950408889634f * rsqrtf((float)HEAD_DIM);
    u32 q[HEAD_DIM / 16][4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i)
      ldmatrix_x4(q[i], smem_of(q_tile) + ((n * 16 + (at.lane & 15)) * PITCH + i * 16 + (at.lane >> 4) * 8) * 2);
    best[0] = best[1] = -INFINITE;
#pragma unroll
    for (int r = 0; r < KEY_ROUNDS; ++r) {
      const int first = (at.warp + WARPS * r) * 16;
      clear<8>((float*)s[r]);
      if (first < keys)
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
          u32 k[4];
          const int row = first + (at.lane & 7) + (at.lane >> 4) * 8;
          ldmatrix_x4(k, smem_of(k_tile) + (row * PITCH + i * 16 + (at.lane >> 3 & 1) * 8) * 2);
          mma(s[r][0], q[i], k[0], k[1]);
          mma(s[r][1], q[i], k[2], k[3]);
        }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = first + i / 4 * 8 + 2 * t + (i & 1), half = i / 2 % 2;
        const int query = (tile * 16 + g + half * 8) / GROUP;
        const bool seen =
            key < own_at ? key < cached : key < keys && key - own_at < TOKENS && sees(query, key - own_at);
        s[r][i / 4][i % 4] = seen ? s[r][i / 4][i % 4] * scale : -INFINITE;
        best[half] = fmaxf(best[half], s[r][i / 4][i % 4]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) best[half] = quad_max(best[half]);
  }

  // Turns the scores into probabilities, and multiplies them with the values.
  __device__ __forceinline__ void multiply_values(Scores& s, const float (&best)[2], float (&total)[2],
                                                  Sums& o) const {
    total[0] = total[1] = 0.f;
    clear<HEAD_DIM / 2>((float*)o);
#pragma unroll
    for (int r = 0; r < KEY_ROUNDS; ++r) {
      const int first = (at.warp + WARPS * r) * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // If every key of a warp is masked, -inf - -inf would be NaN.
        const float one = best[i / 2 % 2] == -INFINITE ? 0.f : best[i / 2 % 2];
        total[i / 2 % 2] += s[r][i / 4][i % 4] = exp2_fast(s[r][i / 4][i % 4] - one);
      }
      if (first < keys) {
        const u32 p[4] = {pack_bf16x2(s[r][0][0], s[r][0][1]), pack_bf16x2(s[r][0][2], s[r][0][3]),
                          pack_bf16x2(s[r][1][0], s[r][1][1]), pack_bf16x2(s[r][1][2], s[r][1][3])};
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
          u32 v[4];
          ldmatrix_x4_trans(v, smem_of(v_tile) + ((first + (at.lane & 15)) * PITCH + i * 16 + (at.lane >> 4) * 8) * 2);
          mma(o[2 * i], p, v[0], v[1]);
          mma(o[2 * i + 1], p, v[2], v[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store_part(const float (&best)[2], const float (&total)[2], const Sums& o) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(total[half]);
      if (t == 0) stats[at.warp * 16 + g + half * 8] = make_float2(best[half], sum);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i)
        *(float2*)(parts + (at.warp * 16 + g + half * 8) * PITCH + i * 8 + 2 * t) =
            make_float2(o[i][half * 2], o[i][half * 2 + 1]);
    }
  }

  // Σ 2^(max_w - max) o_w / Σ 2^(max_w - max) sum_w over the warps; a thread has four columns of a row.
  __device__ __forceinline__ void combine(int tile) const {
#pragma unroll 1
    for (int e = threadIdx.x; e < 16 * (HEAD_DIM / 4); e += THREADS) {
      const int row = e / (HEAD_DIM / 4), column = e % (HEAD_DIM / 4) * 4;
      const int folded = tile * 16 + row, token = folded / GROUP;
      if (token >= TOKENS) continue;
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
      const int to = (kv * GROUP + folded % GROUP) * HEAD_DIM + column;
      *(uint2*)(c.context + place_of(token, to, HEADS * HEAD_DIM)) =
          make_uint2(pack_bf16x2(result.x / sum, result.y / sum), pack_bf16x2(result.z / sum, result.w / sum));
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MANY_ROWS ? 1 : 2)
    grouped(const __grid_constant__ Model m, const __grid_constant__ Call c, const __grid_constant__ GroupedWork work,
            float eps, int step, int layer) {
  const u64 at = (u64)step * DEPTH + layer;
  const int rank = blockIdx.x % GROUP_RANKS, kv = blockIdx.x / GROUP_RANKS;
  const bool crosses = CROSSES(layer);
  const int all = (GROUP + (crosses ? 0 : 2)) * HEAD_UNITS, mine = (all - rank + GROUP_RANKS - 1) / GROUP_RANKS;
  const GroupedAttention attention{c, work, layer, kv, rank, crosses};
  attention.fetch_cache();
  normed_pairs<UNITS_EACH, GROUPED_BYTES>(
      c, layer_weights(m, layer), m.in_scale + at * WIDTH, GroupUnits{kv, rank, mine}, eps, [] {}, [] {},
      [&](int unit, int row, int column) {
        return rotated_of(m, at, unit / HEAD_UNITS, unit % HEAD_UNITS * 8 + column,
                          (crosses ? 0 : attention.length) + row);
      },
      [&](int unit, int row, int column, float a, float b, const Rotated& held) {
        const int head = unit / HEAD_UNITS;
        const int owner = head < HEADS ? head - kv * GROUP : GROUP + (head - HEADS) / KV_HEADS;
        held.apply(a, b, head < HEADS + KV_HEADS);
        const int i = (owner * HEAD_UNITS + unit % HEAD_UNITS) / GROUP_RANKS;
        u16* out = attention.made + (i * TOKENS + row) * 16 + column;
        out[0] = round_bf16(a);
        out[8] = round_bf16(b);
      });
  __syncthreads();
  cluster_wait();  // The other blocks have started: their memory may be written, and their barrier counts.
  attention.send_units(mine);
  attention.arrived.wait_cluster();
  // From here on a block reads and writes only its own shared memory.
#pragma unroll 1
  for (int n = 0; n < TILES_EACH; ++n) {
    const int tile = rank + n * GROUP_RANKS;
    if (tile >= GROUP_TILES) break;
    GroupedAttention::Scores s;
    GroupedAttention::Sums o;
    float best[2], total[2];
    attention.score(n, tile, s, best);
    attention.multiply_values(s, best, total, o);
    if (n) __syncthreads();  // The parts of the tile before have been read.
    attention.store_part(best, total, o);
    __syncthreads();
    attention.combine(tile);
  }
}
