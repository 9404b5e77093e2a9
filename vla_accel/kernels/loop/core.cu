// The denoise loop for few rows: sizes, structures and functions that all its kernels use. The files of this folder are
// compiled as one source, in the order core, products, phases, then attention, attend or grouped, then step.
//
// A phase is a kernel (q/k/v and attention in one or two, output, gate and up, down); one more runs between two steps.
// They are launched with programmatic dependence: a kernel starts while its predecessors still run, fetches its weights
// into shared memory with bulk copies, and only then waits. Weights so stream through the chip without a pause while
// the phases hand over their few kilobytes of activations. Every kernel waits for the end of its predecessor, so that
// everything that the kernels before it read may be overwritten. With few rows, gate and up, and down also copy to L2
// what the kernels after them fetch.
//
// `schedule.py` passes sizes as macros, and `arguments.py` describes the argument blocks:
//   BATCH sequences of TOKENS tokens, the last HORIZON of them actions of ACTION_DIM numbers; ROWS in all, in ROW_TILES
//     tiles of 16
//   WIDTH columns, of which MODEL_WIDTH are the model's (the others are zero), MLP_DIM, HEADS query heads and KV_HEADS
//     key heads of HEAD_DIM, DEPTH layers
//   ADAPTIVE: the norms depend on the step (π0.5); otherwise a time MLP embeds the actions. CAUSAL: an action attends
//     to earlier ones only (SmolVLA). ACTIVATION: GEGLU or SWIGLU. SELF_EVERY: every so many layers, from the first on,
//     attend to the suffix as well as the prefix (0: none)
//   WARPS of a block, of which ROW_WARPS take different rows and K_WARPS share K; HELD_TILES of rows a warp
//   GATE_UP_UNITS a block; PAIRS of output tiles in one reduction; BATCHED_ROWS: gate and up load rows in batches
//   DOWN_SPLIT, OUTPUT_SPLIT, MIX_SPLIT blocks share K of a product, whose weights are packed for …_PACKED parts
//   …_BYTES of shared memory hold the weights of a product, and later the sums that replace them
//   STEP_BLOCKS share a row between steps; CLUSTER share an attention tile; GROUP_RANKS share a key head in `grouped`;
//     RANKS share a head in `attend`; KEY_ROUNDS tiles of keys a warp, KEYS of a tile in `attention`
//   CHUNK columns of K, STAGE_BYTES of a unit's weights, NOTHING_YET
//
// Code is short on purpose: the kernels take turns on every multiprocessor, and instructions that are no longer in its
// cache cost a phase of 4 us more than a loop does.

#define INFINITE __int_as_float(0x7f800000)
#define THREADS (WARPS * 32)
#define TILE_BYTES (STAGE_BYTES / 2)
#define GROUP (HEADS / KV_HEADS)
#define QKV ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
// Rows of a head in shared memory are 16 bytes longer than their data, so that eight of them, read at the same column,
// use all banks.
#define PITCH (HEAD_DIM + 8)
#define ROUND_UP(x, n) (((x) + (n)-1) / (n) * (n))
#define STATE (TOKENS > HORIZON)  // The first token of a sequence is the state (π0).
#define CROSSES(layer) (SELF_EVERY < 1 || (layer) % SELF_EVERY > 0)
// `attend` runs with one tile of rows: its products take less time than the copies of their weights.
#define FEW_ROWS (ROW_TILES == 1 && KEY_ROUNDS > 0 && GROUP_RANKS == 0)

extern __shared__ __align__(128) unsigned char shared_memory[];

// π0's state token attends to the prefix and itself, not to actions; causal actions to themselves and earlier ones.
__device__ __forceinline__ bool sees(int query, int token) {
  return STATE ? query > 0 || token == 0 : !CAUSAL || token <= query;
}

// -- global memory ---------------------------------------------------------------------------------------------------

