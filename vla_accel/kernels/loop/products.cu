// Products of few rows with weights. This file follows core.cu.
//
// Eight warps a block share K, so activations go from L2 straight into the registers of the product that needs them,
// and the partial sums meet in shared memory. K is permuted alike in both operands of every product: lane t of a quad
// holds k = 8 t ... 8 t + 7 of a block of 32, which is one load of 16 bytes, where mma.m16n8k16 would have it hold four
// pairs. The sum over K does not depend on the order of its terms but for rounding.
//
// Weights lie in tiles of eight columns, a tile in blocks of 32 of K: four matrices of 8 x 16 bytes, of which the first
// has each lane's first pair and so on. ldmatrix reads them for few rows, wgmma for many, where four warps would
// otherwise fetch the same weights, and mma.sync would be slower.

// So many pairs of output tiles share one reduction as keep their sums in registers.
#define PAIRS (MT == 2 ? 2 : 4)
// With few rows all eight warps share K, and each has all rows. With many, four warps take a tile of rows each, and two
// share K, so that a warp has few sums.
#define ROW_WARPS (MT > 2 ? 4 : 1)
#define HELD_TILES (MT > 2 ? 1 : MT)
#define K_WARPS (WARPS / ROW_WARPS)
#define ROUNDS(K) (((K) / 32 + K_WARPS - 1) / K_WARPS)
// This is true where every warp has a block of 32 in round i. It is constant, so that no test remains at run time.
#define WHOLE(i, K) (K_WARPS * ((i) + 1) <= (K) / 32)
// A warp of a split product holds so many rounds of rows at once as leave registers for a second block on the
// multiprocessor: where rows are many, clusters need all places.
#define HELD (MT == 2 ? 4 : 8)
#define BATCHED(K) (ROUNDS(K) < HELD ? ROUNDS(K) : HELD)

// This loads block `kb` of 32 columns of the activations `base` (M, width), BF16 in the order of `place_of`.
__device__ __forceinline__ void load_rows(uint4 (&a)[HELD_TILES][2], const u16* base, int kb, int width, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3, first = warp % ROW_WARPS * 16;
#pragma unroll
  for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows beyond the last repeat it, so that the load needs no condition; nobody takes their sums.
      const int row = min(first + mt * 16 + half * 8 + g, M - 1);
      a[mt][half] = ld_cg_v4(base + place_of(row, t * 8, width) + kb * 512);
    }
}

__device__ __forceinline__ float squares_of(const uint4& v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = low_of(w[i]), b = high_of(w[i]);
    sum += a * a + b * b;
  }
  return sum;
}
// v (1 + s), rounded once. s is in BF16, whose error here is at most that of a rounding of the product.
__device__ __forceinline__ u32 scaled(u32 v, u32 s) {
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(product) : "r"(v), "r"(s));
  return product;
}
__device__ __forceinline__ uint4 scaled(const uint4& v, const uint4& s) {
  return make_uint4(scaled(v.x, s.x), scaled(v.y, s.y), scaled(v.z, s.z), scaled(v.w, s.w));
}
// Eight factors, in BF16.
__device__ __forceinline__ uint4 factors_of(const float* p) {
  const float4 a = ldg_v4(p), b = ldg_v4(p + 4);
  return make_uint4(pack_bf16x2(a.x, a.y), pack_bf16x2(a.z, a.w), pack_bf16x2(b.x, b.y), pack_bf16x2(b.z, b.w));
}

