// Products of few rows with weights. This file follows core.cu.
//
// Eight warps a block share K, so activations go from L2 straight into the registers of the product that needs them,
// and the partial sums meet in shared memory. K is permuted alike in both operands of every product: lane t of a quad
// holds k = 8 t ... 8 t + 7 of a block of 32, which is one load of 16 bytes, where mma.m16n8k16 would have it hold four
// pairs. Except for rounding, the sum over K does not depend on the order of its terms.
//
// Weights are stored in tiles of eight columns, a tile in blocks of 32 of K: four matrices of 8 x 16 bytes, of which
// the first has each lane's first pair and so on. ldmatrix reads them for few rows, wgmma for many, where four warps
// would otherwise fetch the same weights, and mma.sync would be slower.
//
// With few rows all eight warps share K, and each has all rows. With more than 32, four warps take a tile of rows each
// (ROW_WARPS), and two share K (K_WARPS), so that a warp has few sums.

#define MANY_ROWS (ROW_TILES > 2)
#define ROUNDS(K) (((K) / 32 + K_WARPS - 1) / K_WARPS)
// Whether every warp has a block of 32 in round i: a constant, so that no test remains at run time.
#define WHOLE(i, K) (K_WARPS * ((i) + 1) <= (K) / 32)
// A thread of gate and up, and one of a split product, so that a block of either fits next to one of the other.
#define GATE_UP_REGISTERS (MANY_ROWS ? 160 : 128)
#define SPLIT_REGISTERS (256 - GATE_UP_REGISTERS)
// A warp of a split product holds at most so many rounds of rows at once, in equal batches.
#define HELD_ROUNDS (MANY_ROWS ? 5 : ROW_TILES == 2 ? 4 : 8)
#define DIVIDE_UP(x, n) (((x) + (n)-1) / (n))
#define BATCHED(K) DIVIDE_UP(ROUNDS(K), DIVIDE_UP(ROUNDS(K), HELD_ROUNDS))
#define EACH_OF(TILES) (((TILES) * ROW_TILES * 128 + THREADS - 1) / THREADS)

// The rows of a warp in a block of 32 columns.
typedef uint4 Rows[HELD_TILES][2];

struct Lane {
  int warp, lane;
  __device__ __forceinline__ Lane() : warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {}
  // The block of 32 columns that the warp takes in a round.
  __device__ __forceinline__ int block(int round) const { return warp / ROW_WARPS + K_WARPS * round; }
};

// Loads block `kb` of 32 columns of the activations `base` (ROWS, width), BF16 in the order of `place_of`.
__device__ __forceinline__ void load_rows(Rows& a, const u16* base, int kb, int width, const Lane& at) {
  const int g = at.lane >> 2, t = at.lane & 3, first = at.warp % ROW_WARPS * 16;
#pragma unroll
  for (int tile = 0; tile < HELD_TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows beyond the last repeat it, so that the load needs no condition. Their sums are not used.
      const int row = min(first + tile * 16 + half * 8 + g, ROWS - 1);
      a[tile][half] = ld_cg_v4(base + place_of(row, t * 8, width) + kb * 512);
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
// Eight factors in BF16.
__device__ __forceinline__ uint4 factors_of(const float* p) {
  const float4 a = ldg_v4(p), b = ldg_v4(p + 4);
  return make_uint4(pack_bf16x2(a.x, a.y), pack_bf16x2(a.z, a.w), pack_bf16x2(b.x, b.y), pack_bf16x2(b.z, b.w));
}

// Multiplies rows in registers with COUNT rounds of a chunk, from round `first` on: TILES tiles of columns, `pitch`
// bytes apart.
template <int KCHUNK, int TILES, int COUNT>
__device__ __forceinline__ void multiply(u32 data, u32 pitch, float (&acc)[TILES][HELD_TILES][4],
                                         const Rows (&a)[COUNT], int first, const Lane& at) {
#if MANY_ROWS
  // A descriptor counts in 16 bytes: address | 128 << 16 (next matrix along K) | pitch << 32 (next tile). In a cluster
  // the upper bits of an address are the rank of the block, which does not belong here.
  const u64 matrix = (u64)(128 >> 4) << 16 | (u64)(pitch >> 4) << 32;
  float(&sums)[TILES * 4] = (float(&)[TILES * 4])acc;
  wgmma_fence();
#endif
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int kb = at.block(first + i);
    if (WHOLE(first + i, KCHUNK) || kb < KCHUNK / 32) {
#if MANY_ROWS
      const u64 b = matrix | (data + kb * 512 & 0x3ffff) >> 4;
      const uint4 &lo = a[i][0][0], &hi = a[i][0][1];
      wgmma(sums, lo.x, hi.x, lo.y, hi.y, b, 1);
      wgmma(sums, lo.z, hi.z, lo.w, hi.w, b + (256 >> 4), 1);
#else
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        u32 w[4];
        ldmatrix_x4(w, data + tile * pitch + kb * 512 + at.lane * 16);
#pragma unroll
        for (int held = 0; held < HELD_TILES; ++held)
          mma32(acc[tile][held], a[i][held][0], a[i][held][1], make_uint4(w[0], w[1], w[2], w[3]));
      }
#endif
    }
  }
#if MANY_ROWS
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(sums);
#endif
}

