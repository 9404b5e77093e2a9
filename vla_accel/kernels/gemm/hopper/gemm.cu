// GEMM of many rows on Hopper: out = epilogue(scale * x Wᵀ + bias), x (M, K), W (N, K), FP8, BF16 or FP16; or x in BF16
// and W in FP8 or INT8. This file follows epilogue.cu and, with WIDEN, widen.cu.
//
// The weights are the tensor cores' M (blocks of 64 rows), the tokens their N (any multiple of 8), so that 544 tokens
// are exactly 4 x 136. One thread fetches tiles of both by TMA into a ring of stages; its four warps give their
// registers to GROUPS warpgroups that multiply with wgmma, each BLOCKS blocks of 64 weight rows by PARTS times WIDTH
// tokens. Blocks of a cluster share what they fetch: ACROSS blocks take the same tokens, ALONG the
// same weights, and SPLIT share K and add up their sums through distributed shared memory.
//
// Launched with programmatic dependence a kernel fetches its first WEIGHTS while its predecessor still runs, and only
// then waits. This is safe because each kernel of a chain executes griddepcontrol.wait before it reads or writes
// anything but constants. The wait returns when the predecessor has finished and its writes are visible; the
// predecessor waited as well, so all kernels before it have finished, too. So a kernel that has started early cannot
// overwrite what an older one still reads. Every kernel of a chain must execute the wait, whether it needs its
// predecessor's data or not. Here the fetching thread waits, and the others write only after tokens have arrived that
// it fetched.
//
// Macros: KIND (of tokens: 0 BF16, 1 FP16, 2 FP8 e4m3), WIDEN (0: weights have the tokens' kind; 1 E4M3, 2 INT8), NARROW (FP8 out; else BF16, or FP16 for KIND 1), ACTIVATION (a code of
// `activation.py`; GeGLU and SwiGLU take weight rows in turns, eight of gate, eight of up), GROUPS, BLOCKS, PARTS, WIDTH,
// STAGES, ACROSS, ALONG, SPLIT, STAGING, EXCHANGE and BARRIERS (where in shared memory the output is staged, others' sums
// arrive and the barriers are), LIMIT, FETCHING and MULTIPLYING (registers a thread: at the start, then of either
// kind), W_ROWS and T_ROWS (rows of weights and of tokens that a block fetches). WGMMA, one product of WIDTH tokens, is
// generated (`wgmma.py`).

// `count` blocks fetch a tile for each other, W_ROWS or T_ROWS rows each. This is the first row of block i's share. Where
// the shares are more than the tile, they overlap and write the same rows twice.
__device__ __forceinline__ int share_start(int rows, int share, int count, int i) {
  return i * (rows - share) / (count > 1 ? count - 1 : 1) / 8 * 8;
}
constexpr int ARRIVING = W_ROWS * ALONG * W_BYTES + T_ROWS * ACROSS * 128;
// One copy brings so many rows: a box has at most 256.
constexpr int W_BOX = W_ROWS > 256 ? W_ROWS / 2 : W_ROWS, T_BOX = T_ROWS > 256 ? T_ROWS / 2 : T_ROWS;
constexpr int CHUNK = KIND == 2 ? 128 : 64;  // Columns of K in a stage.
constexpr int EIGHTS = (PARTS * WIDTH / 8 + SPLIT - 1) / SPLIT;  // With SPLIT a block finishes so many times 8 tokens.

using Sums = float[BLOCKS][PARTS][WIDTH / 2];

// This arrives at another block's barrier with the release of this block only: the others read nothing that it wrote,
// and a release to the cluster would cost a memory barrier for each stage.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 rank) {
  if constexpr (CLUSTER > 1)
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
  else
    mbarrier_arrive(barrier);
}

__device__ __forceinline__ void tma_load_5d(u32 to, const TensorMap& map, int x, int eights, int group, u32 barrier,
                                            u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(&map), "r"(x), "r"(0), "r"(eights), "r"(group),
      "r"(barrier), "l"(policy) : "memory");
}

// Operands have swizzled rows of 128 bytes, so groups of eight rows are 1024 bytes apart.
__device__ __forceinline__ u64 operand(u32 address) { return wgmma_descriptor(address, 16, 1024, true); }

// What a block computes: its place in the cluster, and the chunks of K and the tiles that it takes.
struct Block {
  int across, along, part, first, last, tile, step;

