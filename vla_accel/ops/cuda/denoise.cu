// The denoise loop's kernels for few rows: one a phase (q/k/v, attention, output, gate and up, down), one between steps.
//
// They are launched with programmatic dependence: a kernel starts while its predecessors still run, fetches its weights
// into shared memory with bulk copies, and only then waits. Weights so stream through the chip without a pause while
// the phases hand their few kilobytes of activations on.
//
// Eight warps a block; each owns a slice of K, so activations go from L2 straight into the registers of the product that
// needs them, and the eight partial sums meet in shared memory. K is permuted alike in both operands of every product:
// lane t of a quad holds k = 8 t ... 8 t + 7 of a block of 32, one 16-byte load, where mma.m16n8k16 would have it hold
// four pairs. A sum does not mind the order of its terms.
//
// Sizes arrive as macros: M rows in MT tiles of 16 (BATCH sequences of T tokens, the last HZ of them actions), W width,
// MLP, H query heads, KV key heads, D head size, L layers, A action size, GATE_UP_UNITS a block, CLUSTER blocks that share
// an attention tile, SPLIT those that share K of the last product, ADAPTIVE (π0.5) or not (π0, whose first token is the state).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define WARPS 8
#define INFINITE __int_as_float(0x7f800000)
#define THREADS (WARPS * 32)
#define STAGE_BYTES 32768
#define GROUP (H / KV)
#define QKV ((H + 2 * KV) * D)
#define ROW_TILES ((T * GROUP + 15) / 16)
#define KEYS 64
// Pairs of output tiles that share one reduction: as many as keep the sums in registers.
#define PAIRS (MT == 1 ? 4 : MT == 2 ? 2 : 1)
#define KC(K) ((K) > 2048 ? 2048 : (K))
#define ROUNDS(K) ((KC(K) / 32 + WARPS - 1) / WARPS)
// Rounds of rows that a warp holds at once, twice; as many as fit in registers.
#define HELD (MT == 1 ? 8 : MT == 2 ? 4 : 2)
#define BATCHED(K) (ROUNDS(K) < HELD ? ROUNDS(K) : HELD)

struct Model {
  const unsigned char* weights;  // packed: π0's time MLP, then the layers, layer_bytes apart
  u64 layer_at, layer_bytes, o_at, gate_up_at, down_at;
  const float *in_scale, *in_shift, *in_gate, *post_scale, *post_shift, *post_gate;  // (steps, L, ...)
  const float *final_scale, *final_shift, *b_in;                                     // (steps, W)
  const float *w_in, *w_out, *b_out, *mix_bias, *cos, *sin;
};

struct Call {
  const u16* keys;      // (L, BATCH, S, KV, D)
  const u16* values_t;  // (L, BATCH, KV, D, SP)
  const int* lengths;   // (BATCH,)
  const float* state;   // (BATCH, W): π0's state token
  float* actions;       // (BATCH, HZ, A)
  float* xf;            // (M, W): the residual stream, and as BF16 for whoever multiplies it
  u16 *xb, *hidden, *q, *ks, *vts, *context, *active;
  int s, sp, steps;
};

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Activations come from other multiprocessors: L1 may be stale, L2 is not.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ float load_float(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ float4 load_constant4(const float* p) { return __ldg((const float4*)p); }

__device__ __forceinline__ u16 to_bf16(float x) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(x));
  return v;
}
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ float low_of(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_of(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 32 of K: a.lo and a.hi are rows g and g + 8, w is column g.
__device__ __forceinline__ void mma32(float (&c)[4], const uint4& lo, const uint4& hi, const uint4& w) {
  mma16(c, lo.x, hi.x, lo.y, hi.y, w.x, w.y);
  mma16(c, lo.z, hi.z, lo.w, hi.w, w.z, w.w);
}

__device__ __forceinline__ void sync_compute() { __syncthreads(); }

__device__ __forceinline__ void wait_parity(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\n"
      "done:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// -- weights ----------------------------------------------------------------------------------------------------------

// A block's weights: every chunk has its place, fetched once, before the wait.
struct Stages {
  unsigned char* memory;
  u32 barriers;
  int next;
  __device__ __forceinline__ Stages(unsigned char* shared, int count)
      : Stages(shared, 0, smem_of(shared + count * STAGE_BYTES), count) {}
  __device__ __forceinline__ Stages(unsigned char* shared, int start, u32 at, int count)
      : memory(shared), barriers(at), next(start) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < count; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + i * 8) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  // Thread 0 only.
  __device__ __forceinline__ void expect(int stage, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barriers + stage * 8), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void copy(int stage, u32 to, const unsigned char* from, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_of(memory + to)),
                 "l"(from), "r"(bytes), "r"(barriers + stage * 8)
                 : "memory");
  }
  __device__ __forceinline__ void fetch(int stage, const unsigned char* from, u32 bytes) {
    expect(stage, bytes);
    copy(stage, stage * STAGE_BYTES, from, bytes);
  }
  // The next chunk, arrived.
  __device__ __forceinline__ const unsigned char* take() {
    wait_parity(barriers + next * 8, 0);
    return memory + STAGE_BYTES * next++;
  }
};

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until all that was launched before has finished. Before it, only constants and the prefix may be read.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// -- clusters ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float load_remote(u32 address, int rank) {
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
  return v;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// -- products ---------------------------------------------------------------------------------------------------------

