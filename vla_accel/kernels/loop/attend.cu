// This kernel is q/k/v and attention of one sequence. The file follows phases.cu; it uses the products of products.cu.
//
// A cluster of eight blocks owns a query head: each block makes an eighth of the head's q and sends it to the other
// seven, then attends to an eighth of the prefix's keys and to an eighth of the suffix's own. The parts of the result,
// unnormalised, go to the block that owns their columns. Only the context goes through global memory. KV_BLOCKS blocks
// in front make the suffix's keys and values; the others load them before the prefix's scores, and then again until
// they are there.
//
// The eight blocks of a cluster and the blocks in front wait for each other, so they must be resident together: the
// host that launches this makes sure that the whole grid fits on the chip.
//
// With one tile of rows, the copies of the prefix's keys and values start after the loads of the rows: earlier, they
// delay the weights and the rows, which the block needs first. With more, whose products take longer, they start first.
//
// `schedule.py` lays out shared memory (`AttendWork`): the product, which the parts of the result replace, keys,
// values, q, which the probabilities replace, maxima, totals, statistics, the block's own q, and two barriers.

#define Q_UNITS (HEAD_DIM / 16 / RANKS)
#define Q_COLUMNS (HEAD_DIM / RANKS)
#define KV_BLOCKS (2 * KV_HEADS * HEAD_DIM / 16)
#define PADDED_ROWS (16 * ROW_TILES)
#define VALUE_TILES (HEAD_DIM / 64)  // of eight columns, of a warp
#define EIGHT_COLUMNS (PADDED_ROWS * 16)  // bytes of eight columns of q
// Many rows, whose exchange takes time, send the parts in BF16, two tiles together.
#define TOGETHER (MANY_ROWS ? 2 : 1)
#define PARTS_EACH (ROW_TILES * VALUE_TILES / TOGETHER)  // uint4 a lane
static_assert(HEAD_DIM % 128 == 0 && WARPS == RANKS, "a warp's columns of the result belong to one block");
static_assert(ATTEND_BYTES == Q_UNITS * STAGE_BYTES, "the sums fit in the place of the weights");
static_assert(ROUND_UP((TOKENS + RANKS - 1) / RANKS, 8) * (HEAD_DIM / 8) <= THREADS,
              "a thread has at most eight columns of one of the suffix's keys");

// One block of a cluster, which attends to its share of the keys. "Own" keys are those of the suffix.
struct HeadAttention {
  typedef float Scores[HELD_TILES][4];
  const Call& c;
  const AttendWork& work;
  const int layer, head, kv, rank;
  const Lane at;
  const int g = at.lane >> 2, t = at.lane & 3;
  // Keys of the block, of the prefix and then of the suffix, both multiples of eight; the first of each, and how many.
  const int keys_each = work.prefix_keys + work.suffix_keys, keys = ROUND_UP(keys_each, 16);
  const int first = rank * work.prefix_keys, cached = max(0, min(work.prefix_keys, c.prefix_tokens - first));
  const int first_own = rank * work.suffix_keys, own = max(0, min(work.suffix_keys, TOKENS - first_own));
  unsigned char* const k_tile = shared_memory + work.keys;
  unsigned char* const v_tile = shared_memory + work.values;
  unsigned char* const q_tile = shared_memory + work.queries;  // (2, HEAD_DIM / 16, PADDED_ROWS, 8)
  u16* const p_of = (u16*)q_tile;                              // The probabilities replace q.
  float* const maxima = (float*)(shared_memory + work.maxima);
  float* const totals = (float*)(shared_memory + work.totals);
  float* const stats = (float*)(shared_memory + work.statistics);  // (RANKS, PADDED_ROWS, 2): max and sum of blocks
  u16* const own_q = (u16*)(shared_memory + work.own_queries);     // (2, Q_UNITS, PADDED_ROWS, 8)
  const Barrier kv_arrived{smem_of(shared_memory + work.barriers)}, q_arrived{kv_arrived.address + 8};
  const int row_warp = at.warp % ROW_WARPS, key_warp = at.warp / ROW_WARPS;

