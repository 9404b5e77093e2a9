// All denoising steps of a 1-D U-Net in one launch, for one sequence of up to 16 rows. This file follows
// persistent/blocks.cu and the argument blocks of unet.py.
//
// A step is a table of phases. In a phase every block makes the phase's whole input in its shared memory, in BF16: its
// MAKERS warps read the sums of the phase before from L2 and norm them, which takes less time than a second hand-off.
// Then WARPS of them multiply the input with the weights of the block's own columns, which the copying warp has brought
// meanwhile, and store float32 sums. Every block also keeps the noisy chunk and computes the scheduler's step.
//
// Blocks exchange maps: float32 values whose last bit is a stamp, which tells whether a value is of this step. A map
// has one half for even steps and one for odd steps; the stamp changes each time that a half is written, and all values
// are zero before the first step. So a value is read until its stamp is right, and no counter is needed. A half is
// written again two steps later. Until then every block has contributed to the widest phase of the step between, for
// which it had read all that it reads of the earlier step.
//
// The host passes as macros: LENGTH and ACTIONS of the chunk; HELD and COLUMNS, the quads of a group that a lane holds,
// and those of them that have different channels; and the offsets INPUT_AT, ZEROS_AT, SUMS_AT, CHUNK_AT and TABLE_AT.

#define ROWS 16
#define TEAMS 8
#define TEAM (MAKERS / TEAMS * 32)  // Threads of a team.
#define ROW_BYTES 64  // of 32 columns

// The barrier of the warps that make the input and multiply it.
__device__ __forceinline__ void makers_sync() { bar_sync<MAKERS * 32>(1); }

// Phase `index` of a step; behind the last one that of the network's output.
__device__ __forceinline__ const Phase& phase_of(int index) { return ((const Phase*)(shared_memory + TABLE_AT))[index]; }

// -- maps ------------------------------------------------------------------------------------------------------------

