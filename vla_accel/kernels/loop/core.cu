// The denoise loop for few rows: this file holds sizes, structures and what all its kernels use. The files of this
// folder are compiled as one source, in the order core, products, phases, then attention, attend or grouped, then step.
//
// A phase is a kernel (q/k/v and attention in one or two, output, gate and up, down), with one more between two steps.
// They are launched with programmatic dependence: a kernel starts while its predecessors still run, fetches its weights
// into shared memory with bulk copies, and only then waits. Weights so stream through the chip without a pause while
// the phases hand their few kilobytes of activations on. Every kernel waits for its predecessor's end, so that whatever
// the predecessor's predecessors read may be overwritten.
//
// Sizes arrive as macros: M rows in MT tiles of 16 (BATCH sequences of T tokens, the last HZ of them actions), W width,
// MLP, H query heads, KV key heads, D head size, L layers, A action size, GATE_UP_UNITS a block, CLUSTER blocks that
// share an attention tile, GROUP_RANKS those that share a key head, DOWN_SPLIT, OUTPUT_SPLIT and MIX_SPLIT those that
// share K of a product, whose weights are packed for DOWN_PACKED, OUTPUT_PACKED and MIX_PACKED parts, STEP_BLOCKS those
// that share a row between steps, KEY_ROUNDS tiles of keys a warp, BATCHED_ROWS (gate and up load their rows in
// batches), NORMED columns of W that are the model's (the others are zero, and a norm's mean does not count them),
// ADAPTIVE norms of the step (π0.5) or plain ones behind a time MLP, CAUSAL actions (SmolVLA), ACTIVATION (GEGLU or SWIGLU),
// SELF_EVERY so many layers, from the first on, the suffix attends to itself and not to the prefix alone (0: in none),
// STAGE_BYTES of a unit's weights in BF16. WARPS of a block, KEYS of a tile, RANKS (blocks of `attend`
// that share a head), CHUNK (columns of K) and NOTHING_YET are constants of Python's.
//
// The argument blocks `Model` and `Call` are described in `arguments.py`.
//
// Code is kept short on purpose: the kernels take turns on every multiprocessor, and instructions that are no longer in
// its cache cost a phase of 4 us more than a loop does.

#define INFINITE __int_as_float(0x7f800000)
#define THREADS (WARPS * 32)
#define TILE_BYTES (STAGE_BYTES / 2)
#define GROUP (H / KV)
#define QKV ((H + 2 * KV) * D)
// Rows of a head in shared memory are 16 bytes longer than their data, so that eight of them, read at the same column,
// meet all banks.
#define PITCH (D + 8)
#define ROUND_UP(x, n) (((x) + (n)-1) / (n) * (n))
#define STATE (T > HZ)  // The first token of a sequence is the state (π0).
#define CROSSES(layer) (SELF_EVERY < 1 || (layer) % SELF_EVERY > 0)

// π0's state token attends to the prefix and itself, not to the actions; causal actions to themselves and those before.
__device__ __forceinline__ bool sees(int query, int token) {
  return STATE ? query > 0 || token == 0 : !CAUSAL || token <= query;
}

// Other multiprocessors wrote the activations: L1 may be stale, L2 is not.
__device__ __forceinline__ uint4 ld_cg_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ float ld_cg(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ float4 ldg_v4(const float* p) { return __ldg((const float4*)p); }

// Inputs of products lie in the order in which warps read them: (row / 16, column / 32, row / 8 % 2, row % 8, column %
// 32). The last two are 512 bytes, which one load of a warp fetches as whole lines.
__device__ __forceinline__ u64 place_of(int row, int column, int width) {
  return ((row / 16 * (width / 32) + column / 32) * 2 + row / 8 % 2) * 256 + (row % 8 * 4 + column / 8 % 4) * 8 + column % 8;
}

// The constants of an element of q/k/v and of the one that it is rotated with, half a head further.
struct Rotated {
  float shift_a, shift_b, cos, sin;
  // Values have no position: they are shifted only.
  __device__ __forceinline__ void apply(float& a, float& b, bool rotates) const {
    a += shift_a;
    b += shift_b;
    if (rotates) {
      const float turned = a * cos - b * sin;
      b = b * cos + a * sin;
      a = turned;
    }
  }
};
__device__ __forceinline__ Rotated rotated_of(const Model& m, u64 at, int head, int i, int place) {
  const float* shift = m.in_shift + at * QKV + head * D + i;
  return {ADAPTIVE ? __ldg(shift) : 0.f, ADAPTIVE ? __ldg(shift + D / 2) : 0.f,
          __ldg(m.cos + place * (D / 2) + i), __ldg(m.sin + place * (D / 2) + i)};
}

__device__ __forceinline__ u16 round_bf16(float x) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(x));
  return v;
}
__device__ __forceinline__ float low_of(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_of(u32 v) { return __uint_as_float(v & 0xffff0000u); }

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c += a wᵀ over 32 of K: lane 4 g + t has k = 8 t ... 8 t + 7 of rows g (lo) and g + 8 (hi) of a, and of column g (w).
__device__ __forceinline__ void mma32(float (&c)[4], const uint4& lo, const uint4& hi, const uint4& w) {
  mma_m16n8k16(c, lo.x, hi.x, lo.y, hi.y, w.x, w.y);
  mma_m16n8k16(c, lo.z, hi.z, lo.w, hi.w, w.z, w.w);
}
// This loads four matrices of 8 rows of 16 bytes, whose addresses the lanes give: lane 4 g + t gets word t of row g of
// each.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// Each lane gets words of columns instead, as the second operand has them whose rows are K.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// -- weights ----------------------------------------------------------------------------------------------------------

// A block's weights have a place for every chunk; each is fetched once, before the wait.
struct Stages {
  unsigned char* memory;
  u32 barriers;
  int next = 0;
  __device__ __forceinline__ Stages(unsigned char* shared, u32 at, int count)
      : memory(shared), barriers(at) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < count; ++i) mbarrier_init(barriers + i * 8, 1);
      fence_mbarrier_init();
    }
  }
  // Only thread 0 may call this.
  __device__ __forceinline__ void expect(int stage, u32 bytes) {
    mbarrier_arrive_expect_tx(barriers + stage * 8, bytes);
  }
  __device__ __forceinline__ void copy(int stage, u32 to, const unsigned char* from, u32 bytes) {
    bulk_load(smem_of(memory + to), from, bytes, barriers + stage * 8);
  }
  // This fetches a unit, two tiles of columns, each into its half of the stage.
  __device__ __forceinline__ void fetch(int stage, const unsigned char* from, u32 bytes) {
    expect(stage, bytes);
    for (int tile = 0; tile < 2; ++tile)
      copy(stage, stage * STAGE_BYTES + tile * TILE_BYTES, from + tile * (bytes / 2), bytes / 2);
  }
  // This waits for the next chunk and returns its address.
  __device__ __forceinline__ u32 take() {
    mbarrier_wait(barriers + next * 8, 0);
    return smem_of(memory) + STAGE_BYTES * next++;
  }
};

// -- clusters ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float ld_cluster(u32 address, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(mapa(address, rank)));
  return v;
}
__device__ __forceinline__ void st_cluster(u32 address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void st_cluster_v2(u32 address, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void st_cluster_v4(u32 address, const uint4& v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
extern __shared__ __align__(128) unsigned char shared_memory[];