// -- reductions ------------------------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void put_sums(float* sums, const float* acc, const Lane& at) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[(at.warp * N + i) * 32 + at.lane] = acc[i];
}
// Where element e of a reduction is stored, over tiles of 16 rows and 8 columns: at `row` and `column` of `tile`, in
// accumulator `r` of lane `from`, in the warps of `row_warp`.
struct Place {
  int tile, row, column, row_warp, r, from;
  __device__ __forceinline__ explicit Place(int e)
      : tile(e / (ROW_TILES * 128)), row((e / 128) % ROW_TILES * 16 + ((e & 31) >> 2) + 8 * ((e >> 6) & 1)),
        column((e & 3) * 2 + ((e >> 5) & 1)), row_warp(e / 128 % ROW_TILES % ROW_WARPS),
        r((e / 128) % ROW_TILES / ROW_WARPS * 4 + ((e >> 5) & 3)), from(e & 31) {}
  // Its index in the sums of the k-th warp that shares K, in a tile of columns. Every warp put N accumulators.
  template <int N>
  __device__ __forceinline__ int index(int k, int column_tile) const {
    return ((k * ROW_WARPS + row_warp) * N + column_tile * HELD_TILES * 4 + r) * 32 + from;
  }
};

// Sums one element, in a tile of columns, over the warps that share K.
template <int N>
__device__ __forceinline__ float sum_of_warps(const float* sums, int tile, const Place& at) {
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < K_WARPS; ++k) sum += sums[at.index<N>(k, tile)];
  return sum;
}

// `sum_of_warps` of four neighbours, from one element on.
template <int N>
__device__ __forceinline__ uint4 sums_of_warps(const float* sums, int tile, const Place& at) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int k = 0; k < K_WARPS; ++k) {
    const float4 one = *(const float4*)(sums + at.index<N>(k, tile));
    sum.x += one.x;
    sum.y += one.y;
    sum.z += one.z;
    sum.w += one.w;
  }
  return *(const uint4*)&sum;
}

// -- products after a norm -------------------------------------------------------------------------------------------

// The units of a block: `count`, `stride` apart.
struct Units {
  int first, stride, count;
  __device__ __forceinline__ int at(int i) const { return first + i * stride; }
  // All blocks take units in turn: block b has b, b + blocks, ...
  static __device__ __forceinline__ Units dealt(int all) {
    const int block = blockIdx.x, blocks = gridDim.x;
    return {block, blocks, (all - block + blocks - 1) / blocks};
  }
};

// The rows of a product of COUNT units after a norm. A warp holds all its rows, or, IN_BATCHES, IN_FLIGHT batches of
// AT_ONCE rounds, and multiplies each as it comes; the factors are then in shared memory. The block so leaves registers
// to another block.
template <int COUNT, bool IN_BATCHES>
struct NormedRows {
  static constexpr int AT_ONCE = 2, IN_FLIGHT = 5, BATCHES = ROUNDS(WIDTH) / AT_ONCE;
  static constexpr int LOADED = IN_BATCHES ? IN_FLIGHT * AT_ONCE : ROUNDS(WIDTH);
  static constexpr int TOGETHER = COUNT < PAIRS ? COUNT : PAIRS, N = TOGETHER * 2 * HELD_TILES * 4;
  static_assert(!IN_BATCHES || (MANY_ROWS && COUNT == TOGETHER && BATCHES >= IN_FLIGHT &&
                                WIDTH % (32 * K_WARPS * AT_ONCE) == 0));
  Lane lane;
  const u16* base;
  uint4* factors;     // (WIDTH / 8), IN_BATCHES
  float* squares_at;  // (WARPS, HELD_TILES, 16)
  Rows a[LOADED];
  uint4 factor[ROUNDS(WIDTH)];
  float squares[HELD_TILES][2];

