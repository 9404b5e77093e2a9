// The epilogue takes the sums of `gemm.cu` to memory: norm, bias or shift, activation or rotation, gate, rounding,
// residual.
//
// A norm needs two numbers of a row, its sum and its sum of squares, so it costs no pass over the rows: the product that
// writes x (RESIDUAL) also writes these moments of every 64 columns, and the product that reads x (NORM) multiplies it
// as it is, and scales and shifts the sums: norm(x) W = rstd (x W - mean (1 W)).
//
// Macros besides `gemm.cu`'s: RESIDUAL (out += gate ∘ product), MEASURED (moments without a residual), ADAPTIVE (there is
// a gate, or the next norm has a scale; without it a residual needs fewer registers), NORM (0 none, 1 RMSNorm, 2
// LayerNorm), PAIRS, ROPE (q and k are rotated; it implies PAIRS). With PAIRS the weight's rows are pairs, `half` rows
// apart within groups of 2 `half` (the halves of a head, gate and up), and a tensor map of five dimensions brings eight
// rows of the first side and eight of the second in turns: so a thread's two rows are a pair. `arguments.py` describes
// the block `Call`.

constexpr int TILE_W = 64 * BLOCKS * GROUPS, TILE_T = PARTS * WIDTH;  // Weight rows and tokens of a block.
constexpr int W_BYTES = WIDEN ? 64 : 128;                             // Of a weight row in a stage.
constexpr int STAGE = TILE_W * W_BYTES + TILE_T * 128;
constexpr int CLUSTER = ACROSS * ALONG * SPLIT;
constexpr int CONSUMERS = GROUPS * 128;
constexpr bool GATED = ACTIVATION == ACTIVATION_GEGLU || ACTIVATION == ACTIVATION_SWIGLU;
// A block of 64 weight rows gives COLUMNS output columns. Eight rows of the staging, PITCH bytes apart, begin at eight
// different multiples of 16 modulo 128, so that together they meet all banks.
constexpr int COLUMNS = GATED ? 32 : 64;
constexpr int PITCH = COLUMNS * 2 + 16;
constexpr int NORMING = 96;  // Threads that load norms.
enum Barrier { STAGING_BARRIER = 1, NORMS_BARRIER = 14, CONSUMERS_BARRIER = 15 };  // STAGING_BARRIER + group.

__device__ __forceinline__ float gelu(float x) {
  const float u = x * fmaf(0.0356774081f * x, x, 0.7978845608f), h = 0.5f * x;
  return fmaf(h, tanh_fast(u), h);
}
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ u32 pack_half2(float low, float high) {
  return KIND == 1 ? pack_f16x2(low, high) : pack_bf16x2(low, high);
}
__device__ __forceinline__ float widen(u16 v) {
  return KIND == 1 ? widen_f16(v) : __uint_as_float((u32)v << 16);
}
// This scales two 16-bit values and rounds them to E4M3, saturated.
__device__ __forceinline__ u32 quantize2(u32 two, float inverse) {
  const float high = widen((u16)(two >> 16)) * inverse, low = widen((u16)two) * inverse;
  return pack_e4m3x2(low, high);
}
__device__ __forceinline__ u32 quantize4(u32 a, u32 b, float inverse) {
  return quantize2(a, inverse) | (quantize2(b, inverse) << 16);
}

// -- norms of the rows of x -------------------------------------------------------------------------------------------

// This writes a pair for each of TILE_T tokens from `token` on to shared memory: the factor scale * rstd, and the shift
// -rstd * mean, 0 for RMSNorm, or with ROPE the token's position. The three warps that would be idle do it, in the
// time that a tile's first chunks take.
__device__ __forceinline__ void load_norms(u32 norms, int token, const Call& c) {
  for (int t = threadIdx.x - CONSUMERS - 32; t < TILE_T; t += NORMING) {
    float sums = 0.f, squares = 0.f;
    int position = 0;
    if (token + t < c.rows) {
#pragma unroll 8
      for (int i = 0; i < c.moment_tiles; ++i) {
        squares += c.squares[(u64)i * c.rows + token + t];
        if (NORM == 2) sums += c.sums[(u64)i * c.rows + token + t];
      }
      if (ROPE) position = c.starts[(token + t) / c.tokens] + (token + t) % c.tokens;
    }
    const float mean = NORM == 2 ? sums / c.width : 0.f;
    const float variance = NORM == 2 ? fmaxf(squares / c.width - mean * mean, 0.f) : squares / c.width;
    const float rstd = rsqrtf(variance + c.eps);
    st_shared_f2(norms + t * 8, rstd * c.scale, ROPE ? __int_as_float(position) : NORM == 2 ? -rstd * mean : 0.f);
  }
  bar_arrive<CONSUMERS + NORMING>(NORMS_BARRIER);
}
__device__ __forceinline__ void wait_for_norms() {
  if constexpr (NORM) bar_sync<CONSUMERS + NORMING>(NORMS_BARRIER);
}

