// The epilogue takes the sums of `gemm.cu` to memory: bias, activation, rounding, the residual, the norms on either
// side.
//
// A norm without weights (they are folded into the product that follows) needs two numbers of a row, so it costs no
// pass over the rows: the product that writes x (RESIDUAL) also writes the moments of every 64 columns, and the product
// that reads x (NORM) multiplies it as it is, and scales and shifts the sums: norm(x) W = rstd (x W - mean (1 W)).
//
// Macros besides `gemm.cu`'s: RESIDUAL (out += the product), NORM (0 none, 1 RMSNorm, 2 LayerNorm, 3 RMSNorm by
// suffix.cu's moments), MOMENTS (K / 64: a row of x has so many pairs of moments), SUFFIX (suffix.cu). The argument block `Call` is described in `arguments.py`.

#define TILE_W (64 * BLOCKS * GROUPS)
#define TILE_T (PARTS * WIDTH)
#define STAGE ((TILE_W + TILE_T) * 128)
#define CLUSTER (ACROSS * ALONG * SPLIT)
#define CONSUMERS (GROUPS * 128)
// A block of 64 weight rows gives COLUMNS output columns. Eight rows of the staging, PITCH bytes apart, begin at eight
// different multiples of 16 modulo 128, so that together they meet all banks.
#define GATED (ACTIVATION == ACTIVATION_GEGLU || ACTIVATION == ACTIVATION_SWIGLU)
#define COLUMNS (GATED ? 32 : 64)
#define PITCH (COLUMNS * 2 + 16)

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

#if NORM
#define NORMING 96
// This writes (scale rstd, -scale rstd mean) of TILE_T tokens from `token` on to shared memory; the mean is 0 for
// RMSNorm. The three warps that would be idle do it, in the time that a tile's first chunks take.
__device__ __forceinline__ void load_norms(u32 norms, int token, const Call& c) {
  for (int t = threadIdx.x - CONSUMERS - 32; t < TILE_T; t += NORMING) {
#if NORM == 3
    // The second number of a pair is the token's position.
    float squares = 0.f;
    int position = 0;
    if (token + t < c.rows) {
#pragma unroll 8
      for (int i = 0; i < c.suffix.tiles; ++i) squares += c.suffix.squares[(u64)i * c.rows + token + t];
      if (SUFFIX == 3) position = c.suffix.lengths[(token + t) / c.suffix.tokens] + (token + t) % c.suffix.tokens;
    }
    st_shared_f2(norms + t * 8, rsqrtf(squares / c.suffix.width + c.eps) * c.scale, __int_as_float(position));
#else
    // Means count from the first one, so that nothing cancels: var = (Σ inside / 64 + Σ (mean_i - mean)²) / MOMENTS.
    float first = 0.f, one = 0.f, two = 0.f, inside = 0.f;
    if (token + t < c.rows) {
      const float2* from = c.moments + token + t;
      if (NORM == 2) first = from->x;
#pragma unroll 6
      for (int i = 0; i < MOMENTS; ++i) {
        const float2 part = from[(u64)i * c.rows];
        one += part.x - first;
        two += (part.x - first) * (part.x - first);
        inside += part.y;
      }
    }
    const float apart = one / MOMENTS;
    if (NORM == 2) two -= one * apart;
    const float factor = rsqrtf((inside / 64.f + two) / MOMENTS + c.eps) * c.scale;
    st_shared_f2(norms + t * 8, factor, NORM == 2 ? -factor * (first + apart) : 0.f);
#endif
  }
  bar_arrive<CONSUMERS + NORMING>(14);
}
__device__ __forceinline__ void wait_for_norms() {
  bar_sync<CONSUMERS + NORMING>(14);
}
#endif

#if RESIDUAL
// This fetches what `store_tile` of the same tokens and columns will add to. It is called early, because global memory
// is far.
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
// This returns held + v, and the moments of the rounded sum, which is what the norm sees.
__device__ __forceinline__ uint4 add_residual(const uint4& v, const uint4& held, float2& moments) {
  float r[8];
  const uint4 sum = make_uint4(add_two(v.x, held.x, r[0], r[1]), add_two(v.y, held.y, r[2], r[3]),
                               add_two(v.z, held.z, r[4], r[5]), add_two(v.w, held.w, r[6], r[7]));
  float one = 0.f, two = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) one += r[i];
  const float mean = sum_of_eight(one) / 64.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) two += (r[i] - mean) * (r[i] - mean);
  moments = make_float2(mean, sum_of_eight(two));
  return sum;
}
#endif

