// GEMM of many rows on Hopper: out = epilogue(scale * x Wᵀ + bias), x (M, K), W (N, K), FP8, BF16 or FP16. This file
// follows epilogue.cu.
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
// Macros: KIND (0 BF16, 1 FP16, 2 FP8 e4m3), NARROW (FP8 out; else BF16, or FP16 for KIND 1), ACTIVATION (a
// code of `activation.py`; GeGLU and SwiGLU are of weight rows by turns, eight of gate, eight of up), GROUPS, BLOCKS,
// PARTS, WIDTH, STAGES,
// ACROSS, ALONG, SPLIT, STAGING, EXCHANGE and BARRIERS (where in shared memory the output is staged, others' sums
// arrive and the barriers are), LIMIT, FETCHING and MULTIPLYING (registers a thread: at the start, then of either
// kind). WGMMA, one product of WIDTH tokens, is generated (`wgmma.py`).
#if KIND == 2
#define WGMMA wgmma_e4m3
#elif KIND == 1
#define WGMMA wgmma_f16
#else
#define WGMMA wgmma_bf16
#endif

// COUNT blocks fetch a tile for each other: each fetches a share of it, a multiple of eight rows. Where COUNT such
// shares are more than the tile, they overlap and write the same rows twice.
#define SHARE(ROWS, COUNT) ((ROWS + 8 * COUNT - 1) / (8 * COUNT) * 8)
#define START(ROWS, COUNT, i) (COUNT == 1 ? 0 : i * (ROWS - SHARE(ROWS, COUNT)) / (COUNT > 1 ? COUNT - 1 : 1) / 8 * 8)
#define W_ROWS SHARE(TILE_W, ALONG)
#define T_ROWS SHARE(TILE_T, ACROSS)
#define ARRIVING ((W_ROWS * ALONG + T_ROWS * ACROSS) * 128)
// One copy brings so many rows: a box has at most 256.
#define W_BOX (W_ROWS > 256 ? W_ROWS / 2 : W_ROWS)
#define T_BOX (T_ROWS > 256 ? T_ROWS / 2 : T_ROWS)
#define CHUNK (KIND == 2 ? 128 : 64)

// This arrives at another block's barrier with the release of this block only: the others read nothing that it wrote,
// and a release to the cluster would cost a memory barrier for each stage.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 rank) {
#if CLUSTER > 1
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
#else
  mbarrier_arrive(barrier);
#endif
}

// Operands have swizzled rows of 128 bytes, so groups of eight rows are 1024 bytes apart.
__device__ __forceinline__ u64 operand(u32 address) { return wgmma_descriptor(address, 16, 1024, true); }

#if RESIDUAL
#define HELD(m, n) held[m][n]
#else
#define HELD(m, n) nullptr
#endif

// -- the kernel -------------------------------------------------------------------------------------------------------