// This multiplies rows in registers with COUNT rounds of a chunk, from round `first` on: TILES tiles of columns,
// `pitch` bytes apart.
template <int KCHUNK, int TILES, int COUNT>
__device__ __forceinline__ void multiply(u32 data, u32 pitch, float (&acc)[TILES][HELD_TILES][4], const uint4 (&a)[COUNT][HELD_TILES][2],
                                         int first, int warp, int lane) {
#if MT > 2
  // A descriptor counts in 16 bytes: address | 128 << 16 (next matrix along K) | pitch << 32 (next tile). In a cluster
  // the upper bits of an address are the block's rank, which does not belong here.
  const u64 matrix = (u64)(128 >> 4) << 16 | (u64)(pitch >> 4) << 32;
  float(&sums)[TILES * 4] = (float(&)[TILES * 4])acc;
  wgmma_fence();
#endif
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int kb = warp / ROW_WARPS + K_WARPS * (first + i);
    if (WHOLE(first + i, KCHUNK) || kb < KCHUNK / 32) {
#if MT > 2
      const u64 b = matrix | (data + kb * 512 & 0x3ffff) >> 4;
      const uint4 &lo = a[i][0][0], &hi = a[i][0][1];
      wgmma(sums, lo.x, hi.x, lo.y, hi.y, b, 1);
      wgmma(sums, lo.z, hi.z, lo.w, hi.w, b + (256 >> 4), 1);
#else
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        u32 w[4];
        ldmatrix_x4(w, data + tile * pitch + kb * 512 + lane * 16);
#pragma unroll
        for (int mt = 0; mt < HELD_TILES; ++mt) mma32(acc[tile][mt], a[i][mt][0], a[i][mt][1], make_uint4(w[0], w[1], w[2], w[3]));
      }
#endif
    }
  }
#if MT > 2
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(sums);
#endif
}

template <int N>
__device__ __forceinline__ void put_sums(float* sums, const float* acc, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[(warp * N + i) * 32 + lane] = acc[i];
}
// A place says where element e of a reduction lies, over tiles of 16 rows and 8 columns: at `row` and `column` of
// `tile`, in accumulator `r` of lane `from`, in the warps of `row_warp`.
struct Place {
  int tile, row, column, row_warp, r, from;
  __device__ __forceinline__ explicit Place(int e)
      : tile(e / (MT * 128)), row((e / 128) % MT * 16 + ((e & 31) >> 2) + 8 * ((e >> 6) & 1)),
        column((e & 3) * 2 + ((e >> 5) & 1)), row_warp(e / 128 % MT % ROW_WARPS),
        r((e / 128) % MT / ROW_WARPS * 4 + ((e >> 5) & 3)), from(e & 31) {}
};

// This sums, over the warps that share K, what belongs at `at` in a tile of columns; every warp put N accumulators.
template <int N>
__device__ __forceinline__ float sum_of_warps(const float* sums, int tile, const Place& at) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < K_WARPS; ++w)
    sum += sums[((w * ROW_WARPS + at.row_warp) * N + tile * HELD_TILES * 4 + at.r) * 32 + at.from];
  return sum;
}

// This is `sum_of_warps` of four neighbours, from one place on.
template <int N>
__device__ __forceinline__ uint4 sums_of_warps(const float* sums, int tile, const Place& at) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < K_WARPS; ++w) {
    const float4 one = *(const float4*)(sums + ((w * ROW_WARPS + at.row_warp) * N + tile * HELD_TILES * 4 + at.r) * 32 + at.from);
    sum.x += one.x;
    sum.y += one.y;
    sum.z += one.z;
    sum.w += one.w;
  }
  return *(const uint4*)&sum;
}

// A block has `count` units, `stride` apart.
struct Units {
  int first, stride, count;
  __device__ __forceinline__ int at(int i) const { return first + i * stride; }
  // All blocks take units in turn: block b has b, b + blocks, ...
  static __device__ __forceinline__ Units dealt(int all) {
    const int block = blockIdx.x, blocks = gridDim.x;
    return {block, blocks, (all - block + blocks - 1) / blocks};
  }
};

// The weights of COUNT units, and after each reduction, from unit `done` on, its sums in their place; the last of them
// may need more, and what comes after the product takes LEAST bytes.
template <int COUNT, int LEAST = 0>
struct Room {
  static constexpr int TOGETHER = COUNT < PAIRS ? COUNT : PAIRS, N = TOGETHER * 2 * HELD_TILES * 4;
  static constexpr int LAST = (COUNT - 1) / TOGETHER * TOGETHER * STAGE_BYTES + WARPS * N * 128;
  static constexpr int OWN = LAST > COUNT * STAGE_BYTES ? LAST : COUNT * STAGE_BYTES;
  static constexpr int BYTES = LEAST > OWN ? LEAST : OWN;
};