  __device__ __forceinline__ explicit Block(const Call& c) {
    const int rank = blockIdx.x % CLUSTER, per_part = (c.chunks + SPLIT - 1) / SPLIT;
    across = rank % ACROSS, along = rank / ACROSS % ALONG, part = rank / (ACROSS * ALONG);
    first = part * per_part, last = min(first + per_part, c.chunks);
    tile = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  }
  __device__ __forceinline__ int rank_of(int across_, int along_, int part_) const {
    return across_ + ACROSS * (along_ + ALONG * part_);
  }
  // The first weight row and token of a tile.
  __device__ __forceinline__ int row(int tile, const Call& c) const {
    return (tile / c.token_tiles * ACROSS + across) * TILE_W;
  }
  __device__ __forceinline__ int token(int tile, const Call& c) const {
    return (tile % c.token_tiles * ALONG + along) * TILE_T;
  }
};

// The stages of operands in shared memory, with a barrier each for "it has arrived" and "it may be overwritten". A
// count of chunks says which stage comes next, and in which phase its barriers are.
struct Ring {
  u32 base, full, empty, norms;

  __device__ __forceinline__ explicit Ring(unsigned char* memory) {
    base = (smem_of(memory) + 1023) & ~1023u;
    full = base + BARRIERS, empty = full + STAGES * 8, norms = empty + STAGES * 8;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, 4 * GROUPS * (ACROSS + ALONG - 1));
    }
    fence_mbarrier_init();
  }
  __device__ __forceinline__ u32 weights(int stage) const { return base + stage * STAGE; }
  __device__ __forceinline__ u32 tokens(int stage) const { return base + stage * STAGE + TILE_W * W_BYTES; }
  __device__ __forceinline__ void wait_full(int count) const {
    mbarrier_wait(full + count % STAGES * 8, (count / STAGES) & 1);
  }
  __device__ __forceinline__ void wait_empty(int count) const {
    if (count >= STAGES) mbarrier_wait(empty + count % STAGES * 8, (count / STAGES - 1) & 1);
  }
  __device__ __forceinline__ void expect(int stage) const { mbarrier_arrive_expect_tx(full + stage * 8, ARRIVING); }
  // Arrives at the barriers of all blocks that send to this stage: those of the same row and column of the cluster.
  // This block is in both and arrives once.
  __device__ __forceinline__ void release(int count, const Block& b) const {
    const int lane = threadIdx.x & 31;
    if (lane < ACROSS + ALONG - 1) {
      const int other = lane - ACROSS;
      const int to = lane < ACROSS ? b.rank_of(lane, b.along, b.part)
                                   : b.rank_of(b.across, other + (other >= b.along), b.part);
      mbarrier_arrive_remote(empty + count % STAGES * 8, to);
    }
  }
};

// -- the thread that fetches ------------------------------------------------------------------------------------------

struct Fetch {
  const TensorMap &weights, &tokens;
  const Ring& ring;
  const Block& b;
  const Call& c;
  u64 once, often;
  u16 same_weights, same_tokens;  // Masks of the blocks that share an operand.

  __device__ __forceinline__ Fetch(const TensorMap& weights, const TensorMap& tokens, const Ring& ring, const Block& b,
                                   const Call& c)
      : weights(weights), tokens(tokens), ring(ring), b(b), c(c), once(policy_evict_first()),
        often(policy_evict_last()), same_weights(0), same_tokens(0) {
    if (ALONG > 1)
      for (int i = 0; i < ALONG; ++i) same_weights |= 1 << b.rank_of(b.across, i, b.part);
    if (ACROSS > 1)
      for (int i = 0; i < ACROSS; ++i) same_tokens |= 1 << b.rank_of(i, b.along, b.part);
  }
  __device__ __forceinline__ void weight_tile(int tile, int chunk, int stage) const {
    const int begin = share_start(TILE_W, W_ROWS, ALONG, b.along), row = b.row(tile, c) + begin;
    const u32 to = ring.weights(stage) + begin * W_BYTES, barrier = ring.full + stage * 8;
    if constexpr (PAIRS) {
      tma_load_5d(to, weights, chunk * CHUNK, row % (2 * c.half) / 16, row / (2 * c.half), barrier, once);
    } else {
#pragma unroll
      for (int i = 0; i < W_ROWS; i += W_BOX)
        tma_load_2d(to + i * W_BYTES, weights, chunk * CHUNK, row + i, barrier, same_weights, once);
    }
  }
  __device__ __forceinline__ void token_tile(int tile, int chunk, int stage) const {
    const int begin = share_start(TILE_T, T_ROWS, ACROSS, b.across), row = b.token(tile, c) + begin;
    const u32 to = ring.tokens(stage) + begin * 128;
#pragma unroll
    for (int i = 0; i < T_ROWS; i += T_BOX)
      tma_load_2d(to + i * 128, tokens, chunk * CHUNK, row + i, ring.full + stage * 8, same_tokens, often);
  }
  // This fetches all tiles of the block, the first stages of weights before the wait for the previous kernel.
  __device__ __forceinline__ void run() const {
    const int early = min(STAGES, b.last - b.first);
    for (int i = 0; i < early; ++i) {
      ring.expect(i);
      weight_tile(b.tile, b.first + i, i);
    }
    griddepcontrol_wait();
    for (int i = 0; i < early; ++i) token_tile(b.tile, b.first + i, i);
    int count = early, begin = b.first + early;
    for (int tile = b.tile; tile < c.tiles; tile += b.step) {
      for (int chunk = begin; chunk < b.last; ++chunk, ++count) {
        const int stage = count % STAGES;
        ring.wait_empty(count);
        ring.expect(stage);
        weight_tile(tile, chunk, stage);
        token_tile(tile, chunk, stage);
      }
      begin = b.first;
    }
  }
};