// Other multiprocessors wrote the activations: L1 may be stale, L2 is not.
__device__ __forceinline__ uint4 ld_cg_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ float ld_cg(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ float4 ldg_v4(const float* p) { return __ldg((const float4*)p); }

// Copies bytes to L2, which the blocks of the kernel share in pieces. What other kernels still write may be among them.
__device__ __forceinline__ void prefetch(const void* from, u64 bytes) {
  const u64 piece = 8192;
  if (threadIdx.x < 32)
#pragma unroll 1
    for (u64 at = (blockIdx.x + gridDim.x * threadIdx.x) * piece; at < bytes; at += gridDim.x * 32 * piece)
      bulk_prefetch((const unsigned char*)from + at, (u32)min(piece, bytes - at));
}

// Inputs of products are stored in the order in which warps read them: (row / 16, column / 32, row / 8 % 2, row % 8,
// column % 32). The last two are 512 bytes, which one load of a warp fetches as whole lines.
__device__ __forceinline__ u64 place_of(int row, int column, int width) {
  return ((row / 16 * (width / 32) + column / 32) * 2 + row / 8 % 2) * 256 + (row % 8 * 4 + column / 8 % 4) * 8 +
         column % 8;
}

// The constants of an element of q/k/v and of the one that it is rotated with, half a head further.
struct Rotated {
  float shift_a, shift_b, cos, sin;
  // Values have no position: they are shifted only.
  __device__ __forceinline__ void apply(float& a, float& b, bool rotates) const {
    a += shift_a;
    b += shift_b;
    if (rotates) {
      const float turned = a * cos - b * sin;
      b = b * cos + a * sin;
      a = turned;
    }
  }
};
// `at`: step and layer; `i`: the element of the head, in its first half.
__device__ __forceinline__ Rotated rotated_of(const Model& m, u64 at, int head, int i, int position) {
  const float* shift = m.in_shift + at * QKV + head * HEAD_DIM + i;
  return {ADAPTIVE ? __ldg(shift) : 0.f, ADAPTIVE ? __ldg(shift + HEAD_DIM / 2) : 0.f,
          __ldg(m.cos + position * (HEAD_DIM / 2) + i), __ldg(m.sin + position * (HEAD_DIM / 2) + i)};
}

// -- barriers --------------------------------------------------------------------------------------------------------

// A barrier in shared memory for one batch of copies. One thread calls `expect` with their bytes, and everybody who
// reads them `wait`.
struct Barrier {
  u32 address;
  __device__ __forceinline__ void init() const { mbarrier_init(address, 1); }
  __device__ __forceinline__ void expect(u32 bytes) const { mbarrier_arrive_expect_tx(address, bytes); }
  __device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes) const {
    bulk_load(to, from, bytes, address);
  }
  __device__ __forceinline__ void wait() const { mbarrier_wait(address, 0); }
  // For what other blocks of the cluster send.
  __device__ __forceinline__ void wait_cluster() const { mbarrier_wait_cluster(address, 0); }
};

// The weights of a block have a stage for every chunk; each is fetched once, before the kernel waits.
struct Stages {
  unsigned char* memory;
  u32 barriers;
  int next = 0;
  __device__ __forceinline__ Stages(unsigned char* shared, u32 at, int count) : memory(shared), barriers(at) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < count; ++i) barrier(i).init();
      fence_mbarrier_init();
    }
  }
  __device__ __forceinline__ Barrier barrier(int stage) const { return {barriers + stage * 8}; }
  // Fetches a unit, two tiles of columns, each into its half of the stage. Thread 0 calls this.
  __device__ __forceinline__ void fetch(int stage, const unsigned char* from, u32 bytes) {
    barrier(stage).expect(bytes);
    for (int tile = 0; tile < 2; ++tile)
      barrier(stage).copy(smem_of(memory + stage * STAGE_BYTES + tile * TILE_BYTES), from + tile * (bytes / 2),
                          bytes / 2);
  }
  // Waits for the next unit and returns its address.
  __device__ __forceinline__ u32 take() {
    barrier(next).wait();
    return smem_of(memory) + STAGE_BYTES * next++;
  }
};

// -- clusters --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float ld_cluster(u32 address, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(mapa(address, rank)));
  return v;
}
__device__ __forceinline__ void st_cluster(u32 address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void st_cluster_v2(u32 address, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void st_cluster_v4(u32 address, const uint4& v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