#if SUFFIX == 1
// This adds to the residual as `add_residual` does, and writes the rounded sum, scaled for the next norm, and its
// moments. `in`: whether these eight columns are in the tensor.
__device__ __forceinline__ uint4 add_gated(const uint4& v, const uint4& held, bool in, int token, int to, int tile,
                                           const Call& c) {
  float r[8];
  const uint4 sum = make_uint4(add_two(v.x, held.x, r[0], r[1]), add_two(v.y, held.y, r[2], r[3]),
                               add_two(v.z, held.z, r[4], r[5]), add_two(v.w, held.w, r[6], r[7]));
  if (c.suffix.squares_out) {
    float one = 0.f, two = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) one += r[i], two += r[i] * r[i];
    one = sum_of_eight(one);
    two = sum_of_eight(two);
    if (in && to % 64 == 0) {
      c.suffix.sums_out[(u64)tile * c.rows + token] = one;
      c.suffix.squares_out[(u64)tile * c.rows + token] = two;
    }
  }
  if (in && c.suffix.scaled) {
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i] *= 1.f + __ldg(c.suffix.next_scale + to + i);
    *(uint4*)(c.suffix.scaled + (u64)token * c.columns + to) = make_uint4(
        pack_half2(r[0], r[1]), pack_half2(r[2], r[3]), pack_half2(r[4], r[5]), pack_half2(r[6], r[7]));
  }
  return sum;
}
#endif

// A thread has two weight rows of a block of 64, whose first row is `column`: their bias and their sums. A gated
// product has neither.
struct Rows {
  float first_bias, second_bias, first_sum, second_sum;
#if SUFFIX
  float first_gate, second_gate;
  int pair;  // Where the pair's rotation is in a table's row; negative for values, which have none.
#endif
};
__device__ __forceinline__ Rows load_rows(const Call& c, int column) {
  Rows rows = {0.f, 0.f, 0.f, 0.f};
  const int at = column + ((threadIdx.x & 127) >> 5) * 16 + ((threadIdx.x & 31) >> 2);
  if (!GATED && c.bias) {
    if (at < c.columns) rows.first_bias = widen(__ldg(c.bias + at));
    if (at + 8 < c.columns) rows.second_bias = widen(__ldg(c.bias + at + 8));
  }
#if SUFFIX == 1
  rows.first_gate = c.suffix.gate && at < c.columns ? __ldg(c.suffix.gate + at) : 1.f;
  rows.second_gate = c.suffix.gate && at + 8 < c.columns ? __ldg(c.suffix.gate + at + 8) : 1.f;
#elif SUFFIX
  // `column` is of the output, of which a gated product has one for a pair.
  const int size = 2 * c.suffix.half, first = column * (64 / COLUMNS) + ((threadIdx.x & 127) >> 5) * 16;
  const int pair = pair_of(first % size, threadIdx.x & 31), group = first / size;
  if (c.suffix.shift) {
    rows.first_bias = __ldg(c.suffix.shift + group * size + pair);
    rows.second_bias = __ldg(c.suffix.shift + group * size + c.suffix.half + pair);
  }
  rows.pair = SUFFIX == 3 && group < c.suffix.heads + c.suffix.kv_heads ? pair : -1;
#endif
  if (NORM == 2) {
    if (at < c.columns) rows.first_sum = __ldg(c.weight_sums + at);
    if (at + 8 < c.columns) rows.second_sum = __ldg(c.weight_sums + at + 8);
  }
  return rows;
}