// -- the groups that multiply -----------------------------------------------------------------------------------------

// This multiplies a tile's chunks, the last of which is still under way.
#if WIDEN
__device__ __forceinline__ void multiply(Sums& sums, int& count, int group, const Ring& ring, const Block& b) {
  u32 a[4][BLOCKS][4];
  for (int chunk = b.first; chunk < b.last; ++chunk, ++count) {
    ring.wait_full(count);
    const u32 w = ring.weights(count % STAGES) + group * BLOCKS * WIDEN_BLOCK, t = ring.tokens(count % STAGES);
    Pairs pairs[BLOCKS];
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) load_pairs(pairs[m], w + m * WIDEN_BLOCK);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_wait<3>();  // The products that read a[k] last are done: four steps, each a group, take turns.
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m) widen_operand(a[k][m], pairs[m] + 4 * k);
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
        for (int n = 0; n < PARTS; ++n)
          WGMMA(sums[m][n], a[k][m][0], a[k][m][1], a[k][m][2], a[k][m][3], operand(t + n * WIDTH * 128 + k * 32),
                chunk > b.first || k > 0);
      wgmma_commit();
    }
    if (chunk > b.first) ring.release(count - 1, b);
  }
}
#else
__device__ __forceinline__ void multiply(Sums& sums, int& count, int group, const Ring& ring, const Block& b) {
  for (int chunk = b.first; chunk < b.last; ++chunk, ++count) {
    ring.wait_full(count);
    const u32 w = ring.weights(count % STAGES) + group * BLOCKS * 64 * 128, t = ring.tokens(count % STAGES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
        for (int n = 0; n < PARTS; ++n)
          WGMMA(sums[m][n], operand(w + m * 64 * 128 + k * 32), operand(t + n * WIDTH * 128 + k * 32),
                chunk > b.first || k > 0);
    wgmma_commit();
    if (chunk > b.first) {
      wgmma_wait<1>();
      ring.release(count - 1, b);
    }
  }
}
#endif

// This ends a tile that a block computes alone.
__device__ __forceinline__ void finish_tile(Sums& sums, int count, int tile, int group, const Ring& ring,
                                            const Block& b, const Call& c) {
  const int row = b.row(tile, c) + group * BLOCKS * 64, token = b.token(tile, c);
  uint4 held[RESIDUAL ? BLOCKS : 1][RESIDUAL ? PARTS : 1][(WIDTH / 8 + 1) / 2];
  if constexpr (RESIDUAL) {
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
      for (int n = 0; n < PARTS; ++n)
        load_residual<WIDTH / 8>(held[m][n], token + n * WIDTH, c.rows, row + m * 64, c);
  }
  wgmma_wait<0>();
  ring.release(count - 1, b);
  wait_for_norms();
  // Without a place of its own the staging overwrites stages that other groups may still read.
  if constexpr (STAGING == 0) bar_sync<CONSUMERS>(CONSUMERS_BARRIER);
  const u32 staging = ring.base + STAGING + group * WIDTH * PITCH;
#pragma unroll
  for (int m = 0; m < BLOCKS; ++m) {
    const int column = (row + m * 64) / (64 / COLUMNS);
    const Rows rows = load_rows(c, column);
#pragma unroll
    for (int n = 0; n < PARTS; ++n)
      store_tile<WIDTH / 8>(sums[m][n], staging, token + n * WIDTH, c.rows, column, group,
                            RESIDUAL ? held[m][n] : nullptr, ring.norms + n * WIDTH * 8, rows, c);
  }
}

// Each block of a SPLIT cluster finishes EIGHTS times eight tokens: this sends the others' sums to them, and keeps its
// own in `total`.
__device__ __forceinline__ void exchange(float (&total)[BLOCKS][EIGHTS * 4], const Sums& sums, const Ring& ring,
                                         const Block& b) {
  constexpr int ALL = PARTS * WIDTH / 8, PER = WIDTH / 8;
#pragma unroll
  for (int q = 0; q < SPLIT; ++q) {
    const u32 there = mapa(ring.base + EXCHANGE + threadIdx.x * 16, b.rank_of(b.across, b.along, q));
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i)
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m) {
        const int e = q * EIGHTS + i;
        if (e >= ALL) continue;
        const float* v = sums[m][e / PER] + e % PER * 4;
        if (q == b.part) {
#pragma unroll
          for (int j = 0; j < 4; ++j) total[m][i * 4 + j] = v[j];
        } else {
          const u32 to = there + (((b.part - (b.part > q)) * EIGHTS + i) * BLOCKS + m) * CONSUMERS * 16;
          st_cluster_f4(to, v[0], v[1], v[2], v[3]);
        }
      }
  }
}

