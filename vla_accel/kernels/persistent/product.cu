// A product of few rows with the weights of the ring. This file follows ring.cu.
//
// The warps of a block share K: warp w has block w of 32 columns of each chunk of 256. Their sums meet in shared memory;
// then each thread adds four outputs of a row in the order of the warps, and an epilogue stores them.

struct Consumer {
  const Model& m;
  const Call& c;
  Ring ring;
  Hop x, embedded, heads, parts, context, hidden, actions;
  __device__ __forceinline__ Consumer(const Model& model, const Call& call)
      : m(model), c(call), x{call.arrivals}, embedded{call.arrivals + HOP_STRIDE}, heads{call.arrivals + 2 * HOP_STRIDE},
        parts{call.arrivals + 3 * HOP_STRIDE}, context{call.arrivals + 4 * HOP_STRIDE},
        hidden{call.arrivals + 5 * HOP_STRIDE}, actions{call.arrivals + 6 * HOP_STRIDE} {}
};

// The sums of squares of all rows, which the owners of columns have written by tiles, (WIDTH / 8, 16).
struct Squares {
  static constexpr int TILES = WIDTH / 8, EACH = (TILES + 2 * WARPS - 1) / (2 * WARPS);
  float parts[EACH];
  __device__ __forceinline__ void load(const float* squares) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int tile = (i * WARPS + warp) * 2 + (lane >> 4);
      parts[i] = tile < TILES ? squares[tile * 16 + (lane & 15)] : 0.f;
    }
  }
  // Stores the warp's share of each row's sum.
  __device__ __forceinline__ void store() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += parts[i];
    sum += __shfl_xor_sync(~0u, sum, 16);
    if ((threadIdx.x & 31) < 16) ((float*)(shared_memory + SQUARES_AT))[(threadIdx.x >> 5) * 16 + (threadIdx.x & 31)] = sum;
  }
  // 1 / rms of a row, after a barrier.
  __device__ __forceinline__ static float factor(int row, float eps) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += ((const float*)(shared_memory + SQUARES_AT))[w * 16 + row];
    return rsqrtf(sum / WIDTH + eps);
  }
};

// Multiplies all rows with `tiles` tiles: the warp's part of the sums, as an mma leaves them.
template <class P>
__device__ __forceinline__ void multiply(Ring& ring, const u16* input, int tiles, float (&sums)[P::TOGETHER][4]) {
  constexpr int CHAINS = P::TOGETHER == 1 ? 4 : 1;  // Few tiles: more sums that do not depend on each other.
  constexpr int GROUP = P::CHUNKS < LOADED_CHUNKS ? P::CHUNKS : LOADED_CHUNKS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u16* rows = input + (warp * ROWS + g) * 32 + t * 8;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  float chains[P::TOGETHER * CHAINS][4];
  clear<P::TOGETHER * CHAINS * 4>((float*)chains);
#pragma unroll 1
  for (int first = 0; first < P::CHUNKS; first += GROUP) {
    uint4 a[GROUP][2];
#pragma unroll
    for (int c = 0; c < GROUP; ++c) {
      const u16* from = rows + (first + c) * 8 * ROWS * 32;
      const bool real = P::CHUNKS % GROUP == 0 || first + c < P::CHUNKS;
      a[c][0] = real && (ROWS >= 8 || g < ROWS) ? *(const uint4*)from : zeros;
      a[c][1] = real && g + 8 < ROWS ? *(const uint4*)(from + 8 * 32) : zeros;
    }
#pragma unroll
    for (int c = 0; c < GROUP; c += P::STAGE_CHUNKS)
#pragma unroll
      for (int q = 0; q < P::TOGETHER; q += P::STAGE_TILES) {
        if (q >= tiles || (P::CHUNKS % GROUP && first + c >= P::CHUNKS)) continue;
        const u32 at = ring.wait_full() + warp * BLOCK_BYTES + lane * LANE_BYTES;
#pragma unroll
        for (int unit = 0; unit < STAGE_UNITS; ++unit) {
          const int tile = q + unit % P::STAGE_TILES, part = c + unit / P::STAGE_TILES;
          if (tile < tiles && part < GROUP && (P::CHUNKS % GROUP == 0 || first + part < P::CHUNKS))
            mma32(chains[tile * CHAINS + part % CHAINS], a[part < GROUP ? part : 0][0], a[part < GROUP ? part : 0][1],
                  ld_shared_v4(at + unit * UNIT_BYTES));
        }
        ring.release(1);
      }
  }
#pragma unroll
  for (int q = 0; q < P::TOGETHER; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[q][i] = chains[q * CHAINS][i];
#pragma unroll
      for (int chain = 1; chain < CHAINS; ++chain) sums[q][i] += chains[q * CHAINS + chain][i];
    }
}