// rstd ∘ ((x ∘ (1 + scale)) Wᵀ) of pairs of tiles. `emit(unit, row, column, first, second, held)` gets both tiles'
// elements; `hold(unit, row, column)` fetches, before the wait, the constants that emit needs.
// IN_BATCHES: of many rows a warp holds DEPTH batches of AT_ONCE rounds, and multiplies each as it comes; the factors lie
// in shared memory. The block then takes half of a multiprocessor's registers, and leaves the other half to another.
// The barriers lie behind LEAST bytes, which the caller may use afterwards.
template <int COUNT, bool IN_BATCHES = false, int LEAST = 0, class Dealt, class Hold, class Emit>
__device__ __forceinline__ void normed_pairs(unsigned char* shared, const Call& c, const unsigned char* weights,
                                             const float* scale, const Dealt& units, float eps, Hold hold, Emit emit) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, mine = units.count;
  constexpr int TOGETHER = Room<COUNT>::TOGETHER, N = Room<COUNT>::N, EACH = (TOGETHER * MT * 128 + THREADS - 1) / THREADS;
  constexpr int AT_ONCE = 2, DEPTH = 3, BATCHES = ROUNDS(W) / AT_ONCE, LOADED = IN_BATCHES ? DEPTH * AT_ONCE : ROUNDS(W);
  constexpr int WEIGHTS = Room<COUNT, LEAST>::BYTES, BEHIND = WEIGHTS + (IN_BATCHES ? 2 * W : 0);
  static_assert(!IN_BATCHES || (MT > 2 && COUNT == TOGETHER && BATCHES >= DEPTH && W % (32 * K_WARPS * AT_ONCE) == 0));
  uint4* factors = (uint4*)(shared + WEIGHTS);
  Stages stages(shared, smem_of(shared + BEHIND), COUNT);  // A block has at most COUNT units.
  float* squares_at = (float*)(shared + BEHIND + COUNT * 8);
  float* rstd_at = squares_at + WARPS * 16 * HELD_TILES;
  if (threadIdx.x == 0)
    for (int i = 0; i < mine; ++i)
      stages.fetch(i, weights + (u64)units.at(i) * (32 * W), 32 * W);
  griddepcontrol_launch_dependents();
  if (IN_BATCHES && ADAPTIVE && threadIdx.x < W / 8) factors[threadIdx.x] = factors_of(scale + threadIdx.x * 8);
  uint4 a[LOADED][HELD_TILES][2];
  uint4 factor[ROUNDS(W)];
#pragma unroll
  for (int i = 0; i < ROUNDS(W); ++i) {
    const int kb = warp / ROW_WARPS + K_WARPS * i;
    if (ADAPTIVE && MT <= 2 && (WHOLE(i, W) || kb < W / 32)) factor[i] = factors_of(scale + kb * 32 + (lane & 3) * 8);
  }
  decltype(hold(0, 0, 0)) held[EACH];
  const auto fetch_held = [&](int first) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const Place at(threadIdx.x + n * THREADS);
      held[n] = hold(units.at(min(first + at.tile, mine - 1)), min(at.row, M - 1), at.column);
    }
  };
  fetch_held(0);
  __syncthreads();
  griddepcontrol_wait();
  float squares[HELD_TILES][2] = {};
