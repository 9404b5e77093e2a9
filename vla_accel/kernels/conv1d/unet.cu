// All denoising steps of a 1-D U-Net in one launch, for one sequence of up to 16 rows. This file follows
// persistent/blocks.cu and the argument blocks of unet.py.
//
// A step is a table of phases. In a phase every block makes the phase's whole input in its shared memory, in BF16: it
// reads the sums of the phase before from L2 and norms them itself, which takes less time than a second hand-off. Then
// it multiplies the input with the weights of its own columns, which the copying warp has brought meanwhile, and stores
// float32 sums. Every block also keeps the noisy chunk and computes the scheduler's step.
//
// The host passes as macros: LENGTH and ACTIONS of the chunk, HELD, the quads of a group that a lane holds while it norms
// them, and the offsets INPUT_AT, SUMS_AT, CHUNK_AT and TABLE_AT.

#define ROWS 16
#define ROW_BYTES 64  // of 32 columns
#define CHAINS 4

// Phase `index` of a step; behind the last one that of the network's output.
__device__ __forceinline__ const Phase& phase_of(int index) { return ((const Phase*)(shared_memory + TABLE_AT))[index]; }

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
// x tanh(log(1 + e^x)): with u = e^x the tanh is (u² + 2 u) / (u² + 2 u + 2).
__device__ __forceinline__ float mish(float x) {
  const float u = exp2_fast(fminf(x, 20.f) * 1.44269504f), n = u * (u + 2.f);
  return x > 20.f ? x : x * n / (n + 2.f);
}
__device__ __forceinline__ float4 mish_of(float4 v, float mean, float factor, float4 weight, float4 bias) {
  return make_float4(mish((v.x - mean) * factor * weight.x + bias.x), mish((v.y - mean) * factor * weight.y + bias.y),
                     mish((v.z - mean) * factor * weight.z + bias.z), mish((v.w - mean) * factor * weight.w + bias.w));
}
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ __forceinline__ float4 constants(const float* from, int column) { return __ldg((const float4*)(from + column)); }

// Adds the residual, stores a value as the phase's input and, where a later phase needs it, for that one: each block
// stores its share.
__device__ __forceinline__ void finish_input(const Phase& p, const Source& s, int first, int row, int column, float4 v) {
  const int at = row * s.channels + column;
  if (s.residual) v = plus(v, *(const float4*)(s.residual + at));
  if (s.kept && at / 4 % (int)gridDim.x == (int)blockIdx.x) *(float4*)(s.kept + at) = v;
  put_input(p, row, first + column, v);
}

// A warp norms a group of channels at a time.
__device__ __forceinline__ void normed_input(const Phase& p, const Source& s, int first, const float* film) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int width = s.channels / s.groups, across = width / 4, count = p.rows * across;
#pragma unroll 1
  for (int group = warp; group < s.groups; group += WARPS) {
    float4 held[HELD];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int at = i * 32 + lane, row = at / across, column = group * width + at % across * 4;
      held[i] = at < count ? *(const float4*)(s.rows + row * s.channels + column) : make_float4(0.f, 0.f, 0.f, 0.f);
      sum += held[i].x + held[i].y + held[i].z + held[i].w;
    }
    const float mean = warp_sum(sum) / (count * 4);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (i * 32 + lane >= count) continue;
      const float x = held[i].x - mean, y = held[i].y - mean, z = held[i].z - mean, w = held[i].w - mean;
      squares += x * x + y * y + z * z + w * w;
    }
    const float factor = rsqrtf(warp_sum(squares) / (count * 4) + s.eps);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int at = i * 32 + lane, row = at / across, column = group * width + at % across * 4;
      if (at >= count) continue;
      float4 v = mish_of(held[i], mean, factor, constants(s.weight, column), constants(s.bias, column));
      if (s.films > 1) v = times(v, constants(film, column));
      if (s.films > 0) v = plus(v, constants(film, (s.films - 1) * s.channels + column));
      finish_input(p, s, first, row, column, v);
    }
  }
}

__device__ __forceinline__ void plain_input(const Phase& p, const Source& s, int first) {
  const int across = s.channels / 4, count = p.rows * across;
#pragma unroll 1
  for (int at = threadIdx.x; at < count; at += WARPS * 32) {
    const int row = at / across, column = at % across * 4;
    finish_input(p, s, first, row, column, *(const float4*)(s.rows + row * s.channels + column));
  }
}