// Rows of activations, one block of 32 columns: `a` (M, K) BF16.
__device__ __forceinline__ void load_rows(uint4 (&a)[MT][2], const u16* base, int k, int stride, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows beyond the last repeat it: a load without a condition, whose sums nobody takes.
      const int row = min(mt * 16 + half * 8 + g, M - 1);
      a[mt][half] = load16(base + (u64)row * stride + k + t * 8);
    }
}

__device__ __forceinline__ float squares_of(const uint4& v) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = low_of(w[i]), b = high_of(w[i]);
    sum += a * a + b * b;
  }
  return sum;
}
__device__ __forceinline__ uint4 scaled(const uint4& v, const float4& s, const float4& r) {
  return make_uint4(to_bf16x2(low_of(v.x) * (1.f + s.x), high_of(v.x) * (1.f + s.y)),
                    to_bf16x2(low_of(v.y) * (1.f + s.z), high_of(v.y) * (1.f + s.w)),
                    to_bf16x2(low_of(v.z) * (1.f + r.x), high_of(v.z) * (1.f + r.y)),
                    to_bf16x2(low_of(v.w) * (1.f + r.z), high_of(v.w) * (1.f + r.w)));
}

// COUNT rounds of a chunk with TILES tiles of eight columns, from round `first`, against rows already in registers.
template <int KCHUNK, int TILES, int COUNT>
__device__ __forceinline__ void multiply(const unsigned char* data, float (&acc)[TILES][MT][4], const uint4 (&a)[COUNT][MT][2], int first,
                                         int warp, int lane) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int kb = warp + WARPS * (first + i);
    if (kb < KCHUNK / 32) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 w = *(const uint4*)(data + ((kb * TILES + tile) * 32 + lane) * 16);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) mma32(acc[tile][mt], a[i][mt][0], a[i][mt][1], w);
      }
    }
  }
}

template <int N>
__device__ __forceinline__ void put_sums(float* sums, const float* acc, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[(warp * N + i) * 32 + lane] = acc[i];
}
// The sum over warps of accumulator `index` of `lane`, where every warp put N.
template <int N>
__device__ __forceinline__ float take_sum(const float* sums, int index, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sums[(w * N + index) * 32 + lane];
  return sum;
}

// Where the sums of an accumulator go: element e of a reduction over tiles of 16 rows and 8 columns.
struct Place {
  int tile, row, column, r, from;
  __device__ __forceinline__ explicit Place(int e)
      : tile(e / (MT * 128)), row((e / 128) % MT * 16 + ((e & 31) >> 2) + 8 * ((e >> 6) & 1)),
        column((e & 3) * 2 + ((e >> 5) & 1)), r((e / 128) % MT * 4 + ((e >> 5) & 3)), from(e & 31) {}
};