#pragma unroll
  for (int i = 0; i < LOADED; ++i) {
    const int kb = warp / ROW_WARPS + K_WARPS * i;
    if (WHOLE(i, W) || kb < W / 32) load_rows(a[i], c.xb, kb, W, warp, lane);
  }
  const auto scale_rows = [&](uint4(&rows)[HELD_TILES][2], const uint4& by) {
#pragma unroll
    for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        squares[mt][half] += squares_of(rows[mt][half]);
        if (ADAPTIVE) rows[mt][half] = scaled(rows[mt][half], by);
      }
  };
  const auto put_squares = [&] {
#pragma unroll
    for (int mt = 0; mt < HELD_TILES; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = squares[mt][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if ((lane & 3) == 0) squares_at[(warp * HELD_TILES + mt) * 16 + half * 8 + (lane >> 2)] = sum;
      }
  };
#pragma unroll
  for (int i = 0; !IN_BATCHES && i < ROUNDS(W); ++i) {
    const int kb = warp / ROW_WARPS + K_WARPS * i;
    if (ADAPTIVE && MT > 2 && (WHOLE(i, W) || kb < W / 32)) factor[i] = factors_of(scale + kb * 32 + (lane & 3) * 8);
    if (WHOLE(i, W) || kb < W / 32) scale_rows(a[i], factor[i]);
  }
  if (!IN_BATCHES) put_squares();
  for (int done = 0; done < mine; done += TOGETHER) {
    float acc[TOGETHER][2][HELD_TILES][4];
#pragma unroll
    for (int i = 0; i < N; ++i) ((float*)acc)[i] = 0.f;
    if (done) fetch_held(done);
    // The sums take the place of the weights that made them.
    float* sums = (float*)(shared + done * STAGE_BYTES);
#if MT > 2
    // One wgmma takes all tiles; nobody takes the sums of a unit that is not there.
    for (int j = 0; j < TOGETHER && done + j < mine; ++j) stages.take();
    float(&tiles)[2 * TOGETHER][HELD_TILES][4] = (float(&)[2 * TOGETHER][HELD_TILES][4])acc;
    if constexpr (IN_BATCHES) {
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        const int from = warp / ROW_WARPS + K_WARPS * batch * AT_ONCE;
        auto& rows = (uint4(&)[AT_ONCE][HELD_TILES][2])a[batch % DEPTH * AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) scale_rows(rows[i], factors[(from + K_WARPS * i) * 4 + (lane & 3)]);
        multiply<W, 2 * TOGETHER, AT_ONCE>(smem_of(sums), TILE_BYTES, tiles, rows, batch * AT_ONCE, warp, lane);
#pragma unroll
        for (int i = 0; batch + DEPTH < BATCHES && i < AT_ONCE; ++i)
          load_rows(rows[i], c.xb, from + K_WARPS * (DEPTH * AT_ONCE + i), W, warp, lane);
      }
      put_squares();
    } else {
      multiply<W, 2 * TOGETHER, LOADED>(smem_of(sums), TILE_BYTES, tiles, a, 0, warp, lane);
    }
#else
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j)
      if (done + j < mine) multiply<W, 2, ROUNDS(W)>(stages.take(), TILE_BYTES, acc[j], a, 0, warp, lane);
#endif
    __syncthreads();
    put_sums<N>(sums, (float*)acc, warp, lane);
    if (done == 0 && threadIdx.x < 16 * MT) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < K_WARPS; ++w) sum += squares_at[w * ROW_WARPS * HELD_TILES * 16 + threadIdx.x];
      rstd_at[threadIdx.x] = rsqrtf(sum / NORMED + eps);
    }
    __syncthreads();
    // The compiler would compute so many addresses before the product that they do not fit in half of the registers.
    int thread = threadIdx.x;
    if (IN_BATCHES) asm volatile("" : "+r"(thread));
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const Place at(thread + n * THREADS);
      if (at.tile < TOGETHER && done + at.tile < mine && at.row < M) {
        const float rstd = rstd_at[at.row];
        emit(units.at(done + at.tile), at.row, at.column, rstd * sum_of_warps<N>(sums, at.tile * 2, at),
             rstd * sum_of_warps<N>(sums, at.tile * 2 + 1, at), held[n]);
      }
    }
  }
}