// -- constants of the weight rows -------------------------------------------------------------------------------------

// A thread has two weight rows of a block of 64. These are their constants.
struct Rows {
  float scale[2], bias[2], sum[2], gate[2];
  int pair;  // The column of a pair's angles in a rotation table; negative for values, which are not rotated.
};

// `column`: the first output column of the block.
__device__ __forceinline__ Rows load_rows(const Call& c, int column) {
  Rows rows = {{1.f, 1.f}, {0.f, 0.f}, {0.f, 0.f}, {1.f, 1.f}, -1};
  const int first = ((threadIdx.x & 127) >> 5) * 16, lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = column + first + (lane >> 2) + 8 * i;
    if (at >= c.columns) continue;
    if (!GATED && c.bias) rows.bias[i] = widen(__ldg(c.bias + at));
    if (!GATED && !PAIRS && c.shift) rows.bias[i] = __ldg(c.shift + at);
    if (ADAPTIVE && c.gate) rows.gate[i] = __ldg(c.gate + at);
    if (NORM == 2) rows.sum[i] = __ldg(c.weight_sums + at);
  }
  const int row = column * (64 / COLUMNS) + first;
  int at = row + (lane >> 2), next = 8;  // The weight rows in memory: `at` and `at + next`.
  if (PAIRS) {
    // `row` is in the order of the tensor map, of 16 rows for eight pairs.
    const int group = row / (2 * c.half), pair = row % (2 * c.half) / 16 * 8 + (lane >> 2);
    at = group * 2 * c.half + pair, next = c.half;
    if (c.shift) {
      rows.bias[0] = __ldg(c.shift + at);
      rows.bias[1] = __ldg(c.shift + at + next);
    }
    if (ROPE && group < c.heads + c.kv_heads) rows.pair = pair;
  }
  if (WIDEN && c.scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (at + next * i < c.columns * (64 / COLUMNS)) rows.scale[i] = __ldg(c.scales + at + next * i);
  }
  return rows;
}

// Where eight columns of heads go, those from `at` on in the order of the pairs.
__device__ __forceinline__ u16* head_columns(int at, int token, const Call& c) {
  const int size = 2 * c.half, head = at / size, inside = at % size;
  const int column = inside / 16 * 8 + (inside / 8 & 1) * c.half;
  if (head < c.heads) return (u16*)c.out + ((u64)token * c.heads + head) * size + column;
  if (head < c.heads + c.kv_heads) return c.k + ((u64)token * c.kv_heads + head - c.heads) * size + column;
  return c.v + ((u64)token * c.kv_heads + head - c.heads - c.kv_heads) * size + column;
}

// -- the residual -----------------------------------------------------------------------------------------------------

// This loads what `store_tile` of the same tokens and columns will add to. It is called early, because global memory is
// far.
template <int COUNT>
__device__ __forceinline__ void load_residual(uint4 (&held)[(COUNT + 1) / 2], int token, int end, int column,
                                              const Call& c) {
#pragma unroll
  for (int n = 0; n < (COUNT + 1) / 2; ++n) {
    const int i = (threadIdx.x & 127) + 128 * n, t = i / 8, to = column + i % 8 * 8;
    held[n] = make_uint4(0, 0, 0, 0);
    if (i < COUNT * 64 && token + t < end && to < c.columns)
      held[n] = ld_global_v4((u16*)c.out + (u64)(token + t) * c.columns + to);
  }
}

__device__ __forceinline__ u32 add_two(u32 a, u32 b, float& low, float& high) {
  const u32 sum = pack_half2(widen((u16)a) + widen((u16)b), widen((u16)(a >> 16)) + widen((u16)(b >> 16)));
  low = widen((u16)sum);
  high = widen((u16)(sum >> 16));
  return sum;
}
// This sums over the eight lanes that hold 64 columns of a token.
__device__ __forceinline__ float sum_of_eight(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  v += __shfl_xor_sync(~0u, v, 2);
  return v + __shfl_xor_sync(~0u, v, 4);
}