// x ∘ (1 + scale) times pairs of tiles. `emit(unit, row, column, first, second, held)` gets both tiles' sums, times rstd;
// `hold(unit, row, column)` fetches, before the wait, the constants that emit needs.
template <int COUNT, class Hold, class Emit>
__device__ __forceinline__ void normed_pairs(unsigned char* shared, const Call& c, const unsigned char* weights,
                                             const float* scale, int units, float eps, Hold hold, Emit emit) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int mine = (units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
  Stages stages(shared, COUNT);  // at most COUNT units a block
  float* squares_at = (float*)(shared + COUNT * (STAGE_BYTES + 8));
  if (threadIdx.x == 0)
    for (int i = 0; i < mine; ++i)
      stages.fetch(i, weights + (u64)(blockIdx.x + i * gridDim.x) * (32 * W), 32 * W);
  let_next_start();
  constexpr int N = PAIRS * 2 * MT * 4, EACH = (PAIRS * MT * 128 + THREADS - 1) / THREADS;
  uint4 a[ROUNDS(W)][MT][2];
  float4 factor[ROUNDS(W)][2];
#pragma unroll
  for (int i = 0; i < ROUNDS(W); ++i) {
    const int kb = warp + WARPS * i;
    if (ADAPTIVE && MT <= 2 && kb < W / 32) {
      factor[i][0] = load_constant4(scale + kb * 32 + (lane & 3) * 8);
      factor[i][1] = load_constant4(scale + kb * 32 + (lane & 3) * 8 + 4);
    }
  }
  decltype(hold(0, 0, 0)) held[EACH];
  const auto fetch_held = [&](int first) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const Place at(threadIdx.x + n * THREADS);
      held[n] = hold(min(first + at.tile * (int)gridDim.x, units - 1), min(at.row, M - 1), at.column);
    }
  };
  fetch_held(blockIdx.x);
  sync_compute();
  wait_for_previous();
  float squares[MT][2];
#pragma unroll
  for (int i = 0; i < ROUNDS(W); ++i) {
    const int kb = warp + WARPS * i;
    if (kb < W / 32) load_rows(a[i], c.xb, kb * 32, W, lane);
  }
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) squares[mt][0] = squares[mt][1] = 0.f;
#pragma unroll
  for (int i = 0; i < ROUNDS(W); ++i) {
    const int kb = warp + WARPS * i;
    if (ADAPTIVE && MT > 2 && kb < W / 32) {
      factor[i][0] = load_constant4(scale + kb * 32 + (lane & 3) * 8);
      factor[i][1] = load_constant4(scale + kb * 32 + (lane & 3) * 8 + 4);
    }
    if (kb < W / 32)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          squares[mt][half] += squares_of(a[i][mt][half]);
          if (ADAPTIVE) a[i][mt][half] = scaled(a[i][mt][half], factor[i][0], factor[i][1]);
        }
  }
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = squares[mt][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if ((lane & 3) == 0) squares_at[warp * 16 * MT + mt * 16 + half * 8 + (lane >> 2)] = sum;
    }
  for (int done = 0; done < mine; done += PAIRS) {
    const int first = blockIdx.x + done * gridDim.x;
    float acc[PAIRS][2][MT][4];
#pragma unroll
    for (int i = 0; i < N; ++i) ((float*)acc)[i] = 0.f;
    if (done) fetch_held(first);
    // The sums take the place of the weights that made them.
    float* sums = (float*)(shared + done * STAGE_BYTES);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
      if (done + j < mine) multiply<W, 2, ROUNDS(W)>(stages.take(), acc[j], a, 0, warp, lane);
    sync_compute();
    put_sums<N>(sums, (float*)acc, warp, lane);
    sync_compute();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const Place at(threadIdx.x + n * THREADS);
      if (at.tile < PAIRS && done + at.tile < mine && at.row < M) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += squares_at[w * 16 * MT + at.row];
        const float rstd = rsqrtf(sum / W + eps);
        const int index = at.tile * 2 * MT * 4 + at.r;
        emit(first + at.tile * gridDim.x, at.row, at.column, rstd * take_sum<N>(sums, index, at.from),
             rstd * take_sum<N>(sums, index + MT * 4, at.from), held[n]);
      }
    }
  }
}

// rows (M, K) times one tile a block; `emit(row, column, sum, held, late)`: `hold(column)` before the wait fetches a
// constant, `late(row, column)` after it what others wrote.
template <int K, class Hold, class Late, class Emit>
__device__ __forceinline__ void plain_tile(unsigned char* shared, const u16* rows, const unsigned char* weights, Hold hold,
                                           Late late, Emit emit) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, unit = blockIdx.x;
  constexpr int N = MT * 4, SUB = ROUNDS(K) / BATCHED(K), CHUNKS = K / KC(K), BATCHES = CHUNKS * SUB;
  constexpr int EACH = (MT * 128 + THREADS - 1) / THREADS;
  Stages stages(shared, CHUNKS);
  if (threadIdx.x == 0)
    for (int i = 0; i < CHUNKS; ++i)
      stages.fetch(i, weights + ((u64)unit * CHUNKS + i) * (16 * KC(K)), 16 * KC(K));
  let_next_start();
  float held[EACH], present[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n) held[n] = hold(unit * 8 + Place(threadIdx.x + n * THREADS).column);
  sync_compute();
  wait_for_previous();
  float acc[1][MT][4];