// The step's half of a map of `size` values, and its stamp.
struct Step {
  int index;
  __device__ __forceinline__ u32 stamp() const { return index / 2 % 2 ^ 1; }
  __device__ __forceinline__ float* half(float* map, int size) const { return map + index % 2 * size; }
  __device__ __forceinline__ const float* half(const float* map, int size) const { return map + index % 2 * size; }
  __device__ __forceinline__ u32 stamped(float v) const { return (__float_as_uint(v) & ~1u) | stamp(); }
  __device__ __forceinline__ uint4 stamped(float4 v) const {
    return make_uint4(stamped(v.x), stamped(v.y), stamped(v.z), stamped(v.w));
  }
  // The last bit tells whether one of four values has another stamp.
  __device__ __forceinline__ u32 lacks(const uint4& v, u32 stamp) const {
    return (v.x ^ stamp) | (v.y ^ stamp) | (v.z ^ stamp) | (v.w ^ stamp);
  }
};
__device__ __forceinline__ float4 floats_of(const uint4& v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ uint4 bits_of(const float4& v) {
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

// -- the input of a phase --------------------------------------------------------------------------------------------

// The input is stored as (column / 32, row, column % 32). This stores four neighbours of a row.
__device__ __forceinline__ void put_input(const Phase& p, int row, int column, float4 v) {
  const u32 at = INPUT_AT + (column / 32 * p.rows + row) * ROW_BYTES + column % 32 * 2;
  *(uint2*)(shared_memory + at) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(~0u, v, lanes);
  return v;
}
// The sum over a team, of two in turns: before a number is written again, the team has met at the other one.
__device__ __forceinline__ float team_sum(float v, int turn) {
  const int team = threadIdx.x / TEAM;
  float* sums = (float*)(shared_memory + TEAMS_AT) + turn * MAKERS + team * (TEAM / 32);
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x % TEAM / 32] = v;
  bar_sync<TEAM>(2 + team);
  v = 0.f;
#pragma unroll
  for (int i = 0; i < TEAM / 32; ++i) v += sums[i];
  return v;
}
// x tanh(log(1 + e^x)): with u = e^x the tanh is (u² + 2 u) / (u² + 2 u + 2).
__device__ __forceinline__ float mish(float x) {
  const float u = exp2_fast(fminf(x, 20.f) * 1.44269504f), n = u * (u + 2.f);
  return x * n * reciprocal_fast(n + 2.f);
}
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ __forceinline__ float4 times(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
__device__ __forceinline__ float4 less(float4 a, float b) { return make_float4(a.x - b, a.y - b, a.z - b, a.w - b); }
__device__ __forceinline__ float4 mish(float4 v) { return make_float4(mish(v.x), mish(v.y), mish(v.z), mish(v.w)); }
__device__ __forceinline__ float sum_of(float4 v) { return v.x + v.y + v.z + v.w; }
__device__ __forceinline__ float4 constants(const float* from, int column) { return __ldg((const float4*)(from + column)); }

// A team of warps makes a group of channels at a time. A lane holds ROUNDS rows of WIDE quads of different columns.
// There are no branches by lane: where a group is smaller, lanes repeat what others do, but for sums and stores. What
// is no sum of the phase before is loaded before the wait.
template <int WIDE>
__device__ __forceinline__ void map_input(int rows, const Source& s, int first, const float* film, Step step) {
  constexpr int ROUNDS = (HELD + WIDE - 1) / WIDE;
  const int team = threadIdx.x / TEAM, lane = threadIdx.x % TEAM, channels = s.channels, groups = s.groups;
  const int width = channels / groups, across = width / 4, apart = max(1, TEAM / across), size = rows * channels;
  const int own = lane / across % apart, quad = across < TEAM ? lane % across : lane;
  const bool alone = lane < apart * across;
  const float* from = step.half(s.rows, size);
  const float* residual = s.residual ? step.half(s.residual, size) : nullptr;
  float* kept = s.kept ? step.half(s.kept, size) : nullptr;
  const u32 stamp = step.stamp();
  const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f), one = make_float4(1.f, 1.f, 1.f, 1.f);
#pragma unroll 1
  for (int group = team; group < groups; group += TEAMS) {
    int column[WIDE];
    float real[WIDE][ROUNDS];
    float4 weight[WIDE], bias[WIDE], scale[WIDE], shift[WIDE];
    int place[ROUNDS][WIDE], to[ROUNDS][WIDE];
#pragma unroll
    for (int c = 0; c < WIDE; ++c) {
      column[c] = group * width + min(quad + c * TEAM, across - 1) * 4;
      weight[c] = scale[c] = one, bias[c] = shift[c] = zero;
    }
    if (s.weight) {
#pragma unroll
      for (int c = 0; c < WIDE; ++c) weight[c] = constants(s.weight, column[c]), bias[c] = constants(s.bias, column[c]);
    }
    if (s.films > 1) {
#pragma unroll
      for (int c = 0; c < WIDE; ++c) scale[c] = constants(film, column[c]);
    }
    if (s.films > 0) {
#pragma unroll
      for (int c = 0; c < WIDE; ++c) shift[c] = constants(film + (s.films - 1) * channels, column[c]);
    }
#define EACH_QUAD                                    \
  _Pragma("unroll") for (int r = 0; r < ROUNDS; ++r) \
      _Pragma("unroll") for (int c = 0; c < WIDE; ++c)
    uint4 added[ROUNDS][WIDE], held[ROUNDS][WIDE];
    EACH_QUAD {
      const int row = r * apart + own, within = min(row, rows - 1);
      real[c][r] = alone && row < rows && quad + c * TEAM < across ? 1.f : 0.f;
      place[r][c] = within * channels + column[c];
      to[r][c] = INPUT_AT + ((first + column[c]) / 32 * rows + within) * ROW_BYTES + (first + column[c]) % 32 * 2;
      added[r][c] = make_uint4(0, 0, 0, 0);
    }
    if (residual) {
      EACH_QUAD added[r][c] = ld_relaxed_v4(residual + place[r][c]);
    }
    for (u32 polls = 0;; count_poll(polls)) {
      u32 wrong = 0;
      EACH_QUAD held[r][c] = ld_relaxed_v4(from + place[r][c]);
      EACH_QUAD wrong |= step.lacks(held[r][c], stamp);
      if (!(wrong & 1)) break;
    }
    if (residual)
      for (u32 polls = 0;; count_poll(polls)) {
        u32 wrong = 0;
        EACH_QUAD wrong |= step.lacks(added[r][c], stamp);
        if (!(wrong & 1)) break;
        EACH_QUAD added[r][c] = ld_relaxed_v4(residual + place[r][c]);
      }
    __syncwarp();
    if (s.weight) {
      float sum = 0.f, squares = 0.f;
      const float count = 1.f / (rows * width);
      EACH_QUAD sum += real[c][r] * sum_of(floats_of(held[r][c]));
      const float mean = team_sum(sum, 0) * count;
      EACH_QUAD {
        const float4 v = less(floats_of(held[r][c]), mean);
        squares += real[c][r] * sum_of(times(v, v));
      }
      const float factor = rsqrtf(team_sum(squares, 1) * count + s.eps);
      // (x - mean) factor weight + bias
#pragma unroll
      for (int c = 0; c < WIDE; ++c) weight[c] = times(weight[c], factor);
      EACH_QUAD {
        const float4 v = mish(plus(times(less(floats_of(held[r][c]), mean), weight[c]), bias[c]));
        held[r][c] = bits_of(plus(times(v, scale[c]), shift[c]));
      }
    }
    int turn = kept ? group * ROUNDS * WIDE % (int)gridDim.x : -1;
    EACH_QUAD {
      const float4 v = plus(floats_of(held[r][c]), floats_of(added[r][c]));
      const bool mine = real[c][r] > 0.f;
      if (mine) *(uint2*)(shared_memory + to[r][c]) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
      if (mine && turn == (int)blockIdx.x) st_relaxed_v4(kept + place[r][c], step.stamped(v));
      if (kept && ++turn == (int)gridDim.x) turn = 0;
    }
#undef EACH_QUAD
  }
}

// The noisy chunk.
__device__ __forceinline__ void chunk_input(const Phase& p) {
  const float* chunk = (const float*)(shared_memory + CHUNK_AT);
#pragma unroll 1
  for (int at = threadIdx.x; at < p.rows * p.blocks * 32; at += MAKERS * 32) {
    const int row = at / (p.blocks * 32), column = at % (p.blocks * 32);
    u16* to = (u16*)(shared_memory + INPUT_AT) + (column / 32 * p.rows + row) * 32 + column % 32;
    *to = round_bf16(column < ACTIONS ? chunk[row * ACTIONS + column] : 0.f);
  }
}

__device__ __forceinline__ void make_input(const Call& c, const Phase& p, Step step) {
  int first = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Source s = i ? p.behind : p.front;
    if (s.channels == 0) continue;
    const float* film = c.conditions + (u64)step.index * c.films + s.condition;
    if (!s.rows)
      chunk_input(p);
    else if (COLUMNS > 1 && s.channels / s.groups > 4 * TEAM)
      map_input<COLUMNS>(p.rows, s, first, film, step);
    else
      map_input<1>(p.rows, s, first, film, step);
    first += s.rows ? s.channels : p.blocks * 32;
  }
  // Zeros up to whole units.
  const int across = p.blocks * 8 - first / 4;
#pragma unroll 1
  for (int at = threadIdx.x; at < p.rows * across; at += MAKERS * 32)
    put_input(p, at / across, first + at % across * 4, make_float4(0.f, 0.f, 0.f, 0.f));
  makers_sync();
}