  // Zeros: the values' probability is zero, but they may be NaN, and 0 × NaN is NaN.
  __device__ __forceinline__ void clear_values(int from, int to) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < (to - from) * (HEAD_DIM / 8); i += THREADS)
      *(uint4*)(v_tile + (from + i / (HEAD_DIM / 8)) * PITCH * 2 + i % (HEAD_DIM / 8) * 16) = make_uint4(0, 0, 0, 0);
  }

  // Initialises the barriers.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      kv_arrived.init();
      q_arrived.init();
      fence_mbarrier_init();
      kv_arrived.expect(cached * HEAD_DIM * 4);
      q_arrived.expect(TOKENS * HEAD_DIM * 2);
    }
    cluster_arrive_relaxed();  // The others use q_arrived, which the fence makes visible to them.
  }

  // Starts the copies of the prefix's keys and values, after a barrier of the block that follows `begin`.
  __device__ __forceinline__ void fetch_cache() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * cached; i += THREADS) {
      const int key = i >> 1;
      const u64 from = ((((u64)layer * c.prefix_tokens) + first + key) * KV_HEADS + kv) * HEAD_DIM;
      kv_arrived.copy(smem_of((i & 1 ? v_tile : k_tile) + key * PITCH * 2), (i & 1 ? c.values : c.keys) + from,
                      HEAD_DIM * 2);
    }
  }

  // Sends the block's part of q; a warp sends to one block.
  __device__ __forceinline__ void send_q() const {
    const u32 their_q = mapa(smem_of(q_tile) + rank * Q_UNITS * EIGHT_COLUMNS, at.warp);
    const u32 their_barrier = mapa(q_arrived.address, at.warp);
#pragma unroll 1
    for (int part = at.lane; part < TOKENS * Q_UNITS * 2; part += 32) {
      const int eight = part / TOKENS, row = part % TOKENS;
      const int to = eight / Q_UNITS * (HEAD_DIM / 16) + eight % Q_UNITS;
      const uint4 v = *(const uint4*)(own_q + (eight * PADDED_ROWS + row) * 8);
      st_async(their_q + to * EIGHT_COLUMNS + row * 16, their_barrier, v.x, v.y, v.z, v.w);
    }
  }

  // Scores of a tile of eight keys. A warp with many tiles of keys keeps q in registers (`held`).
  static constexpr bool KEEP = KEY_ROUNDS > 2 && HELD_TILES == 1;
  typedef u32 HeldQ[KEEP ? HEAD_DIM / 16 : 1][4];
  // With three tiles of rows a fourth of the warps multiplies the last once more, and its scores are not used.
  __device__ __forceinline__ u32 q_address() const {
    return smem_of(q_tile) + (min(row_warp * 16, PADDED_ROWS - 16) + (at.lane & 15)) * 16 +
           (at.lane >> 4) * EIGHT_COLUMNS;
  }
  __device__ __forceinline__ void score(int tile, u32 q_at, const HeldQ& held, Scores& sum) const {
    constexpr int UNROLL = KEEP ? HEAD_DIM / 32 : 2;
    const u32 k_at = smem_of(k_tile) + ((tile * 8 + (at.lane & 7)) * PITCH + (at.lane >> 3) * 8) * 2;
    Scores other;  // A second chain of sums halves the latency.
    clear<HELD_TILES * 4>((float*)other);
#pragma unroll UNROLL
    for (int i = 0; i < HEAD_DIM / 32; ++i) {
      u32 b[4];
      ldmatrix_x4(b, k_at + i * 64);
#pragma unroll
      for (int mt = 0; mt < HELD_TILES; ++mt) {
        u32 first_half[4], second_half[4];
        if (!KEEP) {
          ldmatrix_x4(first_half, q_at + mt * 256 + i * 4 * EIGHT_COLUMNS);
          ldmatrix_x4(second_half, q_at + mt * 256 + (i * 4 + 2) * EIGHT_COLUMNS);
        }
        const u32(&a)[4] = KEEP ? held[KEEP ? 2 * i : 0] : (const u32(&)[4])first_half;
        const u32(&c)[4] = KEEP ? held[KEEP ? 2 * i + 1 : 0] : (const u32(&)[4])second_half;
        mma(sum[mt], a, b[0], b[1]);
        mma(other[mt], c, b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < HELD_TILES * 4; ++i) ((float*)sum)[i] += ((float*)other)[i];
  }

  // Scores of all keys: warp w takes tiles w / ROW_WARPS + K_WARPS i, against its rows. The suffix's keys come last.
  __device__ __forceinline__ void score_all(Scores (&s)[KEY_ROUNDS]) const {
    const u32 q_at = q_address();
    HeldQ held;
#pragma unroll
    for (int i = 0; KEEP && i < HEAD_DIM / 16; ++i) ldmatrix_x4(held[i], q_at + i * 2 * EIGHT_COLUMNS);
    clear<KEY_ROUNDS * HELD_TILES * 4>((float*)s);
    // A thread has eight columns of one of the suffix's keys.
    const int own_key = threadIdx.x / (HEAD_DIM / 8), own_column = threadIdx.x % (HEAD_DIM / 8) * 8;
    const u64 own_from = ((u64)(first_own + own_key) * KV_HEADS + kv) * HEAD_DIM + own_column;
    uint4 own_k, own_v;
    if (own_key < own) {
      own_k = ld_relaxed_v4(c.ks + own_from);
      own_v = ld_relaxed_v4(c.vs + own_from);
    }
#pragma unroll 1
    for (int suffix = 0; suffix < 2; ++suffix) {
      if (suffix) {
        if (own == 0) break;
        if (own_key < own) {
          const int to = ((work.prefix_keys + own_key) * PITCH + own_column) * 2;
          wait_there(own_k, c.ks + own_from);
          wait_there(own_v, c.vs + own_from);
          *(uint4*)(k_tile + to) = own_k;
          *(uint4*)(v_tile + to) = own_v;
        }
        __syncthreads();
      }
#pragma unroll
      for (int r = 0; r < KEY_ROUNDS; ++r) {
        const int tile = key_warp + K_WARPS * r;
        if (tile * 8 < keys_each && tile * 8 >= work.prefix_keys == suffix) score(tile, q_at, held, s[r]);
      }
    }
  }

  // Scales the scores, masks them, and stores the warp's maximum of each row.
  __device__ __forceinline__ void mask(int length, Scores (&s)[KEY_ROUNDS]) const {
    const float scale = 1.4426950408889634f * rsqrtf((float)HEAD_DIM);
    float best[HELD_TILES][2];
#pragma unroll
    for (int mt = 0; mt < HELD_TILES; ++mt) best[mt][0] = best[mt][1] = -INFINITE;
#pragma unroll
    for (int r = 0; r < KEY_ROUNDS; ++r) {
      const int tile = key_warp + K_WARPS * r;
#pragma unroll
      for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = tile * 8 + 2 * t + (i & 1), row = (row_warp + mt) * 16 + g + (i >> 1) * 8;
          const int token = first_own + key - work.prefix_keys;
          const bool seen = key < work.prefix_keys ? first + key < length
                                                   : key - work.prefix_keys < own && sees(row, token);
          s[r][mt][i] = seen ? s[r][mt][i] * scale : -INFINITE;
          best[mt][i >> 1] = fmaxf(best[mt][i >> 1], s[r][mt][i]);
        }
    }
#pragma unroll
    for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float one = quad_max(best[mt][half]);
        const int row = (row_warp + mt) * 16 + half * 8 + g;
        if (t == 0 && row < PADDED_ROWS) maxima[key_warp * PADDED_ROWS + row] = one;
      }
  }

  __device__ __forceinline__ float block_maximum(int row) const {
    float one = -INFINITE;
#pragma unroll
    for (int w = 0; w < K_WARPS; ++w) one = fmaxf(one, maxima[w * PADDED_ROWS + row]);
    return one;
  }

  // Stores the probabilities, and the warp's total of each row.
  __device__ __forceinline__ void store_probabilities(const Scores (&s)[KEY_ROUNDS]) const {
    const int p_pitch = keys + 8;
#pragma unroll
    for (int mt = 0; mt < HELD_TILES; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (row_warp + mt) * 16 + half * 8 + g;
        if (row >= PADDED_ROWS) continue;  // With three tiles of rows a fourth of the warps has none.
        float one = block_maximum(row), total = 0.f;
        // If every key of a block is masked, -inf - -inf would be NaN.
        one = one == -INFINITE ? 0.f : one;
#pragma unroll
        for (int r = 0; r < KEY_ROUNDS; ++r) {
          const int tile = key_warp + K_WARPS * r;
          const float p0 = exp2_fast(s[r][mt][half * 2] - one), p1 = exp2_fast(s[r][mt][half * 2 + 1] - one);
          total += p0 + p1;
          if (tile * 8 < keys) *(u32*)(p_of + row * p_pitch + tile * 8 + 2 * t) = pack_bf16x2(p0, p1);
        }
        total = quad_sum(total);
        if (t == 0) totals[key_warp * PADDED_ROWS + row] = total;
      }
    }
  }

  // Sends the block's maximum and total of each row to all blocks.
  __device__ __forceinline__ void send_statistics() const {
    if (threadIdx.x < TOKENS) {
      const float one = block_maximum(threadIdx.x);
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < K_WARPS; ++w) total += totals[w * PADDED_ROWS + threadIdx.x];
#pragma unroll
      for (int to = 0; to < RANKS; ++to)
        st_cluster_v2(mapa(smem_of(stats + (rank * PADDED_ROWS + threadIdx.x) * 2), to), one, total);
    }
    __syncwarp();
  }

  // Multiplies the probabilities with the warp's columns of the values.
  __device__ __forceinline__ void multiply_values(float (&o)[ROW_TILES][VALUE_TILES][4]) const {
    const int p_pitch = keys + 8;
    clear<ROW_TILES * VALUE_TILES * 4>((float*)o);
#pragma unroll 2
    for (int k = 0; k < keys; k += 16) {
      u32 b[VALUE_TILES / 2][4];
#pragma unroll
      for (int i = 0; i < VALUE_TILES / 2; ++i) {
        const int column = (at.warp * VALUE_TILES + i * 2 + (at.lane >> 4)) * 8;
        ldmatrix_x4_trans(b[i], smem_of(v_tile) + ((k + (at.lane & 15)) * PITCH + column) * 2);
      }
#pragma unroll
      for (int mt = 0; mt < ROW_TILES; ++mt) {
        u32 a[4];
        ldmatrix_x4(a, smem_of(p_of) + ((mt * 16 + (at.lane & 15)) * p_pitch + k + (at.lane >> 4) * 8) * 2);
#pragma unroll
        for (int i = 0; i < VALUE_TILES; ++i) mma(o[mt][i], a, b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
      }
    }
  }

  // Sends the parts, as lanes hold the sums: (RANKS, PARTS_EACH, 32) uint4. Warp w has the columns of block w.
  __device__ __forceinline__ void send_parts(const float (&o)[ROW_TILES][VALUE_TILES][4]) const {
    const u32 part_at = mapa(smem_of(shared_memory + (rank * PARTS_EACH * 32 + at.lane) * 16), at.warp);
#pragma unroll
    for (int i = 0; i < PARTS_EACH; ++i) {
      const int mt = i * TOGETHER / VALUE_TILES, tile = i * TOGETHER % VALUE_TILES;
      const float(&v)[4] = o[mt][tile], (&w)[4] = o[mt][tile + TOGETHER - 1];
      uint4 part =
          make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
      if (TOGETHER == 2)
        part = make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(w[0], w[1]),
                          pack_bf16x2(w[2], w[3]));
      st_cluster_v4(part_at + i * 512, part);
    }
  }

  // Combines the parts of all blocks: Σ 2^(max_i - max) o_i / Σ 2^(max_i - max) sum_i.
  __device__ __forceinline__ void combine() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < PARTS_EACH * 32; i += THREADS) {
      const int row = i / (VALUE_TILES / TOGETHER * 32) * 16 + g;
      const int column = i / 32 * TOGETHER % VALUE_TILES * 8 + 2 * t;
      float2 stat[2][RANKS];
      float one[2] = {-INFINITE, -INFINITE}, total[2] = {0.f, 0.f}, sum[TOGETHER][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int from = 0; from < RANKS; ++from) {
          stat[half][from] = *(const float2*)(stats + (from * PADDED_ROWS + row + half * 8) * 2);
          one[half] = fmaxf(one[half], stat[half][from].x);
        }
#pragma unroll
      for (int from = 0; from < RANKS; ++from) {
        const uint4 part = *(const uint4*)(shared_memory + (from * PARTS_EACH * 32 + i) * 16);
        const u32 words[4] = {part.x, part.y, part.z, part.w};
        const float first = exp2_fast(stat[0][from].x - one[0]), second = exp2_fast(stat[1][from].x - one[1]);
        total[0] += first * stat[0][from].y;
        total[1] += second * stat[1][from].y;
#pragma unroll
        for (int n = 0; n < 4 * TOGETHER; ++n) {
          const float value = TOGETHER == 1 ? __uint_as_float(words[n])
                              : n & 1       ? high_of(words[n / 2])
                                            : low_of(words[n / 2]);
          sum[n / 4][n % 4] += (n & 2 ? second : first) * value;
        }
      }
      const float inverse[2] = {1.f / total[0], 1.f / total[1]};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
          if (row + half * 8 < TOKENS) {
            const int to = head * HEAD_DIM + rank * Q_COLUMNS + column + n * 8;
            *(u32*)(c.context + place_of(row + half * 8, to, HEADS * HEAD_DIM)) =
                pack_bf16x2(sum[n][half * 2] * inverse[half], sum[n][half * 2 + 1] * inverse[half]);
          }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MANY_ROWS ? 1 : 2)
    attend(const __grid_constant__ Model m, const __grid_constant__ Call c, const __grid_constant__ AttendWork work,
           float eps, int step, int layer) {
  const u64 at = (u64)step * DEPTH + layer;
  const bool in_front = blockIdx.x < KV_BLOCKS;
  const int rank = blockIdx.x % RANKS, head = in_front ? 0 : (blockIdx.x - KV_BLOCKS) / RANKS;
  const HeadAttention attention{c, work, layer, head, head / GROUP, rank};
  if (in_front) {
    inject_delay(2);
  } else {
    attention.begin();
    if (!FEW_ROWS) {
      __syncthreads();
      attention.fetch_cache();
    }
    attention.clear_values(attention.cached, attention.keys);
  }
  // Both kinds of blocks run the same code, because instructions that are not in the cache cost more than branches.
  const Units units = in_front ? Units{HEADS * HEAD_DIM / 16 + (int)blockIdx.x, 1, 1}
                               : Units{(head * RANKS + rank) * Q_UNITS, 1, Q_UNITS};
  normed_pairs<Q_UNITS, ATTEND_BYTES>(
      c, layer_weights(m, layer), m.in_scale + at * WIDTH, units, eps, [] {},
      [&] {
        if (FEW_ROWS && !in_front) attention.fetch_cache();
      },
      [&](int unit, int row, int column) {
        return rotated_of(m, at, unit / (HEAD_DIM / 16), unit % (HEAD_DIM / 16) * 8 + column, c.lengths[0] + row);
      },
      [&](int unit, int row, int column, float a, float b, const Rotated& held) {
        const int owner = unit / (HEAD_DIM / 16), i = (unit % (HEAD_DIM / 16)) * 8 + column;
        held.apply(a, b, owner < HEADS + KV_HEADS);
        u16* out = attention.own_q + (unit % Q_UNITS * PADDED_ROWS + row) * 8 + column;
        if (in_front) {
          u16* const all = owner < HEADS + KV_HEADS ? c.ks : c.vs;
          out = all + ((u64)row * KV_HEADS + (owner - HEADS) % KV_HEADS) * HEAD_DIM + i;
          st_relaxed(out, round_bf16(a));
          st_relaxed(out + HEAD_DIM / 2, round_bf16(b));
          return;
        }
        out[0] = round_bf16(a);
        out[Q_UNITS * PADDED_ROWS * 8] = round_bf16(b);
      });
  if (in_front) return;
  __syncthreads();
  cluster_wait();  // The other blocks have started, so their memory may be written.
  attention.send_q();
  attention.kv_arrived.wait();
  // A block sends q after its product. A block that has all of q so knows that no block of the cluster reads weights
  // any more, which the parts replace. No block ends before the barrier after the parts, so before all of q has come
  // everywhere.
  attention.q_arrived.wait_cluster();
  const int length = c.lengths[0];
  HeadAttention::Scores s[KEY_ROUNDS];
  attention.score_all(s);
  attention.mask(length, s);
  // The scores come first, so that nothing waits for the length here.
  attention.clear_values(max(0, min(attention.cached, length - attention.first)), attention.cached);
  __syncthreads();
  attention.store_probabilities(s);
  __syncthreads();
  attention.send_statistics();
  float o[ROW_TILES][VALUE_TILES][4];
  attention.multiply_values(o);
  attention.send_parts(o);
  cluster_arrive();
  cluster_wait();
  attention.combine();
}
