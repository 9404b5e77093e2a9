// This kernel is q/k/v and attention of one sequence. The file follows products.cu, whose products it uses.
//
// A cluster of eight blocks owns a query head: each block makes an eighth of the head's q and sends it to the other
// seven, then attends to an eighth of the prefix's keys and to an eighth of the suffix's own; the parts of the result,
// unnormalised, go to the block that owns their columns. Nothing but the context goes through global memory. KV_UNITS
// blocks in front make the suffix's keys and values; the others ask for them before the prefix's scores, and then again
// until they are there.
//
// The eight blocks of a cluster and the blocks in front wait for each other, so they must be resident together: the
// host that launches this makes sure that the whole grid fits on the chip.

#define Q_UNITS (D / 16 / RANKS)
#define Q_COLUMNS (D / RANKS)
#define KV_UNITS (2 * KV * D / 16)
#define ROWS (16 * MT)

// A block has `prefix_each` keys of the prefix, then `suffix_each` of the suffix; both are multiples of eight.
extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    attend(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer, int prefix_each,
           int suffix_each) {
  const u64 at = (u64)step * L + layer;
  constexpr int VT = D / 64;  // A warp has so many tiles of eight value columns.
  static_assert(D % 128 == 0 && WARPS == RANKS, "a warp's columns of the result belong to one block");
  static_assert(Room<Q_UNITS>::BYTES == Q_UNITS * STAGE_BYTES, "sums fit in the place of the weights");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const bool in_front = blockIdx.x < KV_UNITS;
  const int rank = blockIdx.x % RANKS, head = in_front ? 0 : (blockIdx.x - KV_UNITS) / RANKS, kv = head / GROUP;
  const int keys_each = prefix_each + suffix_each, keys = ROUND_UP(keys_each, 16);
  const int first = rank * prefix_each, cached = max(0, min(prefix_each, c.s - first));
  const int first_own = rank * suffix_each, own = max(0, min(suffix_each, T - first_own));  // These count tokens.
  unsigned char* const k_tile = shared_memory + ROUND_UP(Q_UNITS * (STAGE_BYTES + 8) + 4 * (WARPS * HELD_TILES * 16 + ROWS), 16);
  unsigned char* const v_tile = k_tile + keys_each * PITCH * 2;
  unsigned char* const q_tile = v_tile + keys * PITCH * 2;
  u16* const p_of = (u16*)q_tile;  // The probabilities take the place of q.
  float* const maxima = (float*)(q_tile + ROWS * PITCH * 2);
  float* const totals = maxima + WARPS * ROWS;
  float* const stats = totals + WARPS * ROWS;         // (RANKS, ROWS, 2): max and sum, from every block
  // q lies by eight columns, so that rows which are read together follow each other: (2, D / 16, ROWS, 8), of which a block
  // makes (2, Q_UNITS, ROWS, 8).
  u16* const own_q = (u16*)(stats + RANKS * ROWS * 2);
  constexpr int EIGHT = ROWS * 16;
  const u32 kv_barrier = smem_of(own_q + ROWS * Q_COLUMNS), q_barrier = kv_barrier + 8;
  // The parts are (RANKS, MT, VT, 32, 4), as lanes hold the sums, and take the place of the weights. Where rows are many
  // and their exchange takes time, they are in BF16, of two tiles together.
  constexpr int TOGETHER = MT > 2 ? 2 : 1;
  unsigned char* const parts = shared_memory;
  if (in_front) {
    inject_delay(2);
  } else {
    if (threadIdx.x == 0) {
      mbarrier_init(kv_barrier, 1);
      mbarrier_init(q_barrier, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(kv_barrier, cached * D * 4);
      mbarrier_arrive_expect_tx(q_barrier, T * D * 2);
    }
    cluster_arrive_relaxed();  // The others use q_barrier, which the fence shows them.
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * cached; i += THREADS) {
      const int key = i >> 1;
      const u64 from = ((((u64)layer * c.s) + first + key) * KV + kv) * D;
      bulk_load(smem_of((i & 1 ? v_tile : k_tile) + key * PITCH * 2), (i & 1 ? c.values : c.keys) + from, D * 2, kv_barrier);
    }
    // Values beyond the prefix's become zero: their probability is zero, and 0 × NaN is NaN. The suffix's are loaded
    // later.
#pragma unroll 1
    for (int i = threadIdx.x; i < (keys - cached) * (D / 8); i += THREADS)
      *(uint4*)(v_tile + (cached + i / (D / 8)) * PITCH * 2 + i % (D / 8) * 16) = make_uint4(0, 0, 0, 0);
  }
  // Both kinds of blocks run the same code, because instructions that are not in the cache cost more than branches.
  const Units units = in_front ? Units{H * D / 16 + (int)blockIdx.x, 1, 1}
                               : Units{(head * RANKS + rank) * Q_UNITS, 1, Q_UNITS};
  normed_pairs<Q_UNITS>(
      shared_memory, c, m.weights + m.layer_at + layer * m.layer_bytes, m.in_scale + at * W, units, eps,
      [&](int unit, int row, int column) {
        return rotated_of(m, at, unit / (D / 16), unit % (D / 16) * 8 + column, c.lengths[0] + row);
      },
      [&](int unit, int row, int column, float a, float b, const Rotated& held) {
        const int owner = unit / (D / 16), i = (unit % (D / 16)) * 8 + column;
        held.apply(a, b, owner < H + KV);
        u16* out = own_q + (unit % Q_UNITS * ROWS + row) * 8 + column;
        int apart = Q_UNITS * ROWS * 8;
        if (in_front) {
          out = (owner < H + KV ? c.ks + ((u64)row * KV + owner - H) * D : c.vs + ((u64)row * KV + owner - H - KV) * D) + i;
          apart = D / 2;
        }
        if (in_front) {
          st_relaxed(out, round_bf16(a));
          st_relaxed(out + apart, round_bf16(b));
          return;
        }
        out[0] = round_bf16(a);
        out[apart] = round_bf16(b);
      });
  if (in_front) return;
  __syncthreads();
  cluster_wait();  // The other blocks have started, so their memory may be written.
  // A warp sends to one block.
  const u32 their_q = mapa(smem_of(q_tile) + rank * Q_UNITS * EIGHT, warp), their_barrier = mapa(q_barrier, warp);
#pragma unroll 1
  for (int part = lane; part < T * Q_UNITS * 2; part += 32) {
    const int eight = part / T, row = part % T, to = eight / Q_UNITS * (D / 16) + eight % Q_UNITS;
    const uint4 v = *(const uint4*)(own_q + (eight * ROWS + row) * 8);
    st_async(their_q + to * EIGHT + row * 16, their_barrier, v.x, v.y, v.z, v.w);
  }
  mbarrier_wait(kv_barrier, 0);
  // A block sends q behind its product. Who has all of q so knows that no block of the cluster reads weights any more,
  // whose place the parts take. None ends before the barrier behind the parts, so before all of q has come everywhere.
  mbarrier_wait_cluster(q_barrier, 0);
  // Scores: warp w takes tiles w / ROW_WARPS + K_WARPS i of eight keys, against its rows. The suffix's keys come last.
  const float scale = 1.4426950408889634f * rsqrtf((float)D);
  const int length = c.lengths[0];
  const int row_warp = warp % ROW_WARPS, key_warp = warp / ROW_WARPS;
  float s[KEY_ROUNDS][HELD_TILES][4], best[HELD_TILES][2];
#pragma unroll
  for (int i = 0; i < KEY_ROUNDS * HELD_TILES * 4; ++i) ((float*)s)[i] = 0.f;
#pragma unroll
  for (int mt = 0; mt < HELD_TILES; ++mt) best[mt][0] = best[mt][1] = -INFINITE;
  // With three tiles of rows a fourth of the warps multiplies the last once more, and nobody takes its scores.
  const u32 q_at = smem_of(q_tile) + (min(row_warp * 16, ROWS - 16) + (lane & 15)) * 16 + (lane >> 4) * EIGHT;
  // A warp with many tiles of keys keeps q in registers.
  constexpr bool KEEP = KEY_ROUNDS > 2 && HELD_TILES == 1;
  constexpr int UNROLL = KEEP ? D / 32 : 2;
  u32 q[KEEP ? D / 16 : 1][4];
#pragma unroll
  for (int i = 0; KEEP && i < D / 16; ++i) ldmatrix_x4(q[i], q_at + i * 2 * EIGHT);
  const auto score = [&](int tile, float(&sum)[HELD_TILES][4]) {
    const u32 k_at = smem_of(k_tile) + ((tile * 8 + (lane & 7)) * PITCH + (lane >> 3) * 8) * 2;
    float other[HELD_TILES][4];  // A second chain of sums halves the latency.
#pragma unroll
    for (int i = 0; i < HELD_TILES * 4; ++i) ((float*)other)[i] = 0.f;
#pragma unroll UNROLL
    for (int i = 0; i < D / 32; ++i) {
      u32 b[4];
      ldmatrix_x4(b, k_at + i * 64);
#pragma unroll
      for (int mt = 0; mt < HELD_TILES; ++mt) {
        u32 first_half[4], second_half[4];
        if (!KEEP) {
          ldmatrix_x4(first_half, q_at + mt * 256 + i * 4 * EIGHT);
          ldmatrix_x4(second_half, q_at + mt * 256 + (i * 4 + 2) * EIGHT);
        }
        const u32(&a)[4] = KEEP ? q[KEEP ? 2 * i : 0] : first_half;
        const u32(&c)[4] = KEEP ? q[KEEP ? 2 * i + 1 : 0] : second_half;
        mma_m16n8k16(sum[mt], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_m16n8k16(other[mt], c[0], c[1], c[2], c[3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < HELD_TILES * 4; ++i) ((float*)sum)[i] += ((float*)other)[i];
  };
  // A thread has eight columns of one of the suffix's keys.
  static_assert(ROUND_UP((T + RANKS - 1) / RANKS, 8) * (D / 8) <= THREADS, "a thread has no more of the suffix");
  const int own_key = threadIdx.x / (D / 8), own_column = threadIdx.x % (D / 8) * 8;
  const u64 own_from = ((u64)(first_own + own_key) * KV + kv) * D + own_column;
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
        const int to = ((prefix_each + own_key) * PITCH + own_column) * 2;
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
      if (tile * 8 < keys_each && tile * 8 >= prefix_each == suffix) score(tile, s[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < KEY_ROUNDS; ++r) {
    const int tile = key_warp + K_WARPS * r;
#pragma unroll
    for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * 8 + 2 * t + (i & 1), row = (row_warp + mt) * 16 + g + (i >> 1) * 8;
        const int token = first_own + key - prefix_each;
        const bool seen = key < prefix_each ? first + key < length
                                            : key - prefix_each < own && sees(row, token);
        s[r][mt][i] = seen ? s[r][mt][i] * scale : -INFINITE;
        best[mt][i >> 1] = fmaxf(best[mt][i >> 1], s[r][mt][i]);
      }
  }
#pragma unroll
  for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float one = best[mt][half];
      one = fmaxf(one, __shfl_xor_sync(~0u, one, 1));
      one = fmaxf(one, __shfl_xor_sync(~0u, one, 2));
      const int row = (row_warp + mt) * 16 + half * 8 + g;
      if (t == 0 && row < ROWS) maxima[key_warp * ROWS + row] = one;
    }
  // A value of the prefix behind the length has probability zero, but may be NaN, and 0 × NaN is NaN. The scores
  // come first, so that nothing waits for the length here.
  const int seen_rows = max(0, min(cached, length - first));
#pragma unroll 1
  for (int i = threadIdx.x; i < (cached - seen_rows) * (D / 8); i += THREADS)
    *(uint4*)(v_tile + (seen_rows + i / (D / 8)) * PITCH * 2 + i % (D / 8) * 16) = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int p_pitch = keys + 8;
#pragma unroll
  for (int mt = 0; mt < HELD_TILES; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (row_warp + mt) * 16 + half * 8 + g;
      float one = -INFINITE, total = 0.f;
      // With three tiles of rows a fourth of the warps has none.
      if (row >= ROWS) continue;
#pragma unroll
      for (int w = 0; w < K_WARPS; ++w) one = fmaxf(one, maxima[w * ROWS + row]);
      // Where every key of a block is masked, -inf - -inf would be NaN.
      one = one == -INFINITE ? 0.f : one;
#pragma unroll
      for (int r = 0; r < KEY_ROUNDS; ++r) {
        const int tile = key_warp + K_WARPS * r;
        const float p0 = exp2_fast(s[r][mt][half * 2] - one), p1 = exp2_fast(s[r][mt][half * 2 + 1] - one);
        total += p0 + p1;
        if (tile * 8 < keys) *(u32*)(p_of + row * p_pitch + tile * 8 + 2 * t) = pack_bf16x2(p0, p1);
      }
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (t == 0) totals[key_warp * ROWS + row] = total;
    }
  }
  __syncthreads();
  if (threadIdx.x < T) {
    float one = -INFINITE, total = 0.f;
#pragma unroll
    for (int w = 0; w < K_WARPS; ++w) {
      one = fmaxf(one, maxima[w * ROWS + threadIdx.x]);
      total += totals[w * ROWS + threadIdx.x];
    }
#pragma unroll
    for (int to = 0; to < RANKS; ++to)
      st_cluster_v2(mapa(smem_of(stats + (rank * ROWS + threadIdx.x) * 2), to), one, total);
  }
  __syncwarp();
  float o[MT][VT][4];
#pragma unroll
  for (int i = 0; i < MT * VT * 4; ++i) ((float*)o)[i] = 0.f;
#pragma unroll 2
  for (int k = 0; k < keys; k += 16) {
    u32 b[VT / 2][4];
#pragma unroll
    for (int i = 0; i < VT / 2; ++i)
      ldmatrix_x4_trans(b[i], smem_of(v_tile) + ((k + (lane & 15)) * PITCH + (warp * VT + i * 2 + (lane >> 4)) * 8) * 2);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      u32 a[4];
      ldmatrix_x4(a, smem_of(p_of) + ((mt * 16 + (lane & 15)) * p_pitch + k + (lane >> 4) * 8) * 2);
#pragma unroll
      for (int i = 0; i < VT; ++i) mma_m16n8k16(o[mt][i], a[0], a[1], a[2], a[3], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
    }
  }
  // Warp w computes the columns that block w of the cluster owns.
  const u32 part_at = mapa(smem_of(parts + (rank * MT * VT / TOGETHER * 32 + lane) * 16), warp);
#pragma unroll
  for (int i = 0; i < MT * VT / TOGETHER; ++i) {
    const int mt = i * TOGETHER / VT, tile = i * TOGETHER % VT;
    const float(&v)[4] = o[mt][tile], (&w)[4] = o[mt][tile + TOGETHER - 1];
    uint4 part = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    if (TOGETHER == 2)
      part = make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(w[0], w[1]), pack_bf16x2(w[2], w[3]));
    st_cluster_v4(part_at + i * 512, part);
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int i = threadIdx.x; i < MT * VT / TOGETHER * 32; i += THREADS) {
    const int row = i / (VT / TOGETHER * 32) * 16 + g, column = i / 32 * TOGETHER % VT * 8 + 2 * t;
    float2 stat[2][RANKS];
    float one[2] = {-INFINITE, -INFINITE}, total[2] = {0.f, 0.f}, sum[TOGETHER][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int from = 0; from < RANKS; ++from) {
        stat[half][from] = *(const float2*)(stats + (from * ROWS + row + half * 8) * 2);
        one[half] = fmaxf(one[half], stat[half][from].x);
      }
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      const uint4 part = *(const uint4*)(parts + (from * MT * VT / TOGETHER * 32 + i) * 16);
      const u32 words[4] = {part.x, part.y, part.z, part.w};
      const float first = exp2_fast(stat[0][from].x - one[0]), second = exp2_fast(stat[1][from].x - one[1]);
      total[0] += first * stat[0][from].y;
      total[1] += second * stat[1][from].y;
#pragma unroll
      for (int n = 0; n < 4 * TOGETHER; ++n) {
        const float value = TOGETHER == 1 ? __uint_as_float(words[n]) : n & 1 ? high_of(words[n / 2]) : low_of(words[n / 2]);
        sum[n / 4][n % 4] += (n & 2 ? second : first) * value;
      }
    }
    const float inverse[2] = {1.f / total[0], 1.f / total[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n)
        if (row + half * 8 < T)
          *(u32*)(c.context + place_of(row + half * 8, head * D + rank * Q_COLUMNS + column + n * 8, H * D)) =
              pack_bf16x2(sum[n][half * 2] * inverse[half], sum[n][half * 2 + 1] * inverse[half]);
  }
}