// -- products --------------------------------------------------------------------------------------------------------

// Units of a product: all channels of one tap, then those of the next.
__device__ __forceinline__ int units_of(const Phase& p, const Product& q) { return p.blocks / WARPS * q.taps; }
// A block multiplies up to two tiles at once.
__device__ __forceinline__ int together(int tiles) { return min(tiles, 2); }

// A lane's part of a row of the input, as the taps of a convolution see it, unit by unit: 8 channels of a block.
struct Taps {
  int row, rows;  // that the next tap reads
  u32 tap_at, unit_bytes, zeros, at = 0, step = 0;
  __device__ __forceinline__ Taps(const Phase& p, const Product& q, int output) {
    const int warp = threadIdx.x >> 5;
    const u32 memory = smem_of(shared_memory) + (threadIdx.x & 3) * LANE_BYTES;
    rows = output < q.outputs ? p.rows : 0;
    row = output * q.stride - q.pad;
    tap_at = memory + INPUT_AT + (u32)((warp * p.rows + row) * ROW_BYTES);
    unit_bytes = WARPS * p.rows * ROW_BYTES;
    zeros = memory + ZEROS_AT;
  }
  // `turns`: the unit is the first one of a tap.
  __device__ __forceinline__ uint4 next(bool turns) {
    const bool inside = row >= 0 && row < rows;
    at = turns ? (inside ? tap_at : zeros) : at + step;
    step = turns ? (inside ? unit_bytes : 0) : step;
    row += turns, tap_at += turns ? ROW_BYTES : 0;
    return ld_shared_v4(at);
  }
};