#pragma unroll
  for (int i = 0; i < N; ++i) ((float*)acc)[i] = 0.f;
  // Rows are loaded one batch ahead of their product.
  uint4 a[2][BATCHED(K)][MT][2];
  const auto load = [&](int batch) {
#pragma unroll
    for (int i = 0; i < BATCHED(K); ++i) {
      const int k0 = batch / SUB * KC(K), kb = warp + WARPS * (batch % SUB * BATCHED(K) + i);
      if (kb < KC(K) / 32) load_rows(a[batch & 1][i], rows, k0 + kb * 32, K, lane);
    }
  };
  load(0);
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const Place at(threadIdx.x + n * THREADS);
    present[n] = late(min(at.row, M - 1), unit * 8 + at.column);
  }
  const unsigned char* data = nullptr;
#pragma unroll
  for (int batch = 0; batch < BATCHES; ++batch) {
    if (batch + 1 < BATCHES) load(batch + 1);
    if (batch % SUB == 0) data = stages.take();
    multiply<KC(K), 1, BATCHED(K)>(data, acc, a[batch & 1], batch % SUB * BATCHED(K), warp, lane);
  }
  float* sums = (float*)shared;
  sync_compute();
  put_sums<N>(sums, (float*)acc, warp, lane);
  sync_compute();
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const Place at(threadIdx.x + n * THREADS);
    if (at.tile == 0 && at.row < M)
      emit(at.row, unit * 8 + at.column, take_sum<N>(sums, at.r, at.from), held[n], present[n]);
  }
}

// -- the phases' kernels ------------------------------------------------------------------------------------------------

extern __shared__ __align__(128) unsigned char shared_memory[];

extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    qkv(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  const u64 at = (u64)step * L + layer;
  normed_pairs<1>(
      shared_memory, c, m.weights + m.layer_at + layer * m.layer_bytes, m.in_scale + at * W, QKV / 16, eps,
      [&](int unit, int row, int column) {
        const int head = unit / (D / 16), i = (unit % (D / 16)) * 8 + column;
        const int place = (c.lengths[row / T] + row % T) * (D / 2) + i;
        const float* shift = m.in_shift + at * QKV + head * D + i;
        return make_float4(ADAPTIVE ? __ldg(shift) : 0.f, ADAPTIVE ? __ldg(shift + D / 2) : 0.f, __ldg(m.cos + place),
                           __ldg(m.sin + place));
      },
      [&](int unit, int row, int column, float a, float b, const float4& held) {
        const int head = unit / (D / 16), i = (unit % (D / 16)) * 8 + column;
        a += held.x;
        b += held.y;
        if (head < H + KV) {
          const float turned = a * held.z - b * held.w;
          b = b * held.z + a * held.w;
          a = turned;
        }
        u16* out = c.q + ((u64)row * H + head) * D + i;
        int apart = D / 2;
        if (head >= H) out = c.ks + ((u64)row * KV + head - H) * D + i;
        if (head >= H + KV) {
          constexpr int TP = ((T + KEYS - 1) / KEYS) * KEYS;
          out = c.vts + (((u64)(row / T) * KV + head - H - KV) * D + i) * TP + row % T;
          apart = D / 2 * TP;
        }
        out[0] = to_bf16(a);
        out[apart] = to_bf16(b);
      });
}

extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    gate_up(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  const u64 at = (u64)step * L + layer;
  normed_pairs<GATE_UP_UNITS>(
      shared_memory, c, m.weights + m.layer_at + layer * m.layer_bytes + m.gate_up_at, m.post_scale + at * W, MLP / 8, eps,
      [&](int unit, int, int column) {
        const float* shift = m.post_shift + at * 2 * MLP + unit * 8 + column;
        return make_float2(ADAPTIVE ? __ldg(shift) : 0.f, ADAPTIVE ? __ldg(shift + MLP) : 0.f);
      },
      [&](int unit, int row, int column, float gate, float up, const float2& held) {
        gate += held.x;
        up += held.y;
        const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        const float y = gate / (1.f + exp2_fast(-2.8853900817779268f * inner)) * up;
        c.active[(u64)row * MLP + unit * 8 + column] = to_bf16(y);
      });
}

