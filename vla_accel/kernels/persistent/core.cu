// The denoise loop of few rows in one launch, for every GPU from Ampere on: sizes and functions that its parts use. The
// files of this folder are compiled as one source, in the order core, ring, product, epilogues, attention, kernel.
//
// One block runs on each multiprocessor until the loop has ended. Its last warp copies weights, keys and values to a ring
// of shared memory, in the order of their use, and never reads activations. The other warps compute; blocks exchange
// activations through L2 and count their arrivals (`Hop`). All sums have a fixed order.
//
// `plan.py` passes sizes as macros, the products as structures (`Qkv`, `Output`, `GateUp`, `Down`, `Mix`), and the
// argument blocks of `arguments.py`:
//   BATCH sequences of TOKENS tokens, the last HORIZON of them actions of ACTION_DIM numbers; ROWS in all, at most 16
//   WIDTH columns, MLP_DIM, HEADS query heads and KV_HEADS key heads of HEAD_DIM, DEPTH layers, STEPS
//   ADAPTIVE: the norms depend on the step (π0.5); otherwise a time MLP embeds the actions. PAIRS: rows of a table of
//     constants, two where pinned actions have their own; INPUT_PAIRS: the same of the input's bias
//   WARPS that compute; STAGES of the ring, UNDER_WAY units that are copied at once at most
//   ..._AT: offsets in shared memory

#define STATE (TOKENS > HORIZON)  // The first token of a sequence is the state (π0).
#define NO_SCORE __int_as_float(0xff800000)

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

// The tiles of a block. Blocks own columns of the residual stream from the first block on; the other products begin with
// the last block, so that no block has the rest of every division.
template <class P>
__device__ __forceinline__ Share tiles_of() {
  return deal(P::TILES, P::OWNED ? (int)blockIdx.x : (int)(gridDim.x - 1 - blockIdx.x));
}

// A tile has eight columns of a product: four, and the four that are HALF columns behind them, in groups of 2 HALF. With
// HALF of 4 these are eight neighbours.
template <class P>
__device__ __forceinline__ int first_column(int tile) {
  constexpr int IN_GROUP = P::HALF / 4;
  return tile / IN_GROUP * 2 * P::HALF + tile % IN_GROUP * 4;
}

// -- places ----------------------------------------------------------------------------------------------------------

// Inputs of products are stored as (column / 32, row, column % 32): a warp loads whole lines.
__device__ __forceinline__ int place_of(int row, int column) { return (column / 32 * ROWS + row) * 32 + column % 32; }

// The number of a row among all actions, or -1 for a state.
__device__ __forceinline__ int action_of(int row) {
  const int action = row % TOKENS - (TOKENS - HORIZON);
  return action < 0 ? -1 : row / TOKENS * HORIZON + action;
}
__device__ __forceinline__ bool pinned(const Call& c, int row) {
  const int action = action_of(row);
  return action >= 0 && __ldg(c.follow + action) > 0.f;
}
// Row `at` of a table of constants: that of the step's time, or of pinned actions.
__device__ __forceinline__ const float* constants(const Call& c, const float* table, int at, int columns, int row) {
  return table + ((u64)at * PAIRS + (PAIRS > 1 && pinned(c, row))) * columns;
}

__device__ __forceinline__ float2 ldg2(const float* p) { return __ldg((const float2*)p); }

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