// A warp's part of `multiply`: its blocks of K.
template <int TILES, bool TALL>
__device__ __forceinline__ void multiply_part(Ring& ring, const Phase& p, const Product& q, float* sums) {
  constexpr int EACH = STAGE_UNITS / TILES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int units = units_of(p, q), span = p.blocks / WARPS;
  float chains[TILES][2][4];
  clear<TILES * 8>((float*)chains);
  Taps low(p, q, g), high(p, q, g + 8);
  int left = 0;
  const auto next = [&](u32 at) {
    const bool turns = left == 0;
    left = (turns ? span : left) - 1;
    const uint4 lo = low.next(turns), hi = TALL ? high.next(turns) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 w = ld_shared_v4(at + tile * UNIT_BYTES);
      mma_m16n8k16(chains[tile][0], lo.x, hi.x, lo.y, hi.y, w.x, w.y);
      mma_m16n8k16(chains[tile][1], lo.z, hi.z, lo.w, hi.w, w.z, w.w);
    }
  };
#pragma unroll 1
  for (int first = 0; first < units; first += EACH) {
    const u32 at = ring.wait_full() + warp * BLOCK_BYTES + lane * LANE_BYTES;
    if (first + EACH <= units) {
#pragma unroll
      for (int unit = 0; unit < EACH; ++unit) next(at + unit * TILES * UNIT_BYTES);
    } else {
#pragma unroll 1
      for (int unit = 0; unit < units - first; ++unit) next(at + unit * TILES * UNIT_BYTES);
    }
    ring.release(1);
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < (TALL ? 2 : 1); ++i)
      *(float2*)(sums + ((tile * WARPS + warp) * ROWS + g + i * 8) * 8 + 2 * t) = make_float2(
          chains[tile][0][2 * i] + chains[tile][1][2 * i], chains[tile][0][2 * i + 1] + chains[tile][1][2 * i + 1]);
}

// Multiplies the input with TILES x 8 columns. Threads of 128 x tile on get the sums of the tile: 8 i + j of row i and
// column j. TALL: there are more than eight rows of results. The warps beyond WARPS only wait for the others.
template <int TILES, bool TALL>
__device__ __forceinline__ float multiply(Ring& ring, const Phase& p, const Product& q, int parity) {
  // Sums as (tile, warp, row, column), for two products in turns: one barrier each.
  float* sums = (float*)(shared_memory + SUMS_AT) + parity * 2 * WARPS * ROWS * 8;
  if (threadIdx.x < WARPS * 32) multiply_part<TILES, TALL>(ring, p, q, sums);
  makers_sync();
  const int tile = threadIdx.x / 128, at = threadIdx.x % 128;
  float sum = 0.f;
  if (tile < TILES && at / 8 < q.outputs)
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[(tile * WARPS + w) * ROWS * 8 + at];
  return sum;
}

template <int TILES>
__device__ __forceinline__ float multiplied(Ring& ring, const Phase& p, const Product& q, int parity) {
  return q.outputs > 8 ? multiply<TILES, true>(ring, p, q, parity) : multiply<TILES, false>(ring, p, q, parity);
}

// The scheduler's step of a number of the chunk, of which e is the network's output.
__device__ __forceinline__ void step_chunk(const Call& c, int step, int at, float e) {
  const float* sizes = c.sizes + step * 7;
  float* chunk = (float*)(shared_memory + CHUNK_AT);
  const float x = chunk[at], bound = sizes[6], clean = fminf(fmaxf(sizes[0] * x + sizes[1] * e, -bound), bound);
  float next = sizes[2] * clean + sizes[3] * x + sizes[4] * e;
  if (step + 1 < c.draws) next += sizes[5] * __ldg(c.noise + (step + 1) * LENGTH * ACTIONS + at);
  chunk[at] = next;
}

// -- the loop --------------------------------------------------------------------------------------------------------

// The units of a block's tiles in the order in which `multiply` reads them.
__device__ __forceinline__ void push(Copier& ring, const Phase& p, const Product& q, Share mine) {
  const int lane = threadIdx.x & 31, units = units_of(p, q);
  const u64 once = policy_evict_first();
  const unsigned char* from = (const unsigned char*)q.weights + (u64)mine.first * units * UNIT_BYTES + lane * LANE_BYTES;
#pragma unroll 1
  for (int done = 0; done < mine.count;) {
    const int tiles = together(mine.count - done), all = units * tiles;
#pragma unroll 1
    for (int first = 0; first < all; first += STAGE_UNITS) {
      const u32 to = ring.open() + lane * LANE_BYTES;
#pragma unroll 1
      for (int unit = 0; unit < min(STAGE_UNITS, all - first); ++unit) {
        const int at = first + unit, tile = tiles == 2 ? at & 1 : 0, k = tiles == 2 ? at >> 1 : at;
        const unsigned char* part = from + (u64)((done + tile) * units + k) * UNIT_BYTES;
#pragma unroll
        for (int i = 0; i < 8; ++i) cp_async_16(to + unit * UNIT_BYTES + i * BLOCK_BYTES, part + i * BLOCK_BYTES, true, once);
        ring.end_unit();
      }
      ring.close();
    }
    done += tiles;
  }
}