// The noisy chunk, with zeros up to a multiple of 32 channels.
__device__ __forceinline__ void chunk_input(const Phase& p) {
  const float* chunk = (const float*)(shared_memory + CHUNK_AT);
#pragma unroll 1
  for (int at = threadIdx.x; at < p.rows * p.blocks * 32; at += WARPS * 32) {
    const int row = at / (p.blocks * 32), column = at % (p.blocks * 32);
    u16* to = (u16*)(shared_memory + INPUT_AT) + (column / 32 * p.rows + row) * 32 + column % 32;
    *to = round_bf16(column < ACTIONS ? chunk[row * ACTIONS + column] : 0.f);
  }
}

__device__ __forceinline__ void make_input(const Call& c, const Phase& p, int step) {
  int first = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Source s = i ? p.behind : p.front;
    if (s.channels == 0) continue;
    if (s.groups)
      normed_input(p, s, first, c.conditions + (u64)step * c.films + s.condition);
    else if (s.rows)
      plain_input(p, s, first);
    else
      chunk_input(p);
    first += s.channels;
  }
  consumers_sync();
}

// -- products --------------------------------------------------------------------------------------------------------

// Blocks of 32 columns of K of a product: all channels of one tap, then those of the next.
__device__ __forceinline__ int blocks_of(const Phase& p, const Product& q) { return p.blocks * q.taps; }
__device__ __forceinline__ int units_of(const Phase& p, const Product& q) { return (blocks_of(p, q) + WARPS - 1) / WARPS; }
// The tiles of a block: the second product begins with the last block, so that no block has the rest of both.
__device__ __forceinline__ Share tiles_of(const Product& q, bool second) {
  return deal(q.tiles, second ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x);
}

// The input as the taps of a convolution.
struct Taps {
  int rows, outputs, stride, pad;
  u32 input;
  // The part that lane 4 g + t has of a block: 8 channels of the row that a tap reads for an output row.
  __device__ __forceinline__ uint4 operator()(int block, int tap, int output) const {
    const int row = output * stride + tap - pad;
    if (output >= outputs || row < 0 || row >= rows) return make_uint4(0, 0, 0, 0);
    return ld_shared_v4(input + (block * rows + row) * ROW_BYTES);
  }
};

// Multiplies the input with eight columns. Thread 8 i + j of the first 128 gets the sum of row i and column j.
__device__ __forceinline__ float multiply(Ring& ring, const Phase& p, const Product& q, int parity) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int blocks = p.blocks, count = q.taps, units = units_of(p, q);
  const Taps taps{p.rows, q.outputs, q.stride, q.pad, smem_of(shared_memory + INPUT_AT) + t * LANE_BYTES};
  float chains[CHAINS][4];
  clear<CHAINS * 4>((float*)chains);
  int tap = 0, block = warp;
#pragma unroll 1
  for (int first = 0; first < units; first += STAGE_UNITS) {
    const u32 at = ring.wait_full() + warp * BLOCK_BYTES + lane * LANE_BYTES;
#pragma unroll
    for (int unit = 0; unit < STAGE_UNITS; ++unit) {
      while (block >= blocks) block -= blocks, ++tap;
      if (tap < count)
        mma32(chains[unit % CHAINS], taps(block, tap, g), taps(block, tap, g + 8), ld_shared_v4(at + unit * UNIT_BYTES));
      block += WARPS;
    }
    ring.release(1);
  }
  // Sums as (warp, row, column), for two tiles in turns: one barrier a tile.
  float* sums = (float*)(shared_memory + SUMS_AT) + parity * WARPS * ROWS * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = chains[0][i];
#pragma unroll
    for (int chain = 1; chain < CHAINS; ++chain) sum += chains[chain][i];
    sums[(warp * ROWS + g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum;
  }
  consumers_sync();
  float sum = 0.f;
  if (threadIdx.x < ROWS * 8)
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w * ROWS * 8 + threadIdx.x];
  return sum;
}

struct Consumer {
  Ring ring;
  Hop hop;
  int parity = 0;

  __device__ __forceinline__ void product(const Phase& p, const Product& q, bool second) {
    const Share mine = tiles_of(q, second);
    const int row = threadIdx.x / 8;
#pragma unroll 1
    for (int tile = mine.first; tile < mine.first + mine.count; ++tile) {
      const int column = tile * 8 + threadIdx.x % 8;
      const float bias = __ldg(q.bias + column), sum = multiply(ring, p, q, parity ^= 1);
      if (row < q.outputs) q.sums[row * q.tiles * 8 + column] = sum + bias;
    }
  }