template <int K>
__device__ __forceinline__ void into_stream(const Call& c, const u16* rows, const unsigned char* weights,
                                            const float* gate) {
  plain_tile<K>(
      shared_memory, rows, weights, [&](int column) { return ADAPTIVE ? __ldg(gate + column) : 1.f; },
      [&](int row, int column) { return load_float(c.xf + (u64)row * W + column); },
      [&](int row, int column, float sum, float held, float present) {
        sum = present + held * sum;
        c.xf[(u64)row * W + column] = sum;
        c.xb[(u64)row * W + column] = to_bf16(sum);
      });
}

extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    output(const __grid_constant__ Model m, const __grid_constant__ Call c, int step, int layer) {
  into_stream<H * D>(c, c.context, m.weights + m.layer_at + layer * m.layer_bytes + m.o_at,
                     m.in_gate + ((u64)step * L + layer) * W);
}

// A cluster of SPLIT blocks shares SPLIT tiles of columns: each block takes a part of K, which spares the others its
// activations, and finishes one tile. Weights are packed by cluster, part of K, block of 32, tile.
extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    down(const __grid_constant__ Model m, const __grid_constant__ Call c, int step, int layer) {
  constexpr int PART = MLP / SPLIT, CHUNK = PART > 1024 ? 1024 : PART, CHUNKS = PART / CHUNK, N = SPLIT * MT * 4;
  constexpr u32 BYTES = SPLIT * 16 * CHUNK, STEP = BYTES > STAGE_BYTES ? STAGE_BYTES : BYTES;
  constexpr u32 LEAST = WARPS * MT * 4 * 128, ROOM = CHUNKS * BYTES > LEAST ? CHUNKS * BYTES : LEAST;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT * SPLIT;
  unsigned char* shared = shared_memory;
  float* own = (float*)(shared + ROOM);  // SPLIT x MT x 128: this block's part of every tile
  Stages stages(shared, 0, smem_of(own + SPLIT * MT * 128), CHUNKS);
  const unsigned char* weights = m.weights + m.layer_at + layer * m.layer_bytes + m.down_at;
  if (threadIdx.x == 0)
    for (int i = 0; i < CHUNKS; ++i) {
      stages.expect(i, BYTES);
      for (u32 at = 0; at < BYTES; at += STEP)
        stages.copy(i, i * BYTES + at, weights + (u64)(blockIdx.x * CHUNKS + i) * BYTES + at, STEP);
    }
  let_next_start();
  const int column = (first + rank) * 8 + (threadIdx.x & 3) * 2 + ((threadIdx.x >> 5) & 1);
  const float gate = ADAPTIVE ? __ldg(m.post_gate + ((u64)step * L + layer) * W + column) : 1.f;
  sync_compute();
  wait_for_previous();
  constexpr int EACH = (MT * 128 + THREADS - 1) / THREADS;
  float present[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    present[n] = load_float(c.xf + (u64)min(Place(threadIdx.x + n * THREADS).row, M - 1) * W + column);
  float acc[SPLIT][MT][4];
#pragma unroll
  for (int i = 0; i < N; ++i) ((float*)acc)[i] = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    uint4 a[ROUNDS(CHUNK)][MT][2];
#pragma unroll
    for (int i = 0; i < ROUNDS(CHUNK); ++i) {
      const int kb = warp + WARPS * i;
      if (kb < CHUNK / 32) load_rows(a[i], c.active, rank * PART + chunk * CHUNK + kb * 32, MLP, lane);
    }
    wait_parity(stages.barriers + chunk * 8, 0);
    multiply<CHUNK, SPLIT, ROUNDS(CHUNK)>(shared + chunk * BYTES, acc, a, 0, warp, lane);
  }
  sync_compute();
  // The warps' sums take the place of the weights, a tile of rows at a time where all would not fit.
  float* sums = (float*)shared;
  constexpr int HELD_TILES = ROOM >= WARPS * N * 128 ? SPLIT : 1;
#pragma unroll
  for (int tile = 0; tile < SPLIT; tile += HELD_TILES) {
    constexpr int COUNT = HELD_TILES * MT * 4;
    put_sums<COUNT>(sums, (float*)acc + tile * MT * 4, warp, lane);
    sync_compute();
    for (int e = threadIdx.x; e < HELD_TILES * MT * 128; e += THREADS)
      own[tile * MT * 128 + e] = take_sum<COUNT>(sums, e >> 5, e & 31);
    sync_compute();
  }
  sync_cluster();
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int e = threadIdx.x + n * THREADS;
    const Place at(e);
    if (at.tile == 0 && at.row < M) {
      const u64 place = (u64)at.row * W + column;
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < SPLIT; ++other) sum += load_remote(smem_of(own + rank * MT * 128 + e), other);
      sum = present[n] + gate * sum;
      c.xf[place] = sum;
      c.xb[place] = to_bf16(sum);
    }
  }
  // No block may leave while another still reads its part.
  sync_cluster();
}