// This writes the moments of a token's rounded columns: a lane has eight of them, from `to` on. `inside`: whether the
// columns are in the tensor.
__device__ __forceinline__ void write_moments(const float (&r)[8], bool inside, int token, int to, const Call& c) {
  float one = 0.f, two = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) one += r[i], two += r[i] * r[i];
  one = sum_of_eight(one);
  two = sum_of_eight(two);
  if (inside && to % 64 == 0) {
    c.sums_out[(u64)(to / 64) * c.rows + token] = one;
    c.squares_out[(u64)(to / 64) * c.rows + token] = two;
  }
}

// This returns held + v for eight columns from `to` on, and writes the moments of the rounded sum, which is what the
// next norm sees, and the sum scaled for it.
__device__ __forceinline__ uint4 add_residual(const uint4& v, const uint4& held, bool inside, int token, int to,
                                              const Call& c) {
  float r[8];
  const uint4 sum = make_uint4(add_two(v.x, held.x, r[0], r[1]), add_two(v.y, held.y, r[2], r[3]),
                               add_two(v.z, held.z, r[4], r[5]), add_two(v.w, held.w, r[6], r[7]));
  if (c.squares_out) write_moments(r, inside, token, to, c);
  if (ADAPTIVE && inside && c.scaled) {
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i] *= 1.f + __ldg(c.next_scale + to + i);
    *(uint4*)(c.scaled + (u64)token * c.columns + to) = make_uint4(
        pack_half2(r[0], r[1]), pack_half2(r[2], r[3]), pack_half2(r[4], r[5]), pack_half2(r[6], r[7]));
  }
  return sum;
}

// This writes the moments of the rows themselves, for a norm of heads.
__device__ __forceinline__ void measure(const uint4& v, bool inside, int token, int to, const Call& c) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
  float r[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) r[2 * i] = widen((u16)pairs[i]), r[2 * i + 1] = widen((u16)(pairs[i] >> 16));
  write_moments(r, inside, token, to, c);
}

// -- a tile -----------------------------------------------------------------------------------------------------------

// This rotates the pairs v[0], v[2] and v[1], v[3] of two tokens, those before `end`. `norms`: from `load_norms`.
__device__ __forceinline__ void rotate(float (&v)[4], const float (&norms)[4], const Rows& rows, int token, int end,
                                       const Call& c) {
  if (rows.pair < 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Shares of a tile's tokens may end beyond it, where there is no position.
    if (token + i >= end) continue;
    const int at = __float_as_int(norms[i * 2 + 1]) * c.half + rows.pair;
    const float cos = __ldg(c.cos + at), sin = __ldg(c.sin + at), low = v[i], high = v[i + 2];
    v[i] = low * cos - high * sin;
    v[i + 2] = high * cos + low * sin;
  }
}

// This turns the sums of two weight rows and two tokens from `token` on into two packed values, or one with a gate.
__device__ __forceinline__ void finish_four(u32* packed, const float* sums, u32 norms, int token, int end,
                                            const Rows& rows, const Call& c) {
  float v[4], n[4] = {c.scale, 0.f, c.scale, 0.f};  // n: (factor, shift) of two tokens
  if constexpr (NORM) {
    const float4 two = ld_shared_f4(norms);
    n[0] = two.x, n[1] = two.y, n[2] = two.z, n[3] = two.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = rows.bias[i / 2];
    if (NORM == 2) v[i] = fmaf(n[i % 2 * 2 + 1], rows.sum[i / 2], v[i]);
    v[i] = fmaf(WIDEN ? sums[i] * rows.scale[i / 2] : sums[i], n[i % 2 * 2], v[i]);
    if (ADAPTIVE) v[i] *= rows.gate[i / 2];
  }
  if constexpr (ROPE) rotate(v, n, rows, token, end, c);
  if constexpr (GATED) {
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = ACTIVATION == ACTIVATION_SWIGLU ? silu(v[i]) : gelu(v[i]);
    packed[0] = pack_half2(v[0] * v[2], v[1] * v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (ACTIVATION == ACTIVATION_GELU) v[i] = gelu(v[i]);
      if (ACTIVATION == ACTIVATION_GELU_ERF) v[i] = 0.5f * v[i] * (1.f + erff(0.7071067811865476f * v[i]));
      if (ACTIVATION == ACTIVATION_RELU) v[i] = fmaxf(v[i], 0.f);
      if (ACTIVATION == ACTIVATION_QUICK_GELU) v[i] = silu(1.702f * v[i]) * 0.5875440658049354f;
    }
    packed[0] = pack_half2(v[0], v[1]);
    packed[1] = pack_half2(v[2], v[3]);
  }
}