// The tiles of a block. All blocks compute all of the network's output, which is phase c.count; of the last step block 0
// alone.
__device__ __forceinline__ Share tiles_of(const Call& c, int phase, const Product& q, bool second) {
  // The second product begins with the last block, so that no block has the rest of both.
  return phase == c.count ? Share{0, q.tiles} : deal(q.tiles, second ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x);
}
// A block without tiles leaves a phase out, so that others read faster, unless it stores a part of the input.
__device__ __forceinline__ bool idle(const Call& c, const Phase& p, int phase) {
  const int tiles = tiles_of(c, phase, p.first, false).count + tiles_of(c, phase, p.second, true).count;
  return tiles == 0 && !p.front.kept && !p.behind.kept;
}
__device__ __forceinline__ bool ends(const Call& c, int step) { return step + 1 < c.steps || blockIdx.x == 0; }

__device__ __forceinline__ void produce(const Call& c) {
  Copier ring;
#pragma unroll 1
  for (int step = 0; step < c.steps; ++step)
#pragma unroll 1
    for (int i = 0; i < c.count + ends(c, step); ++i)
#pragma unroll 1
      for (int second = 0; second < 2; ++second) {
        const Phase& p = phase_of(i);
        const Product& q = second ? p.second : p.first;
        push(ring, p, q, tiles_of(c, i, q, second));
      }
  cp_async_wait<0>();
}

__device__ __forceinline__ void consume(const Call& c) {
  Ring ring;
  int parity = 0;
  const int own = threadIdx.x / 128, row = threadIdx.x % 128 / 8;  // of a pair of tiles
  float* chunk = (float*)(shared_memory + CHUNK_AT);
  for (int at = threadIdx.x; at < LENGTH * ACTIONS; at += MAKERS * 32) chunk[at] = __ldg(c.noise + at);
  if (threadIdx.x < ROW_BYTES / 4) ((u32*)(shared_memory + ZEROS_AT))[threadIdx.x] = 0;
  makers_sync();
#pragma unroll 1
  for (int index = 0; index < c.steps; ++index)
#pragma unroll 1
    for (int i = 0; i < c.count + ends(c, index); ++i) {
      const Step step{index};
      const Phase& p = phase_of(i);
      if (idle(c, p, i)) continue;
      make_input(c, p, step);
#pragma unroll 1
      for (int second = 0; second < 2; ++second) {
        const Product& q = second ? p.second : p.first;
        const Share mine = tiles_of(c, i, q, second);
        const int columns = q.tiles * 8;
#pragma unroll 1
        for (int done = 0; done < mine.count;) {
          const int tiles = together(mine.count - done), column = (mine.first + done + own) * 8 + threadIdx.x % 8;
          const bool real = own < tiles && row < q.outputs;
          const float bias = real ? __ldg(q.bias + column) : 0.f;
          parity ^= 1;
          const float sum = bias + (tiles == 2 ? multiplied<2>(ring, p, q, parity) : multiplied<1>(ring, p, q, parity));
          done += tiles;
          if (!real) continue;
          if (i < c.count)
            st_relaxed((u32*)step.half(q.sums, q.outputs * columns) + row * columns + column, step.stamped(sum));
          else if (column < ACTIONS)
            step_chunk(c, index, row * ACTIONS + column, sum);
        }
      }
      if (i == c.count) makers_sync();
    }
  if (blockIdx.x == 0)
    for (int at = threadIdx.x; at < LENGTH * ACTIONS; at += MAKERS * 32) c.actions[at] = chunk[at];
}

extern "C" __global__ void __launch_bounds__((MAKERS + 1) * 32, 1) unet(const __grid_constant__ Call c) {
  if (threadIdx.x == 0) Stages().init();
  const int words = (c.count + 1) * (int)sizeof(Phase) / 8;
  for (int at = threadIdx.x; at < words; at += (MAKERS + 1) * 32) ((u64*)(shared_memory + TABLE_AT))[at] = ((const u64*)c.phases)[at];
  __syncthreads();
  if (threadIdx.x < MAKERS * 32)
    consume(c);
  else
    produce(c);
}