// π0: the second layer of the time MLP. The state's row is already in the stream.
extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 ? 2 : 1)
    mix(const __grid_constant__ Model m, const __grid_constant__ Call c) {
  plain_tile<W>(
      shared_memory, c.hidden, m.weights, [&](int column) { return ADAPTIVE ? 0.f : __ldg(m.mix_bias + column); },
      [](int, int) { return 0.f; },
      [&](int row, int column, float sum, float bias, float) {
        if (row % T == 0) return;
        c.xf[(u64)row * W + column] = sum + bias;
        c.xb[(u64)row * W + column] = to_bf16(sum + bias);
      });
}

// -- attention --------------------------------------------------------------------------------------------------------

// A cluster of blocks shares a tile of 16 query rows (tokens x heads of one key head); each block takes every CLUSTER-th
// tile of 64 keys, and the parts meet in the cluster's shared memory. The prefix's keys are fetched before the wait for q.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ Model m, const __grid_constant__ Call c, int layer) {
  constexpr int DB = D / 32;                       // blocks of 32 of the head
  constexpr int VT = (D / 8 + WARPS - 1) / WARPS;  // tiles of eight value columns a warp
  constexpr int TP = ((T + KEYS - 1) / KEYS) * KEYS;
  __shared__ float maxima[WARPS * 16], totals[WARPS * 16], part[16 * (D + 4)], stat[32];
  __shared__ __align__(16) u16 p_of[16 * (KEYS + 8)];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int prefix_splits = c.sp / KEYS, splits = prefix_splits + TP / KEYS;
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;
  const int tile = group % ROW_TILES, pair = group / ROW_TILES, batch = pair / KV, kv = pair % KV;
  const float scale = 1.4426950408889634f * rsqrtf((float)D);
  const int low = tile * 16 + g, high = low + 8, low_token = low / GROUP, high_token = high / GROUP;
  uint4 k[DB], v[VT][2], q_low[DB], q_high[DB];
  float o[VT][4], low_best = -INFINITE, high_best = -INFINITE, low_total = 0.f, high_total = 0.f;