// This transposes a warp's matrices of 8 x 8 on their way to the staging, where a token's columns are next to each
// other.
template <int MATRICES>
__device__ __forceinline__ void stage(const u32 (&packed)[MATRICES], u32 staging) {
  // Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, row = lane & 7, matrix = lane >> 3;
  const u32 at = GATED ? staging + (matrix * 8 + row) * PITCH + warp * 16
                       : staging + ((matrix >> 1) * 8 + row) * PITCH + warp * 32 + (matrix & 1) * 16;
  constexpr int STEP = (GATED ? 8 : 4) * PITCH;  // Bytes from a matrix to the next, on average.
  constexpr int FOURS = MATRICES / 4 * 4;
#pragma unroll
  for (int i = 0; i < FOURS; i += 4)
    stmatrix_x4_trans(at + i * STEP, packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
  if (MATRICES % 4 >= 2) stmatrix_x2_trans(at + FOURS * STEP, packed[FOURS % MATRICES], packed[(FOURS + 1) % MATRICES]);
  if (MATRICES % 2) stmatrix_x1_trans(at + (MATRICES - 1) * STEP, packed[MATRICES - 1]);
}

// This writes the staged rows of COUNT times eight tokens to memory. A thread has EACH columns, a token PIECES threads.
template <int COUNT>
__device__ __forceinline__ void write_rows(u32 staging, int token, int end, int column, const uint4* held,
                                           const Call& c) {
  constexpr int EACH = NARROW ? 16 : 8, PIECES = COLUMNS / EACH;
#pragma unroll
  for (int n = 0; n < (COUNT * 8 * PIECES + 127) / 128; ++n) {
    const int i = (threadIdx.x & 127) + 128 * n;
    if (i >= COUNT * 8 * PIECES) break;  // With moments these are whole warps, whose sums may shuffle.
    const int t = i / PIECES, piece = i % PIECES, to = column + piece * EACH;
    const bool inside = token + t < end && to < c.columns;
    const u32 from = staging + t * PITCH + piece * EACH * 2;
    uint4 v = ld_shared_v4(from);
    if constexpr (NARROW) {
      const uint4 w = ld_shared_v4(from + 16);
      v = make_uint4(quantize4(v.x, v.y, c.inverse), quantize4(v.z, v.w, c.inverse), quantize4(w.x, w.y, c.inverse),
                     quantize4(w.z, w.w, c.inverse));
    }
    if constexpr (RESIDUAL) v = add_residual(v, held[n], inside, token + t, to, c);
    if constexpr (MEASURED) measure(v, inside, token + t, to, c);
    if (!inside) continue;
    if constexpr (ROPE)
      *(uint4*)head_columns(to, token + t, c) = v;
    else
      *(uint4*)((unsigned char*)c.out + ((u64)(token + t) * c.columns + to) * (NARROW ? 1 : 2)) = v;
  }
}

// This writes the sums of COUNT times eight tokens from `token` on, those before `end`, of one block of weight rows
// whose first output column is `column`. The sums come in the layout of wgmma: lane 4 g + t has weight rows g and g + 8
// of its warp's 16, and tokens 2 t and 2 t + 1. `held` comes from `load_residual`; `norms` is the address of the first
// token's pair.
template <int COUNT>
__device__ __forceinline__ void store_tile(const float* sums, u32 staging, int token, int end, int column, int group,
                                           const uint4* held, u32 norms, const Rows& rows, const Call& c) {
  constexpr int OF_EIGHT = GATED ? 1 : 2;
  u32 packed[COUNT * OF_EIGHT];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const int first = j * 8 + (threadIdx.x & 3) * 2;
    finish_four(packed + j * OF_EIGHT, sums + 4 * j, norms + first * 8, token + first, end, rows, c);
  }
  stage(packed, staging);
  bar_sync<128>(STAGING_BARRIER + group);
  write_rows<COUNT>(staging, token, end, column, held, c);
  // The staging may be written again.
  bar_sync<128>(STAGING_BARRIER + group);
}