// This ends a tile whose K a cluster shares: each block adds up the parts of K for its share of the tokens.
__device__ __forceinline__ void finish_share(Sums& sums, int count, int group, const Ring& ring, const Block& b,
                                             const Call& c) {
  wgmma_wait<0>();
  ring.release(count - 1, b);
  wait_for_norms();
  const int row = b.row(b.tile, c) + group * BLOCKS * 64, begin = b.token(b.tile, c);
  const int token = begin + b.part * EIGHTS * 8, end = min(c.rows, begin + TILE_T);
  if constexpr (EXCHANGE == 0) cluster_arrive();
  uint4 held[RESIDUAL ? BLOCKS : 1][(EIGHTS + 1) / 2];
  if constexpr (RESIDUAL) {
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) load_residual<EIGHTS>(held[m], token, end, row + m * 64, c);
  }
  if constexpr (EXCHANGE == 0) cluster_wait();  // Now no block reads the stages any more, which the sums overwrite.
  float total[BLOCKS][EIGHTS * 4];
  exchange(total, sums, ring, b);
  cluster_arrive();
  cluster_wait();
  const u32 staging = ring.base + STAGING + group * EIGHTS * 8 * PITCH;
#pragma unroll
  for (int m = 0; m < BLOCKS; ++m) {
    const int column = (row + m * 64) / (64 / COLUMNS);
    const Rows rows = load_rows(c, column);
#pragma unroll
    for (int q = 0; q < SPLIT - 1; ++q)
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i) {
        const float4 four = ld_shared_f4(ring.base + EXCHANGE + threadIdx.x * 16 +
                                         ((q * EIGHTS + i) * BLOCKS + m) * CONSUMERS * 16);
        const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) total[m][i * 4 + j] += v[j];
      }
    store_tile<EIGHTS>(total[m], staging, token, end, column, group, RESIDUAL ? held[m] : nullptr,
                       ring.norms + b.part * EIGHTS * 64, rows, c);
  }
}

// Prefetches a share of a later product's weights to the L2 cache.
__device__ __forceinline__ void prefetch_weight(const Call& c) {
  constexpr int PIECE = 8192;
  for (int at = blockIdx.x * PIECE; at < c.prefetch_bytes; at += gridDim.x * PIECE)
    bulk_prefetch(c.prefetch + at, min(PIECE, c.prefetch_bytes - at));
}

// -- the kernel -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __maxnreg__(LIMIT)
    gemm(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, const Call c) {
  extern __shared__ unsigned char memory[];
  const Ring ring(memory);
  const Block b(c);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x == CONSUMERS) {
    ring.init();
    prefetch_tensormap(weights);
    prefetch_tensormap(tokens);
  }
  griddepcontrol_launch_dependents();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (warp >= CONSUMERS / 32) {
    setmaxnreg_dec<FETCHING>();
    if (threadIdx.x == CONSUMERS) Fetch(weights, tokens, ring, b, c).run();
    if (warp == CONSUMERS / 32 + 1) {
      if ((threadIdx.x & 31) == 0) prefetch_weight(c);
      __syncwarp();
    }
    if (NORM && warp > CONSUMERS / 32) {
      griddepcontrol_wait();
      load_norms(ring.norms, b.token(b.tile, c), c);
    }
    __syncwarp();
    // These warps arrive as often as those that multiply: a cluster's barrier counts all threads.
    for (int i = 0; i < (CLUSTER > 1) + (SPLIT > 1 && EXCHANGE == 0); ++i) {
      cluster_arrive();
      cluster_wait();
    }
    return;
  }
  setmaxnreg_inc<MULTIPLYING>();
  if constexpr (RESIDUAL) griddepcontrol_wait();  // These threads, too, read what older kernels wrote.
  const int group = warp >> 2;
  Sums sums;
  int count = 0;
  if constexpr (SPLIT > 1) {
    multiply(sums, count, group, ring, b);
    finish_share(sums, count, group, ring, b, c);
    return;
  }
  for (int tile = b.tile; tile < c.tiles; tile += b.step) {
    multiply(sums, count, group, ring, b);
    finish_tile(sums, count, tile, group, ring, b, c);
  }
  if constexpr (CLUSTER > 1) {
    // Other blocks may still arrive at this block's barriers, so it must not exit before them.
    cluster_arrive();
    cluster_wait();
  }
}