  // Before the wait, loads the factors of the norm that fit in shared memory next to the rows.
  __device__ __forceinline__ void load_factors(const float* scale) {
    if (IN_BATCHES && ADAPTIVE && threadIdx.x < WIDTH / 8) factors[threadIdx.x] = factors_of(scale + threadIdx.x * 8);
    if (!MANY_ROWS) load_own_factors(scale);
  }
  __device__ __forceinline__ void load_own_factors(const float* scale) {
#pragma unroll
    for (int i = 0; ADAPTIVE && i < ROUNDS(WIDTH); ++i) {
      const int kb = lane.block(i);
      if (WHOLE(i, WIDTH) || kb < WIDTH / 32) factor[i] = factors_of(scale + kb * 32 + (lane.lane & 3) * 8);
    }
  }
  __device__ __forceinline__ void load() {
    clear<HELD_TILES * 2>((float*)squares);
#pragma unroll
    for (int i = 0; i < LOADED; ++i) {
      const int kb = lane.block(i);
      if (WHOLE(i, WIDTH) || kb < WIDTH / 32) load_rows(a[i], base, kb, WIDTH, lane);
    }
  }
  __device__ __forceinline__ void scale_round(Rows& rows, const uint4& by) {
#pragma unroll
    for (int tile = 0; tile < HELD_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        squares[tile][half] += squares_of(rows[tile][half]);
        if (ADAPTIVE) rows[tile][half] = scaled(rows[tile][half], by);
      }
  }
  __device__ __forceinline__ void scale_all(const float* scale) {
    if (MANY_ROWS) load_own_factors(scale);
#pragma unroll
    for (int i = 0; i < LOADED; ++i)
      if (WHOLE(i, WIDTH) || lane.block(i) < WIDTH / 32) scale_round(a[i], factor[i]);
  }
  __device__ __forceinline__ void put_squares() {
#pragma unroll
    for (int tile = 0; tile < HELD_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(squares[tile][half]);
        if ((lane.lane & 3) == 0)
          squares_at[(lane.warp * HELD_TILES + tile) * 16 + half * 8 + (lane.lane >> 2)] = sum;
      }
  }
  // Multiplies TOGETHER units at `data`. One wgmma takes all tiles; the sums of a unit that is not there are not used.
  __device__ __forceinline__ void multiply_batches(u32 data, float (&acc)[2 * TOGETHER][HELD_TILES][4]) {
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
      auto& rows = (Rows(&)[AT_ONCE])a[batch % IN_FLIGHT * AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        scale_round(rows[i], factors[lane.block(batch * AT_ONCE + i) * 4 + (lane.lane & 3)]);
      multiply<WIDTH, 2 * TOGETHER, AT_ONCE>(data, TILE_BYTES, acc, rows, batch * AT_ONCE, lane);
#pragma unroll
      for (int i = 0; batch + IN_FLIGHT < BATCHES && i < AT_ONCE; ++i)
        load_rows(rows[i], base, lane.block((batch + IN_FLIGHT) * AT_ONCE + i), WIDTH, lane);
    }
    put_squares();
  }
  __device__ __forceinline__ void multiply_units(Stages& stages, u32 data, int count,
                                                 float (&acc)[2 * TOGETHER][HELD_TILES][4]) {
    if constexpr (MANY_ROWS) {
      for (int j = 0; j < TOGETHER && j < count; ++j) stages.take();
      if constexpr (IN_BATCHES)
        multiply_batches(data, acc);
      else
        multiply<WIDTH, 2 * TOGETHER, LOADED>(data, TILE_BYTES, acc, a, 0, lane);
    } else {
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        if (j < count)
          multiply<WIDTH, 2, ROUNDS(WIDTH)>(stages.take(), TILE_BYTES, (float(&)[2][HELD_TILES][4])acc[2 * j], a, 0,
                                            lane);
    }
  }
};

