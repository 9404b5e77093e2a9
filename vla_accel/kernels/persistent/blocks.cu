// What persistent kernels share: the division of their work, hand-offs between blocks, and the ring of shared memory
// between the warp that copies and the warps that compute. This file is the first one of each.
//
// One block runs on each multiprocessor until the kernel has ended. Its last warp copies to the ring, in the order of
// use, and never reads activations. The other WARPS warps compute.
//
// A unit has 16 bytes for each lane of eight warps. A stage has up to STAGE_UNITS units and two barriers: `full`, at which
// each lane of the copying warp arrives when its copies have landed, and `empty`, at which each computing warp arrives
// when it has read the stage. The host passes STAGES and the offsets RING_AT and BARRIERS_AT as macros, and UNDER_WAY, the
// units that are copied at once at most.

extern __shared__ __align__(128) unsigned char shared_memory[];

// -- division of the work --------------------------------------------------------------------------------------------

struct Share {
  int first, count;
};
// The items of block `rank`; the first blocks have one more if there is a rest.
__device__ __forceinline__ Share deal(int items, int rank) {
  const int each = items / (int)gridDim.x, rest = items % (int)gridDim.x;
  return {rank * each + min(rank, rest), each + (rank < rest)};
}
// The blocks that have items.
__device__ __forceinline__ u32 workers(int items) { return (u32)min(items, (int)gridDim.x); }

// -- hand-offs -------------------------------------------------------------------------------------------------------

// The barrier of the warps that compute.
__device__ __forceinline__ void consumers_sync() { bar_sync<WARPS * 32>(1); }

// One hand-off between blocks: those that have work arrive, and those that need its results wait for all of them. By
// then all of them have read their inputs too: a buffer that one phase writes and the next phase reads may be
// overwritten in the phase after that.
struct Hop {
  u32* counter;
  u32 expected = 0;
  // Another phase of so many blocks ends with this hand-off. Every block counts them, with work or without.
  __device__ __forceinline__ void expect(u32 blocks) { expected += blocks; }
  __device__ __forceinline__ void arrive() const {
    consumers_sync();
    if (threadIdx.x == 0) red_release(counter);
  }
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) wait_count(counter, expected);
    consumers_sync();
  }
};

// -- the ring ---------------------------------------------------------------------------------------------------------

#define LANE_BYTES 16
#define BLOCK_BYTES 512  // 8 rows x 32 columns
#define UNIT_BYTES (8 * BLOCK_BYTES)
#define STAGE_BYTES (STAGE_UNITS * UNIT_BYTES)

struct Stages {
  u32 memory, barriers;
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ Stages() : memory(smem_of(shared_memory + RING_AT)), barriers(smem_of(shared_memory + BARRIERS_AT)) {}
  __device__ __forceinline__ u32 full(int at) const { return barriers + at * 8; }
  __device__ __forceinline__ u32 empty(int at) const { return barriers + (STAGES + at) * 8; }
  __device__ __forceinline__ void advance(int stages) {
    slot += stages;
    if (slot >= STAGES) slot -= STAGES, parity ^= 1;
  }
  // One thread calls this, before a barrier of the block.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full(i), 32);
      mbarrier_init(empty(i), WARPS);
    }
  }
};

// The side that computes.
struct Ring : Stages {
  // Waits for the stage that is `offset` stages after the next one, and returns its address.
  __device__ __forceinline__ u32 wait_full(int offset = 0) const {
    const bool wraps = slot + offset >= STAGES;
    const int at = slot + offset - (wraps ? STAGES : 0);
    mbarrier_wait(full(at), parity ^ wraps);
    return memory + at * STAGE_BYTES;
  }
  // This warp has read the next stages.
  __device__ __forceinline__ void release(int stages) {
    __syncwarp();
    const int lane = threadIdx.x & 31, at = slot + lane;
    if (lane < stages) mbarrier_arrive(empty(at >= STAGES ? at - STAGES : at));
    advance(stages);
  }
};

// The side that copies: one warp. It has at most UNDER_WAY units under way: more would not come sooner, and everything
// that blocks exchange through L2 would queue behind them.
struct Copier : Stages {
  __device__ __forceinline__ u32 open() const {
    mbarrier_wait(empty(slot), parity ^ 1);
    return memory + slot * STAGE_BYTES;
  }
  __device__ __forceinline__ void end_unit() const {
    cp_async_commit();
    cp_async_wait<UNDER_WAY - 1>();
  }
  __device__ __forceinline__ void close() {
    cp_async_arrive(full(slot));
    advance(1);
  }
};