// A cluster of PARTS blocks shares PARTS tiles of columns: each block takes a part of K, which spares the others its
// activations, and finishes one tile. Weights are packed for PACKED parts of K, which many rows divide further: by
// PACKED tiles, then part of K, then tile. `emit(row, column, sum, held, present)`: `hold(column)` fetches a constant
// before the wait, `late(row, column)` fetches, after it, what others wrote.
template <int K, int PARTS, int PACKED, class Hold, class Late, class Emit>
__device__ __forceinline__ void split_product(const u16* rows, const unsigned char* weights, Hold hold, Late late,
                                              Emit emit) {
  constexpr int PART = K / PARTS, IN_CHUNK = PART > CHUNK ? CHUNK : PART, CHUNKS = PART / IN_CHUNK, N = PARTS * HELD_TILES * 4;
  constexpr int RATIO = PARTS / PACKED;
  static_assert(PARTS % PACKED == 0 && (RATIO == 1 || CHUNKS == 1), "a part of K lies in one packed chunk");
  constexpr u32 TILE = 16 * IN_CHUNK, CHUNK_BYTES = PARTS * TILE;
  constexpr u32 LEAST = WARPS * N * 128, ROOM = CHUNKS * CHUNK_BYTES > LEAST ? CHUNKS * CHUNK_BYTES : LEAST;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x % PARTS, first = blockIdx.x / PARTS * PARTS;
  float* parts = (float*)(shared_memory + ROOM);  // (PARTS, MT, 128): every block's part of this tile
  // A barrier for each chunk, and the last for all that the blocks send to this one.
  Stages stages(shared_memory, smem_of(parts + PARTS * MT * 128), CHUNKS + 1);
  const u32 sums_barrier = stages.barriers + CHUNKS * 8;
  if (threadIdx.x == 0) {
    if (PARTS > 1) stages.expect(CHUNKS, PARTS * MT * 512);
    for (int i = 0; i < CHUNKS; ++i) {
      stages.expect(i, PARTS * TILE);
      for (int tile = 0; tile < PARTS; ++tile) {
        const int packed = (first + tile) / PACKED * PACKED + rank / RATIO, in_chunk = (first + tile) % PACKED * RATIO + rank % RATIO;
        stages.copy(i, i * CHUNK_BYTES + tile * TILE,
                    weights + (u64)(packed * CHUNKS + i) * (PACKED * RATIO * TILE) + in_chunk * TILE, TILE);
      }
    }
  }
  griddepcontrol_launch_dependents();
  if (PARTS > 1) cluster_arrive_relaxed();
  const int column = (first + rank) * 8 + (threadIdx.x & 3) * 2 + ((threadIdx.x >> 5) & 1);
  const float held = hold(column);
  __syncthreads();
  if (PARTS > 1) cluster_wait();  // The other blocks have started, so their memory may be written.
  griddepcontrol_wait();
  constexpr int EACH = (MT * 128 + THREADS - 1) / THREADS;
  float present[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    present[n] = late(min(Place(threadIdx.x + n * THREADS).row, M - 1), column);
  float acc[PARTS][HELD_TILES][4];
#pragma unroll
  for (int i = 0; i < N; ++i) ((float*)acc)[i] = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    constexpr int AT_ONCE = BATCHED(IN_CHUNK);
#pragma unroll
    for (int round = 0; round < ROUNDS(IN_CHUNK); round += AT_ONCE) {
      uint4 a[AT_ONCE][HELD_TILES][2];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int kb = warp / ROW_WARPS + K_WARPS * (round + i);
        if (WHOLE(round + i, IN_CHUNK) || kb < IN_CHUNK / 32) load_rows(a[i], rows, (rank * PART + chunk * IN_CHUNK) / 32 + kb, K, warp, lane);
      }
      if (round == 0) mbarrier_wait(stages.barriers + chunk * 8, 0);
      multiply<IN_CHUNK, PARTS, AT_ONCE>(smem_of(shared_memory) + chunk * CHUNK_BYTES, TILE, acc, a, round, warp, lane);
    }
  }
  __syncthreads();
  // The warps' sums take the place of the weights.
  float* sums = (float*)shared_memory;
  put_sums<N>(sums, (float*)acc, warp, lane);
  __syncthreads();
  if constexpr (PARTS > 1) {
    for (int e = threadIdx.x * 4; e < PARTS * MT * 128; e += THREADS * 4) {
      const Place at(e);
      const uint4 sum = sums_of_warps<N>(sums, at.tile, at);
      st_async(mapa(smem_of(parts + rank * MT * 128 + e % (MT * 128)), at.tile), mapa(sums_barrier, at.tile), sum.x, sum.y, sum.z, sum.w);
    }
    mbarrier_wait_cluster(sums_barrier, 0);
  }
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int e = threadIdx.x + n * THREADS;
    const Place at(e);
    if (at.tile == 0 && at.row < M) {
      float sum = PARTS > 1 ? 0.f : sum_of_warps<N>(sums, 0, at);
#pragma unroll
      for (int from = 0; PARTS > 1 && from < PARTS; ++from) sum += parts[from * MT * 128 + e];
      emit(at.row, column, sum, held, present[n]);
    }
  }
}