// rstd ∘ ((x ∘ (1 + scale)) Wᵀ) of pairs of tiles. `emit(unit, row, column, first, second, held)` gets the elements of
// both tiles; `hold(unit, row, column)` fetches, before the kernel waits, the constants that `emit` needs. BYTES: of
// the weights and of the sums that replace them; the barriers follow. The caller may use these bytes afterwards.
// `before()` is called before the kernel waits, after its own copies have started; `then()` when the loads of the rows
// have been issued.
template <int COUNT, int BYTES, bool IN_BATCHES = false, class Dealt, class Before, class Then, class Hold, class Emit>
__device__ __forceinline__ void normed_pairs(const Call& c, const unsigned char* weights, const float* scale,
                                             const Dealt& units, float eps, Before before, Then then,
                                             Hold hold, Emit emit) {
  typedef NormedRows<COUNT, IN_BATCHES> Normed;
  constexpr int TOGETHER = Normed::TOGETHER, N = Normed::N, EACH = EACH_OF(TOGETHER);
  constexpr int BARRIERS = BYTES + (IN_BATCHES ? 2 * WIDTH : 0), UNIT_BYTES = 16 * 2 * WIDTH;
  const int mine = units.count;
  Stages stages(shared_memory, smem_of(shared_memory + BARRIERS), COUNT);  // A block has at most COUNT units.
  float* const squares_at = (float*)(shared_memory + BARRIERS + COUNT * 8);
  float* const rstd_at = squares_at + WARPS * 16 * HELD_TILES;
  Normed rows{Lane(), c.xb, (uint4*)(shared_memory + BYTES), squares_at};
  if (threadIdx.x == 0)
    for (int i = 0; i < mine; ++i) stages.fetch(i, weights + (u64)units.at(i) * UNIT_BYTES, UNIT_BYTES);
  griddepcontrol_launch_dependents();
  rows.load_factors(scale);
  decltype(hold(0, 0, 0)) held[EACH];
  const auto fetch_held = [&](int first) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const Place at(threadIdx.x + n * THREADS);
      held[n] = hold(units.at(min(first + at.tile, mine - 1)), min(at.row, ROWS - 1), at.column);
    }
  };
  fetch_held(0);
  __syncthreads();
  before();
  griddepcontrol_wait();
  rows.load();
  then();
  if (!IN_BATCHES) {
    rows.scale_all(scale);
    rows.put_squares();
  }
  for (int done = 0; done < mine; done += TOGETHER) {
    float acc[2 * TOGETHER][HELD_TILES][4];
    clear<N>((float*)acc);
    if (done) fetch_held(done);
    // The sums replace the weights that made them.
    float* sums = (float*)(shared_memory + done * STAGE_BYTES);
    rows.multiply_units(stages, smem_of(sums), mine - done, acc);
    __syncthreads();
    put_sums<N>(sums, (float*)acc, rows.lane);
    if (done == 0 && threadIdx.x < 16 * ROW_TILES) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < K_WARPS; ++k) sum += squares_at[k * ROW_WARPS * HELD_TILES * 16 + threadIdx.x];
      rstd_at[threadIdx.x] = rsqrtf(sum / MODEL_WIDTH + eps);
    }
    __syncthreads();
    // Otherwise the compiler computes more addresses before the product than half of the registers hold.
    int thread = threadIdx.x;
    if (IN_BATCHES) asm volatile("" : "+r"(thread));
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const Place at(thread + n * THREADS);
      if (at.tile < TOGETHER && done + at.tile < mine && at.row < ROWS) {
        const float rstd = rstd_at[at.row];
        emit(units.at(done + at.tile), at.row, at.column, rstd * sum_of_warps<N>(sums, at.tile * 2, at),
             rstd * sum_of_warps<N>(sums, at.tile * 2 + 1, at), held[n]);
      }
    }
  }
}

// -- products into the residual stream -------------------------------------------------------------------------------

// A product whose K a cluster of PARTS blocks shares, for PARTS tiles of columns: each block takes a part of K, which
// saves the others its activations, and finishes one tile. Weights are packed for PACKED parts of K, which many rows
// divide further: by PACKED tiles, then part of K, then tile. BYTES: of the weights and of the sums that replace them.
template <int K, int PARTS, int PACKED, int BYTES>
struct SplitProduct {
  static constexpr int PART = K / PARTS, IN_CHUNK = PART > CHUNK ? CHUNK : PART, CHUNKS = PART / IN_CHUNK;
  static constexpr int RATIO = PARTS / PACKED, N = PARTS * HELD_TILES * 4;
  static constexpr u32 TILE = 16 * IN_CHUNK, CHUNK_BYTES = PARTS * TILE;
  static_assert(PARTS % PACKED == 0 && (RATIO == 1 || CHUNKS == 1), "a part of K is in one packed chunk");
  Lane lane;
  const int rank = blockIdx.x % PARTS, first = blockIdx.x / PARTS * PARTS;
  float* const parts = (float*)(shared_memory + BYTES);  // (PARTS, ROW_TILES, 128): this tile's part of each block
  // A barrier for each chunk, and the last for what the blocks send to this one.
  Stages stages{shared_memory, smem_of(parts + PARTS * ROW_TILES * 128), CHUNKS + 1};