#pragma unroll
  for (int i = 0; i < VT; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
  const auto load_tile = [&](int split) {
    const bool prefix = split < prefix_splits;
    const int first = (prefix ? split : split - prefix_splits) * KEYS, last = (prefix ? c.s : T) - 1;
    const int key = min(first + warp * 8 + g, last), stride = prefix ? c.sp : TP;
    const u16* k_at = prefix ? c.keys + ((((u64)layer * BATCH + batch) * c.s + key) * KV + kv) * D
                             : c.ks + (((u64)batch * T + key) * KV + kv) * D;
    const u16* v_at = prefix ? c.values_t + (((u64)layer * BATCH + batch) * KV + kv) * D * c.sp
                             : c.vts + ((u64)batch * KV + kv) * D * TP;
#pragma unroll
    for (int i = 0; i < DB; ++i) k[i] = load16(k_at + i * 32 + t * 8);
#pragma unroll
    for (int i = 0; i < VT; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[i][j] = load16(v_at + (u64)((warp * VT + i) * 8 + g) * stride + first + j * 32 + t * 8);
  };
  let_next_start();
  if (rank < prefix_splits) load_tile(rank);
  const int prefix_length = c.lengths[batch];
  wait_for_previous();
  // Rows beyond the last token repeat it and are masked.
  const u64 low_at = (((u64)batch * T + min(low_token, T - 1)) * H + kv * GROUP + low % GROUP) * D;
  const u64 high_at = (((u64)batch * T + min(high_token, T - 1)) * H + kv * GROUP + high % GROUP) * D;
#pragma unroll
  for (int i = 0; i < DB; ++i) {
    q_low[i] = load16(c.q + low_at + i * 32 + t * 8);
    q_high[i] = load16(c.q + high_at + i * 32 + t * 8);
  }
  for (int split = rank; split < splits; split += CLUSTER) {
    const bool prefix = split < prefix_splits;
    const int first = (prefix ? split : split - prefix_splits) * KEYS, limit = prefix ? prefix_length : T;
    if (split != rank || !prefix) load_tile(split);
    float s[4] = {0.f, 0.f, 0.f, 0.f}, s2[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < DB; i += 2) {
      mma32(s, q_low[i], q_high[i], k[i]);
      if (i + 1 < DB) mma32(s2, q_low[i + 1], q_high[i + 1], k[i + 1]);
    }
    const int my_key = first + warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = my_key + (i & 1), token = i < 2 ? low_token : high_token;
      // π0's state token is a block of its own: it does not see the actions.
      const bool seen = at < limit && token < T && (ADAPTIVE || prefix || token > 0 || at == 0);
      s[i] = seen ? (s[i] + s2[i]) * scale : -INFINITE;
    }
    float low_max = fmaxf(s[0], s[1]), high_max = fmaxf(s[2], s[3]);
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
      low_max = fmaxf(low_max, __shfl_xor_sync(~0u, low_max, step));
      high_max = fmaxf(high_max, __shfl_xor_sync(~0u, high_max, step));
    }
    sync_compute();
    if (t == 0) {
      maxima[warp * 16 + g] = low_max;
      maxima[warp * 16 + g + 8] = high_max;
    }
    sync_compute();
    low_max = low_best;
    high_max = high_best;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      low_max = fmaxf(low_max, maxima[w * 16 + g]);
      high_max = fmaxf(high_max, maxima[w * 16 + g + 8]);
    }
    // A row that has seen no key must not compute inf - inf.
    const float low_safe = low_max == -INFINITE ? 0.f : low_max, high_safe = high_max == -INFINITE ? 0.f : high_max;
    const float low_shrink = exp2_fast(low_best - low_safe), high_shrink = exp2_fast(high_best - high_safe);
    low_best = low_max;
    high_best = high_max;
    const float p0 = exp2_fast(s[0] - low_safe), p1 = exp2_fast(s[1] - low_safe);
    const float p2 = exp2_fast(s[2] - high_safe), p3 = exp2_fast(s[3] - high_safe);
    // A lane's own keys; the lanes and warps of a row are added at the end.
    low_total = low_total * low_shrink + p0 + p1;
    high_total = high_total * high_shrink + p2 + p3;
    *(u32*)(p_of + g * (KEYS + 8) + warp * 8 + 2 * t) = to_bf16x2(p0, p1);
    *(u32*)(p_of + (g + 8) * (KEYS + 8) + warp * 8 + 2 * t) = to_bf16x2(p2, p3);
    sync_compute();
#pragma unroll
    for (int i = 0; i < VT; ++i) {
      o[i][0] *= low_shrink;
      o[i][1] *= low_shrink;
      o[i][2] *= high_shrink;
      o[i][3] *= high_shrink;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 a_low = *(const uint4*)(p_of + g * (KEYS + 8) + j * 32 + t * 8);
      const uint4 a_high = *(const uint4*)(p_of + (g + 8) * (KEYS + 8) + j * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < VT; ++i) mma32(o[i], a_low, a_high, v[i][j]);
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step <<= 1) {
    low_total += __shfl_xor_sync(~0u, low_total, step);
    high_total += __shfl_xor_sync(~0u, high_total, step);
  }
  if (t == 0) {
    totals[warp * 16 + g] = low_total;
    totals[warp * 16 + g + 8] = high_total;
    if (warp == 0) {
      stat[g] = low_best;
      stat[g + 8] = high_best;
    }
  }
#pragma unroll
  for (int i = 0; i < VT; ++i) {
    const int column = (warp * VT + i) * 8 + 2 * t;
    *(float2*)(part + g * (D + 4) + column) = make_float2(o[i][0], o[i][1]);
    *(float2*)(part + (g + 8) * (D + 4) + column) = make_float2(o[i][2], o[i][3]);
  }
  sync_compute();
  if (threadIdx.x < 16) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += totals[w * 16 + threadIdx.x];
    stat[16 + threadIdx.x] = total;
  }
  sync_cluster();
  // Each block puts a slice of the columns together.
  constexpr int SLICE = (D + CLUSTER - 1) / CLUSTER;
  for (int e = threadIdx.x; e < 16 * SLICE; e += THREADS) {
    const int row = e / SLICE, column = rank * SLICE + e % SLICE, r = tile * 16 + row, token = r / GROUP;
    if (column < D && token < T) {
      float bests[CLUSTER], sums[CLUSTER], parts[CLUSTER], best = -INFINITE, total = 0.f, sum = 0.f;
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) {
        bests[other] = load_remote(smem_of(stat + row), other);
        sums[other] = load_remote(smem_of(stat + 16 + row), other);
        parts[other] = load_remote(smem_of(part + row * (D + 4) + column), other);
      }
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) best = fmaxf(best, bests[other]);
#pragma unroll
      for (int other = 0; other < CLUSTER; ++other) {
        const float weight = exp2_fast(bests[other] - best);
        total += weight * sums[other];
        sum += weight * parts[other];
      }
      c.context[(((u64)batch * T + token) * H + kv * GROUP + r % GROUP) * D + column] = to_bf16(sum / total);
    }
  }
  // No block may leave while another still reads its part.
  sync_cluster();
}