extern "C" __global__ void __maxnreg__(LIMIT)
    gemm(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, const Call c) {
  extern __shared__ unsigned char memory[];
  const u32 base = (smem_of(memory) + 1023) & ~1023u;
  const u32 full = base + BARRIERS, empty = full + STAGES * 8, norms = empty + STAGES * 8;
  const int rank = blockIdx.x % CLUSTER, across = rank % ACROSS, along = rank / ACROSS % ALONG,
            part = rank / (ACROSS * ALONG);
  const int per_part = (c.chunks + SPLIT - 1) / SPLIT;
  const int first = part * per_part, last = min(first + per_part, c.chunks);
  const int step = gridDim.x / CLUSTER, mine = blockIdx.x / CLUSTER;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

  if (threadIdx.x == CONSUMERS) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, 4 * GROUPS * (ACROSS + ALONG - 1));
    }
    fence_mbarrier_init();
    prefetch_tensormap(weights);
    prefetch_tensormap(tokens);
  }
  griddepcontrol_launch_dependents();
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif

  if (warp >= CONSUMERS / 32) {
    setmaxnreg_dec<FETCHING>();
    if (threadIdx.x == CONSUMERS) {
      const u64 once = policy_evict_first(), often = policy_evict_last();
      u16 same_weights = 0, same_tokens = 0;
      if (ALONG > 1)
        for (int i = 0; i < ALONG; ++i) same_weights |= 1 << (across + ACROSS * (i + ALONG * part));
      if (ACROSS > 1)
        for (int i = 0; i < ACROSS; ++i) same_tokens |= 1 << (i + ACROSS * (along + ALONG * part));
      const int w_start = START(TILE_W, ALONG, along), t_start = START(TILE_T, ACROSS, across);
      const auto fetch_weights = [&](int tile, int chunk, int stage) {
        const int row = (tile / c.token_tiles * ACROSS + across) * TILE_W + w_start;
        const u32 to = base + stage * STAGE + w_start * 128;
#if SUFFIX >= 2
        tma_load_5d(to, weights, chunk * CHUNK, row % (2 * c.suffix.half) / 16, row / (2 * c.suffix.half), full + stage * 8,
                    once);
#else
#pragma unroll
        for (int i = 0; i < W_ROWS; i += W_BOX)
          tma_load_2d(to + i * 128, weights, chunk * CHUNK, row + i, full + stage * 8, same_weights, once);
#endif
      };
      const auto fetch_tokens = [&](int tile, int chunk, int stage) {
        const int row = (tile % c.token_tiles * ALONG + along) * TILE_T + t_start;
        const u32 to = base + stage * STAGE + (TILE_W + t_start) * 128;
#pragma unroll
        for (int i = 0; i < T_ROWS; i += T_BOX)
          tma_load_2d(to + i * 128, tokens, chunk * CHUNK, row + i, full + stage * 8, same_tokens, often);
      };
      const int ahead = min(STAGES, last - first);
      for (int i = 0; i < ahead; ++i) {
        mbarrier_arrive_expect_tx(full + i * 8, ARRIVING);
        fetch_weights(mine, first + i, i);
      }
      griddepcontrol_wait();
      for (int i = 0; i < ahead; ++i) fetch_tokens(mine, first + i, i);
      int done = ahead, begin = first + ahead;
      for (int tile = mine; tile < c.tiles; tile += step) {
        for (int chunk = begin; chunk < last; ++chunk, ++done) {
          const int stage = done % STAGES;
          if (done >= STAGES) mbarrier_wait(empty + stage * 8, (done / STAGES - 1) & 1);
          mbarrier_arrive_expect_tx(full + stage * 8, ARRIVING);
          fetch_weights(tile, chunk, stage);
          fetch_tokens(tile, chunk, stage);
        }
        begin = first;
      }
    }
#if NORM
    if (warp > CONSUMERS / 32) {
      griddepcontrol_wait();
      load_norms(norms, (mine % c.token_tiles * ALONG + along) * TILE_T, c);
    }
#endif
    __syncwarp();
    // These warps arrive as often as those that multiply: a cluster's barrier counts all threads.
    for (int i = 0; i < (CLUSTER > 1) + (SPLIT > 1 && EXCHANGE == 0); ++i) {
      cluster_arrive();
      cluster_wait();
    }
  } else {
    setmaxnreg_inc<MULTIPLYING>();
    const int group = warp >> 2;
#if RESIDUAL
    griddepcontrol_wait();  // These threads, too, read what older kernels wrote.
#endif
    const auto release = [&](int stage) {
      // This tells all blocks that send to this stage, those of the same row and column of the cluster; this block is
      // in both and is told once.
      if (lane < ACROSS + ALONG - 1) {
        const int to = lane < ACROSS ? lane + ACROSS * (along + ALONG * part)
                                     : across + ACROSS * (((lane - ACROSS) + (lane - ACROSS >= along)) + ALONG * part);
        mbarrier_arrive_remote(empty + stage * 8, to);
      }
    };
    float sums[BLOCKS][PARTS][WIDTH / 2];
    int done = 0;
    for (int tile = mine; tile < c.tiles; tile += step) {
      for (int chunk = first; chunk < last; ++chunk, ++done) {
        const int stage = done % STAGES;
        mbarrier_wait(full + stage * 8, (done / STAGES) & 1);
        const u32 a = base + stage * STAGE + group * BLOCKS * 64 * 128, b = base + stage * STAGE + TILE_W * 128;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
            for (int n = 0; n < PARTS; ++n)
              WGMMA(sums[m][n], operand(a + m * 64 * 128 + k * 32), operand(b + n * WIDTH * 128 + k * 32),
                    chunk > first || k > 0);
        wgmma_commit();
        if (chunk > first) {
          wgmma_wait<1>();
          release((done - 1) % STAGES);
        }
      }
#if SPLIT == 1
      const int row = (tile / c.token_tiles * ACROSS + across) * TILE_W + group * BLOCKS * 64;
      const int token = (tile % c.token_tiles * ALONG + along) * TILE_T;
#if RESIDUAL
      uint4 held[BLOCKS][PARTS][(WIDTH / 8 + 1) / 2];
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
        for (int n = 0; n < PARTS; ++n)
          load_residual<WIDTH / 8>(held[m][n], token + n * WIDTH, c.rows, row + m * 64, c);
#endif
#endif
      wgmma_wait<0>();
      release((done - 1) % STAGES);
#if NORM
      wait_for_norms();
#endif
#if SPLIT == 1
#if STAGING == 0
      // The staging takes the place of stages that others may still read.
      bar_sync<CONSUMERS>(15);
#endif
      const u32 staging = base + STAGING + group * WIDTH * PITCH;
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m) {
        const int column = (row + m * 64) / (64 / COLUMNS);
        const Rows rows = load_rows(c, column);
#pragma unroll
        for (int n = 0; n < PARTS; ++n)
          store_tile<WIDTH / 8>(sums[m][n], staging, token + n * WIDTH, c.rows, column, rows, c, group, HELD(m, n),
                          norms + n * WIDTH * 8);
      }
#endif
    }