// This writes the sums of COUNT times eight tokens from `token` on, those before `end`, of one block of weight rows
// whose first output column is `column`. They come in the layout of wgmma: lane 4 g + t has weight rows g and g + 8 of
// its warp's 16, and tokens 2 t and 2 t + 1. A warp's matrices of 8 x 8 are transposed on their way to the staging,
// where a token's columns lie side by side. `held` comes from `load_residual`; `norms` is the address of the first
// token's pair.
template <int COUNT>
__device__ __forceinline__ void store_tile(const float* sums, u32 staging, int token, int end, int column, const Rows& rows,
                                     const Call& c, int group, const uint4* held, u32 norms) {
  constexpr int MATRICES = GATED ? COUNT : 2 * COUNT;
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  u32 packed[MATRICES];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = i < 2 ? rows.first_bias : rows.second_bias;
#if NORM
    const float4 two = ld_shared_f4(norms + (j * 8 + lane % 4 * 2) * 8);
    const float n[4] = {two.x, two.y, two.z, two.w};  // (factor, shift) of two tokens
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (NORM == 2) v[i] = fmaf(n[i % 2 * 2 + 1], i < 2 ? rows.first_sum : rows.second_sum, v[i]);
      v[i] = fmaf(sums[4 * j + i], n[i % 2 * 2], v[i]);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(sums[4 * j + i], c.scale, v[i]);
#endif
#if SUFFIX == 1
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= i < 2 ? rows.first_gate : rows.second_gate;
#elif SUFFIX == 3
    if (rows.pair >= 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Shares of a tile's tokens may end beyond it, where nobody has said a position.
        if (token + j * 8 + lane % 4 * 2 + i >= end) continue;
        const int place = __float_as_int(n[i * 2 + 1]) * c.suffix.half + rows.pair;
        const float cos = __ldg(c.suffix.cos + place), sin = __ldg(c.suffix.sin + place), low = v[i], high = v[i + 2];
        v[i] = low * cos - high * sin;
        v[i + 2] = high * cos + low * sin;
      }
    }
#endif
    if (GATED) {
#pragma unroll
      for (int i = 0; i < 2; ++i) v[i] = ACTIVATION == ACTIVATION_SWIGLU ? silu(v[i]) : gelu(v[i]);
      packed[j] = pack_half2(v[0] * v[2], v[1] * v[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (ACTIVATION == ACTIVATION_GELU) v[i] = gelu(v[i]);
      packed[2 * j % MATRICES] = pack_half2(v[0], v[1]);
      packed[(2 * j + 1) % MATRICES] = pack_half2(v[2], v[3]);
    }
  }
  // Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
  const int row = lane & 7, matrix = lane >> 3;
  const u32 at = GATED ? staging + (matrix * 8 + row) * PITCH + warp * 16
                                 : staging + ((matrix >> 1) * 8 + row) * PITCH + warp * 32 + (matrix & 1) * 16;
  constexpr int STEP = (GATED ? 8 : 4) * PITCH;  // A matrix is so many bytes from the next, on average.
  constexpr int FOURS = MATRICES / 4 * 4;
#pragma unroll
  for (int i = 0; i < FOURS; i += 4)
    stmatrix_x4_trans(at + i * STEP, packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
  if (MATRICES % 4 >= 2)
    stmatrix_x2_trans(at + FOURS * STEP, packed[FOURS % MATRICES], packed[(FOURS + 1) % MATRICES]);
  if (MATRICES % 2)
    stmatrix_x1_trans(at + (MATRICES - 1) * STEP, packed[MATRICES - 1]);
  bar_sync<128>(1 + group);
  constexpr int EACH = NARROW ? 16 : 8, PIECES = COLUMNS / EACH;  // A thread has EACH columns, a token PIECES threads.
#pragma unroll
  for (int n = 0; n < (COUNT * 8 * PIECES + 127) / 128; ++n) {
    const int i = thread + 128 * n;
    if (i >= COUNT * 8 * PIECES) break;  // With RESIDUAL these are whole warps, whose sums may shuffle.
    const int t = i / PIECES, piece = i % PIECES, to = column + piece * EACH;
    const u32 from = staging + t * PITCH + piece * EACH * 2;
    uint4 v = ld_shared_v4(from);
#if NARROW
    const uint4 w = ld_shared_v4(from + 16);
    v = make_uint4(quantize4(v.x, v.y, c.inverse), quantize4(v.z, v.w, c.inverse), quantize4(w.x, w.y, c.inverse),
                   quantize4(w.z, w.w, c.inverse));
#endif
#if SUFFIX == 1
    v = add_gated(v, held[n], token + t < end && to < c.columns, token + t, to, column / 64, c);
#elif RESIDUAL
    float2 moments;
    v = add_residual(v, held[n], moments);
    if (piece == 0 && token + t < end && to < c.columns)
      c.moments_out[(u64)(column / 64) * c.rows + token + t] = moments;
#endif
#if SUFFIX == 3
    if (token + t < end) *(uint4*)head_columns((u16*)c.out, to, token + t, c.suffix) = v;
#else
    if (token + t < end && to < c.columns)
      *(uint4*)((unsigned char*)c.out + ((u64)(token + t) * c.columns + to) * (NARROW ? 1 : 2)) = v;
#endif
  }
  // The staging may be written again.
  bar_sync<128>(1 + group);
}