// -- between two evaluations --------------------------------------------------------------------------------------------

// Final norm, output projection and Euler step of evaluation `step - 1`, then the input of evaluation `step`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    between(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step) {
  __shared__ float normed[W], action[A], partial[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x;
  const float dt = -1.f / (float)c.steps;
  let_next_start();
  wait_for_previous();
  if (row < BATCH * HZ) {
    const int batch = row / HZ, token_row = batch * T + (T - HZ) + row % HZ;
    if (step > 0) {
      const float* x = c.xf + (u64)token_row * W;
      float sum = 0.f;
      for (int i = threadIdx.x; i < W; i += THREADS) {
        const float one = load_float(x + i);
        normed[i] = one;
        sum += one * one;
      }
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) partial[warp] = sum;
      sync_compute();
      sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += partial[w];
      const float rstd = rsqrtf(sum / W + eps);
      const float* scale = m.final_scale + (ADAPTIVE ? (u64)(step - 1) * W : 0);
      for (int i = threadIdx.x; i < W; i += THREADS) {
        float one = normed[i] * rstd * (1.f + scale[i]);
        if (ADAPTIVE) one += m.final_shift[(u64)(step - 1) * W + i];
        normed[i] = one;
      }
      sync_compute();
      for (int a = warp; a < A; a += WARPS) {
        float dot = 0.f;
        for (int i = lane * 4; i < W; i += 128) {
          const float4 w = load_constant4(m.w_out + (u64)a * W + i);
          dot += w.x * normed[i] + w.y * normed[i + 1] + w.z * normed[i + 2] + w.w * normed[i + 3];
        }
#pragma unroll
        for (int offset = 16; offset; offset >>= 1) dot += __shfl_xor_sync(~0u, dot, offset);
        if (lane == 0) {
          const float moved = load_float(c.actions + (u64)row * A + a) + dt * (dot + m.b_out[a]);
          c.actions[(u64)row * A + a] = moved;
          action[a] = moved;
        }
      }
    } else if (threadIdx.x < A) {
      action[threadIdx.x] = load_float(c.actions + (u64)row * A + threadIdx.x);
    }
    sync_compute();
    if (step < c.steps)
      for (int i = threadIdx.x * 4; i < W; i += THREADS * 4) {
        float4 sum = load_constant4(m.b_in + (ADAPTIVE ? 0 : (u64)step * W) + i);
#pragma unroll 8
        for (int a = 0; a < A; ++a) {
          const float4 w = load_constant4(m.w_in + (u64)a * W + i);
          sum.x += w.x * action[a];
          sum.y += w.y * action[a];
          sum.z += w.z * action[a];
          sum.w += w.w * action[a];
        }
        if (!ADAPTIVE) {
          sum.x /= 1.f + __expf(-sum.x);
          sum.y /= 1.f + __expf(-sum.y);
          sum.z /= 1.f + __expf(-sum.z);
          sum.w /= 1.f + __expf(-sum.w);
        }
        const uint2 narrow = make_uint2(to_bf16x2(sum.x, sum.y), to_bf16x2(sum.z, sum.w));
        if (ADAPTIVE) {
          *(float4*)(c.xf + (u64)token_row * W + i) = sum;
          *(uint2*)(c.xb + (u64)token_row * W + i) = narrow;
        } else {
          *(uint2*)(c.hidden + (u64)token_row * W + i) = narrow;
        }
      }
    return;
  }
  // π0: a block of its own for the state's token.
  if (step < c.steps)
    for (int i = threadIdx.x; i < W; i += THREADS) {
      const u64 at = (u64)(row - BATCH * HZ) * T * W + i;
      const float one = c.state[(u64)(row - BATCH * HZ) * W + i];
      c.xf[at] = one;
      c.xb[at] = to_bf16(one);
    }
}
