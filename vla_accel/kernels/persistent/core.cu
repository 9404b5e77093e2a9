// The denoise loop of few rows in one launch, for every GPU from Ampere on: sizes and functions that its parts use. The
// files of this folder are compiled as one source, in the order blocks, core, ring, product, epilogues, attention, kernel.
//
// The copying warp brings weights, keys and values. Blocks exchange activations through L2 and count their arrivals
// (`Hop`). All sums have a fixed order.
//
// `plan.py` passes sizes as macros, the products as structures (`Qkv`, `Output`, `GateUp`, `Down`, `Mix`), and the
// argument blocks of `arguments.py`:
//   BATCH sequences of TOKENS tokens, the last HORIZON of them actions of ACTION_DIM numbers; ROWS in all, at most 16
//   WIDTH columns, MLP_DIM, HEADS query heads and KV_HEADS key heads of HEAD_DIM, DEPTH layers, STEPS
//   ADAPTIVE: the norms depend on the step (π0.5); otherwise a time MLP embeds the actions. PAIRS: rows of a table of
//     constants, two where pinned actions have their own; INPUT_PAIRS: the same of the input's bias
//   ..._AT: offsets in shared memory

#define STATE (TOKENS > HORIZON)  // The first token of a sequence is the state (π0).
#define NO_SCORE __int_as_float(0xff800000)

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