  // Thread 0 fetches the weights.
  __device__ __forceinline__ void fetch(const unsigned char* weights) {
    if (PARTS > 1) sent().expect(PARTS * ROW_TILES * 512);
    for (int i = 0; i < CHUNKS; ++i) {
      const Barrier chunk = stages.barrier(i);
      chunk.expect(PARTS * TILE);
      for (int tile = 0; tile < PARTS; ++tile) {
        const int packed = (first + tile) / PACKED * PACKED + rank / RATIO;
        const int in_chunk = (first + tile) % PACKED * RATIO + rank % RATIO;
        chunk.copy(smem_of(shared_memory + i * CHUNK_BYTES + tile * TILE),
                   weights + (u64)(packed * CHUNKS + i) * (PACKED * RATIO * TILE) + in_chunk * TILE, TILE);
      }
    }
  }
  __device__ __forceinline__ Barrier sent() const { return stages.barrier(CHUNKS); }

  // Multiplies the block's part of K of `rows`.
  __device__ __forceinline__ void multiply_part(const u16* rows, float (&acc)[PARTS][HELD_TILES][4]) {
    constexpr int AT_ONCE = BATCHED(IN_CHUNK);
    clear<N>((float*)acc);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (int round = 0; round < ROUNDS(IN_CHUNK); round += AT_ONCE) {
        Rows a[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int kb = lane.block(round + i);
          if (WHOLE(round + i, IN_CHUNK) || kb < IN_CHUNK / 32)
            load_rows(a[i], rows, (rank * PART + chunk * IN_CHUNK) / 32 + kb, K, lane);
        }
        if (round == 0) stages.barrier(chunk).wait();
        multiply<IN_CHUNK, PARTS, AT_ONCE>(smem_of(shared_memory) + chunk * CHUNK_BYTES, TILE, acc, a, round, lane);
      }
  }
  // Sends the sums of each tile to the block that finishes it, and waits for those of this block's tile.
  __device__ __forceinline__ void exchange(const float* sums) {
    for (int e = threadIdx.x * 4; e < PARTS * ROW_TILES * 128; e += THREADS * 4) {
      const Place at(e);
      const uint4 sum = sums_of_warps<N>(sums, at.tile, at);
      st_async(mapa(smem_of(parts + rank * ROW_TILES * 128 + e % (ROW_TILES * 128)), at.tile),
               mapa(sent().address, at.tile), sum.x, sum.y, sum.z, sum.w);
    }
    sent().wait_cluster();
  }
};

// A split product. `emit(row, column, sum, held, present)`: `hold(column)` fetches a constant before the kernel waits,
// `late(row, column)` fetches, after it, what others wrote. `before()`: as in `normed_pairs`.
template <int K, int PARTS, int PACKED, int BYTES, class Before, class Hold, class Late, class Emit>
__device__ __forceinline__ void split_product(const u16* rows, const unsigned char* weights, Before before, Hold hold,
                                              Late late, Emit emit) {
  constexpr int N = SplitProduct<K, PARTS, PACKED, BYTES>::N, EACH = EACH_OF(1);
  SplitProduct<K, PARTS, PACKED, BYTES> product;
  if (threadIdx.x == 0) product.fetch(weights);
  griddepcontrol_launch_dependents();
  if (PARTS > 1) cluster_arrive_relaxed();
  const int column = (product.first + product.rank) * 8 + (threadIdx.x & 3) * 2 + ((threadIdx.x >> 5) & 1);
  const float held = hold(column);
  __syncthreads();
  if (PARTS > 1) cluster_wait();  // The other blocks have started, so their memory may be written.
  before();
  griddepcontrol_wait();
  float present[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n) present[n] = late(min(Place(threadIdx.x + n * THREADS).row, ROWS - 1), column);
  float acc[PARTS][HELD_TILES][4];
  product.multiply_part(rows, acc);
  __syncthreads();
  // The sums of the warps replace the weights.
  float* sums = (float*)shared_memory;
  put_sums<N>(sums, (float*)acc, product.lane);
  __syncthreads();
  if constexpr (PARTS > 1) product.exchange(sums);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int e = threadIdx.x + n * THREADS;
    const Place at(e);
    if (at.tile == 0 && at.row < ROWS) {
      float sum = PARTS > 1 ? 0.f : sum_of_warps<N>(sums, 0, at);
#pragma unroll
      for (int from = 0; PARTS > 1 && from < PARTS; ++from) sum += product.parts[from * ROW_TILES * 128 + e];
      emit(at.row, column, sum, held, present[n]);
    }
  }
}