// Stores a warp's sums as (warp, tile, row, 8).
template <class P>
__device__ __forceinline__ void store_sums(const float (&sums)[P::TOGETHER][4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int q = 0; q < P::TOGETHER; ++q) {
    float* to = (float*)(shared_memory + SUMS_AT) + ((warp * P::TOGETHER + q) * ROWS + g) * 8 + 2 * t;
    if (g < ROWS) *(float2*)to = make_float2(sums[q][0], sums[q][1]);
    if (g + 8 < ROWS) *(float2*)(to + 64) = make_float2(sums[q][2], sums[q][3]);
  }
}

// Two neighbours of a tile's first four columns, and their partners among its last four.
struct Quad {
  float2 a, b;
};
template <class P>
__device__ __forceinline__ Quad add_sums(int tile, int row, int pair) {
  const float* from = (const float*)(shared_memory + SUMS_AT) + (tile * ROWS + row) * 8 + pair;
  Quad sum = {make_float2(0.f, 0.f), make_float2(0.f, 0.f)};
#pragma unroll
  for (int w = 0; w < WARPS; ++w, from += P::TOGETHER * ROWS * 8) {
    const float2 a = *(const float2*)from, b = *(const float2*)(from + 4);
    sum.a.x += a.x, sum.a.y += a.y, sum.b.x += b.x, sum.b.y += b.y;
  }
  return sum;
}

// Multiplies the rows of `input`, which are complete after `before`, with the block's tiles. An epilogue has constants of an
// output (`load`), which do not depend on `before`, and stores four outputs (`store`; all lanes call it, `real` or not).
template <class P, class Epilogue>
__device__ __forceinline__ void product(Consumer& me, const Hop& before, const u16* input, Epilogue& epilogue) {
  const Share mine = tiles_of<P>();
  const int tile = threadIdx.x / (2 * ROWS), row = threadIdx.x / 2 % ROWS, pair = (threadIdx.x & 1) * 2;
#pragma unroll 1
  for (int done = 0; done < mine.count; done += P::TOGETHER) {
    const int tiles = min(P::TOGETHER, mine.count - done);
    const bool real = tile < tiles;
    const int column = first_column<P>(mine.first + (real ? done + tile : 0)) + pair;
    const auto held = epilogue.load(row, column);
    if (done == 0)
      before.wait();
    else
      consumers_sync();  // All have read the sums of the tiles before.
    Squares squares;
    if (Epilogue::NORMED) squares.load(me.c.squares);
    float sums[P::TOGETHER][4];
    multiply<P>(me.ring, input, tiles, sums);
    store_sums<P>(sums);
    if (Epilogue::NORMED) squares.store();
    consumers_sync();
    Quad quad = add_sums<P>(real ? tile : 0, row, pair);
    if (Epilogue::NORMED) {
      const float factor = Squares::factor(row, me.m.eps);
      quad.a.x *= factor, quad.a.y *= factor, quad.b.x *= factor, quad.b.y *= factor;
    }
    epilogue.store(row, column, done + (real ? tile : 0), quad, held, real);
  }
}