#if SPLIT > 1
    // Each block adds up the parts of K for its share of the tokens, which is EIGHTS times eight tokens.
    constexpr int ALL = PARTS * WIDTH / 8, EIGHTS = (ALL + SPLIT - 1) / SPLIT;
    const int row = (mine / c.token_tiles * ACROSS + across) * TILE_W + group * BLOCKS * 64;
    const int start = (mine % c.token_tiles * ALONG + along) * TILE_T, token = start + part * EIGHTS * 8;
    const int end = min(c.rows, start + TILE_T);
#if EXCHANGE == 0
    cluster_arrive();
#endif
#if RESIDUAL
    uint4 held[BLOCKS][1][(EIGHTS + 1) / 2];
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) load_residual<EIGHTS>(held[m][0], token, end, row + m * 64, c);
#endif
#if EXCHANGE == 0
    cluster_wait();  // Now nobody reads the stages any more, whose place the sums take.
#endif
    float total[BLOCKS][EIGHTS * 4];
#pragma unroll
    for (int q = 0; q < SPLIT; ++q) {
      const u32 there = mapa(base + EXCHANGE + threadIdx.x * 16, across + ACROSS * (along + ALONG * q));
#pragma unroll
      for (int i = 0; i < EIGHTS; ++i)
#pragma unroll
        for (int m = 0; m < BLOCKS; ++m) {
          constexpr int PER = WIDTH / 8;
          const int e = q * EIGHTS + i;
          if (e >= ALL) continue;
          const float* v = sums[m][e / PER] + e % PER * 4;
          if (q == part) {
#pragma unroll
            for (int j = 0; j < 4; ++j) total[m][i * 4 + j] = v[j];
          } else {
            const u32 to = there + (((part - (part > q)) * EIGHTS + i) * BLOCKS + m) * CONSUMERS * 16;
            st_cluster_f4(to, v[0], v[1], v[2], v[3]);
          }
        }
    }
    cluster_arrive();
    cluster_wait();
    const u32 staging = base + STAGING + group * EIGHTS * 8 * PITCH;
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
      const int column = (row + m * 64) / (64 / COLUMNS);
      const Rows rows = load_rows(c, column);
#pragma unroll
      for (int q = 0; q < SPLIT - 1; ++q)
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
          const float4 four =
              ld_shared_f4(base + EXCHANGE + threadIdx.x * 16 + ((q * EIGHTS + i) * BLOCKS + m) * CONSUMERS * 16);
          const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) total[m][i * 4 + j] += v[j];
        }
      store_tile<EIGHTS>(total[m], staging, token, end, column, rows, c, group, HELD(m, 0), norms + part * EIGHTS * 64);
    }
#elif CLUSTER > 1
    // Other blocks may still arrive at this block's barriers, so it must not exit before them.
    cluster_arrive();
    cluster_wait();
#endif
  }
}
