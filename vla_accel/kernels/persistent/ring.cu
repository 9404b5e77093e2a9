// What the copying warp brings. A unit has eight rows of 256 columns of a weight, or eight keys or values. This file
// follows core.cu.

#define STAGE_KEYS (STAGE_UNITS * 8)

struct Producer : Copier {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;  // A lane copies part t of row g.
  const u64 once = policy_evict_first(), kept = policy_evict_last();

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
