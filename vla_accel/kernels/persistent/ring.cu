// The ring of shared memory between the warp that copies and the warps that compute. This file follows core.cu.
//
// A unit is a warp instruction's worth of work for each of eight warps: eight rows of 256 columns of a weight, or eight
// keys or values. A stage has up to STAGE_UNITS units and two barriers: `full`, at which each lane of the copying warp
// arrives when its copies have landed, and `empty`, at which each computing warp arrives when it has read the stage.

#define LANE_BYTES 16
#define BLOCK_BYTES 512  // 8 rows x 32 columns
#define UNIT_BYTES (8 * BLOCK_BYTES)
#define STAGE_BYTES (STAGE_UNITS * UNIT_BYTES)
#define STAGE_KEYS (STAGE_UNITS * 8)

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
  // Waits for the stage that is `ahead` of the next one, and returns its address.
  __device__ __forceinline__ u32 wait_full(int ahead = 0) const {
    const bool wraps = slot + ahead >= STAGES;
    const int at = slot + ahead - (wraps ? STAGES : 0);
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
struct Producer : Stages {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;  // A lane copies part t of row g.
  const u64 once = policy_evict_first(), kept = policy_evict_last();

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

  // Eight rows of a tile, 256 columns: as (column / 32, row, column % 32).
  template <class P>
  __device__ __forceinline__ void copy_weights(u32 to, const u16* weights, int tile, int chunk) const {
    const int row = first_column<P>(tile) + (g & 3) + (g >> 2) * P::HALF, column = chunk * 256 + t * 8;
    const u16* from = weights + (u64)row * P::K + column;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      cp_async_16(to + i * BLOCK_BYTES + (threadIdx.x & 31) * LANE_BYTES, from + i * 32, chunk * 256 + i * 32 < P::K, once);
    end_unit();
  }

  // The weights of this block's tiles, in the order in which `multiply` reads them.
  template <class P>
  __device__ __forceinline__ void push(const u16* weights) {
    const Share mine = tiles_of<P>();
#pragma unroll 1
    for (int done = 0; done < mine.count; done += P::TOGETHER)
#pragma unroll 1
      for (int chunk = 0; chunk < P::CHUNKS; chunk += P::STAGE_CHUNKS)
#pragma unroll 1
        for (int tile = done; tile < min(done + P::TOGETHER, mine.count); tile += P::STAGE_TILES) {
          const u32 to = open();
#pragma unroll 1
          for (int unit = 0; unit < STAGE_UNITS; ++unit) {
            const int at = tile + unit % P::STAGE_TILES, part = chunk + unit / P::STAGE_TILES;
            if (at < min(done + P::TOGETHER, mine.count) && part < P::CHUNKS)
              copy_weights<P>(to + unit * UNIT_BYTES, weights, mine.first + at, part);
          }
          close();
        }
  }

  // KEYS keys or values of a head from `first` on, as rows whose parts of 16 bytes are swizzled by row: part i of row r
  // lies at i ^ r % 8, so that eight rows of the same part are in different banks. Keys behind `length` are zeros.
  __device__ __forceinline__ void push_keys(const u16* from, int first, int length) {
#pragma unroll 1
    for (int stage = 0; stage < KEYS / STAGE_KEYS; ++stage) {
      const u32 to = open();
#pragma unroll 1
      for (int unit = 0; unit < STAGE_UNITS; ++unit) {
        const int key = first + stage * STAGE_KEYS + unit * 8 + g;
        const u32 row = to + (unit * 8 + g) * HEAD_DIM * 2;
        const u16* part = from + (u64)(key < length ? key : 0) * KV_HEADS * HEAD_DIM;
#pragma unroll
        for (int i = t; i < HEAD_DIM / 8; i += 4)
          cp_async_16(row + (i ^ g) * LANE_BYTES, part + i * 8, key < length, kept);
        end_unit();
      }
      close();
    }
  }
};