  // The network's output, and with it the scheduler's step of the chunk. Every block computes all of it.
  __device__ __forceinline__ void end_step(const Call& c, int step) {
    const Phase& p = phase_of(c.count);
    const Product& q = p.first;
    const float* sizes = c.sizes + step * 7;
    float* chunk = (float*)(shared_memory + CHUNK_AT);
    make_input(c, p, step);
#pragma unroll 1
    for (int tile = 0; tile < q.tiles; ++tile) {
      const int row = threadIdx.x / 8, column = tile * 8 + threadIdx.x % 8;
      const float sum = multiply(ring, p, q, parity ^= 1);
      if (row >= LENGTH || column >= ACTIONS) continue;
      const int at = row * ACTIONS + column;
      const float e = sum + __ldg(q.bias + column), x = chunk[at], bound = sizes[6];
      const float clean = fminf(fmaxf(sizes[0] * x + sizes[1] * e, -bound), bound);
      float next = sizes[2] * clean + sizes[3] * x + sizes[4] * e;
      if (step + 1 < c.draws) next += sizes[5] * __ldg(c.noise + (step + 1) * LENGTH * ACTIONS + at);
      chunk[at] = next;
    }
    consumers_sync();
  }
};

// -- the loop --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void push(Copier& ring, const Phase& p, const Product& q, Share mine) {
  const int lane = threadIdx.x & 31, units = units_of(p, q);
  const u64 once = policy_evict_first();
  const unsigned char* from = (const unsigned char*)q.weights + (u64)mine.first * units * UNIT_BYTES + lane * LANE_BYTES;
#pragma unroll 1
  for (int tile = 0; tile < mine.count; ++tile)
#pragma unroll 1
    for (int first = 0; first < units; first += STAGE_UNITS) {
      const u32 to = ring.open() + lane * LANE_BYTES;
#pragma unroll 1
      for (int unit = 0; unit < min(STAGE_UNITS, units - first); ++unit, from += UNIT_BYTES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) cp_async_16(to + unit * UNIT_BYTES + i * BLOCK_BYTES, from + i * BLOCK_BYTES, true, once);
        ring.end_unit();
      }
      ring.close();
    }
}

// Only block 0 ends the last step.
__device__ __forceinline__ bool ends(const Call& c, int step) { return step + 1 < c.steps || blockIdx.x == 0; }

__device__ __forceinline__ void produce(const Call& c) {
  Copier ring;
#pragma unroll 1
  for (int step = 0; step < c.steps; ++step) {
#pragma unroll 1
    for (int i = 0; i < c.count; ++i) {
      const Phase& p = phase_of(i);
      push(ring, p, p.first, tiles_of(p.first, false));
      push(ring, p, p.second, tiles_of(p.second, true));
    }
    const Phase& p = phase_of(c.count);
    if (ends(c, step)) push(ring, p, p.first, {0, p.first.tiles});
  }
  cp_async_wait<0>();
}

__device__ __forceinline__ void consume(const Call& c) {
  Consumer me{Ring(), Hop{c.arrivals}};
  float* chunk = (float*)(shared_memory + CHUNK_AT);
  for (int at = threadIdx.x; at < LENGTH * ACTIONS; at += WARPS * 32) chunk[at] = __ldg(c.noise + at);
  consumers_sync();
#pragma unroll 1
  for (int step = 0; step < c.steps; ++step) {
#pragma unroll 1
    for (int i = 0; i < c.count; ++i) {
      const Phase& p = phase_of(i);
      if (i > 0) me.hop.wait();
      make_input(c, p, step);
      me.product(p, p.first, false);
      me.product(p, p.second, true);
      me.hop.arrive();
      me.hop.expect(gridDim.x);
    }
    if (!ends(c, step)) return;
    me.hop.wait();
    me.end_step(c, step);
  }
  for (int at = threadIdx.x; at < LENGTH * ACTIONS; at += WARPS * 32) c.actions[at] = chunk[at];
  // All blocks have arrived for the last time, and no other block waits. The next launch finds a zero.
  if (threadIdx.x == 0) *c.arrivals = 0;
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1) unet(const __grid_constant__ Call c) {
  if (threadIdx.x == 0) Stages().init();
  // The table goes to shared memory: an acquire of a hand-off empties the L1 cache.
  const int words = (c.count + 1) * (int)sizeof(Phase) / 8;
  for (int at = threadIdx.x; at < words; at += (WARPS + 1) * 32) ((u64*)(shared_memory + TABLE_AT))[at] = ((const u64*)c.phases)[at];
  __syncthreads();
  if (threadIdx.x < WARPS * 32)
    consume(c);
  else
    produce(c);
}
