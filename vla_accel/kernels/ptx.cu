// This file gives PTX's instructions their own names, after the PTX manual. Every source begins with it
// (`runtime.source_of`).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// -- dependent launches -----------------------------------------------------------------------------------------------

// Tests set INJECT_DELAY (microseconds). A warp then sleeps between 0 and INJECT_DELAY at two places whose order must
// be enforced and not happen by luck: after it has let the successor start, and before it makes what others wait for.
__device__ __forceinline__ void inject_delay(u32 salt) {
#ifdef INJECT_DELAY
  u64 begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  const u32 mixed = (blockIdx.x * 2654435761u ^ (threadIdx.x / 32 + 1) * 40503u ^ salt * 69069u) >> 7;
  const u64 least = mixed % (INJECT_DELAY * 1000u);
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begun < least);
  __syncwarp();
#endif
}
// This lets the next kernel of the stream start.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  inject_delay(1);
}
// This waits until every kernel that was launched before has finished. Before it, a kernel may read only what no kernel
// of the chain writes.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ u16 ld_shared_u16(u32 address) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint4 ld_shared_v4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float4 ld_shared_f4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ void st_shared_f2(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
// These store matrices of 8 x 8 numbers of 16 bits, transposed. Lanes 8 i to 8 i + 7 give the addresses of the rows of
// matrix i; lane 4 g + t holds columns g of rows 2 t and 2 t + 1.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x1_trans(u32 address, u32 a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
}
// A load that stays where it is written.
__device__ __forceinline__ uint4 ld_global_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// The same of two constants.
__device__ __forceinline__ float2 ld_constant_f2(const float* p) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}

// -- parts of a block -------------------------------------------------------------------------------------------------

// A warpgroup gives registers away, or takes them.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// One of a block's sixteen barriers, for THREADS of its threads: those that wait for it, and those that only arrive.
template <int THREADS>
__device__ __forceinline__ void bar_sync(u32 barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void bar_arrive(u32 barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// -- barriers in shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// This makes initialised barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Every wait is bounded: a mistake must end a launch with an error, which `runtime.synchronize` explains, and must not
// hang the GPU. A wait is one piece of assembly, so that the compiler treats it as it would treat an instruction; its
// clock is read only after the hardware's own time limit has passed once.
#ifndef WAIT_TICKS
#define WAIT_TICKS 4  // A tick is 2^32 ns: a wait traps after 13 to 17 s.
#endif
#define WAIT_POLLS 33554432  // A poll reads L2 and takes at least 0.3 us: a wait traps after 10 s or more.
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

#define MBARRIER_WAIT(TRY)                                               \
  asm volatile(                                                          \
      "{\n.reg .pred p;\n.reg .u32 begun, now;\n" TRY " p, [%0], %1;\n"  \
      "@p bra done;\nmov.u32 begun, %%globaltimer_hi;\n"                 \
      "again:\n" TRY " p, [%0], %1;\n@p bra done;\n"                     \
      "mov.u32 now, %%globaltimer_hi;\nsub.u32 now, now, begun;\n"       \
      "setp.lt.u32 p, now, " TEXT(WAIT_TICKS) ";\n@p bra again;\ntrap;\n" \
      "done:\n}" ::"r"(barrier), "r"(parity) : "memory")
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  MBARRIER_WAIT("mbarrier.try_wait.parity.shared::cta.b64");
#else
  MBARRIER_WAIT("mbarrier.test_wait.parity.shared::cta.b64");
#endif
}
// What it waits for comes from other blocks of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  MBARRIER_WAIT("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64");
}
__device__ __forceinline__ void count_poll(u32& polls) {
  if (++polls > WAIT_POLLS) asm volatile("trap;");
}
// BF16 numbers that are read until they are there, without a counter, were filled with ones before: rounding gives no
// number of ones alone, its only NaN is 0x7fff.
__device__ __forceinline__ void st_relaxed(u16* to, u16 v) {
  asm volatile("st.relaxed.gpu.u16 [%0], %1;" ::"l"(to), "h"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed(u32* to, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_v4(void* to, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint4 ld_relaxed_v4(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Whether all eight numbers were stored: x - 1 borrows from its upper bit where a half of x = ~v is zero.
__device__ __forceinline__ bool is_there(const uint4& v) {
  const u32 w[4] = {~v.x, ~v.y, ~v.z, ~v.w};
  u32 missing = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) missing |= (w[i] - 0x00010001u) & ~w[i] & 0x80008000u;
  return missing == 0;
}
// This loads eight numbers again until they are there. Each is compared with ones by itself, so it does not matter in which
// order they come; of what else was stored nothing is known.
__device__ __forceinline__ void wait_there(uint4& v, const void* p) {
  for (u32 polls = 0; !is_there(v); v = ld_relaxed_v4(p))
    if (++polls > WAIT_POLLS) asm volatile("trap;");
}


// A block counts its arrival, with everything that its threads wrote before a barrier of the block.
__device__ __forceinline__ void red_release(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ u32 ld_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// This waits until a counter has reached `target`; the block's threads see what was written before, behind a barrier.
__device__ __forceinline__ void wait_count(const u32* counter, u32 target) {
  for (u32 polls = 0; (int)(ld_acquire(counter) - target) < 0;)
    if (++polls > WAIT_POLLS) asm volatile("trap;");
}

// -- copies by the threads of a warp (Ampere) -------------------------------------------------------------------------

// This starts a copy of 16 bytes to shared memory; zeros, if it is not `real`.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, bool real, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(real ? 16 : 0),
               "l"(policy)
               : "memory");
}
// The thread's copies so far are a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// This waits until at most LEFT groups of the thread have not landed.
template <int LEFT>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// The thread arrives at a barrier when all its copies so far have landed.
__device__ __forceinline__ void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// -- clusters ---------------------------------------------------------------------------------------------------------

// All threads of a warp must execute the barriers of a cluster together, whatever branches they come from.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// A block arrives so where the others read nothing that it wrote: it has only started, or it has only read.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// This gives the address of the same place in another block's shared memory. One may write to it only after that block
// is known to have started.
__device__ __forceinline__ u32 mapa(u32 address, int rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void st_cluster_f4(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// This stores 16 bytes in another block's shared memory, and that block's barrier counts them. What waits there
// for all of them may read them; the barrier of a cluster, as a release, waits for the block's writes to the whole GPU. In
// a launch without clusters it is an illegal instruction.
__device__ __forceinline__ void st_async(u32 to, u32 barrier, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(a), "r"(b),
               "r"(c), "r"(d), "r"(barrier)
               : "memory");
}

// -- the copy engine --------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap {
  u64 opaque[16];
};
// What the L2 cache should do with what is loaded: drop it first, or last.
__device__ __forceinline__ u64 policy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 policy_evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// This copies a box of `map` to the shared memory of every block of the cluster that `mask` names; a mask of zero means
// this block.
__device__ __forceinline__ void tma_load_2d(u32 to, const TensorMap& map, int x, int y, u32 barrier, u16 mask, u64 policy) {
  if (mask)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier),
        "h"(mask), "l"(policy) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tma_load_4d(u32 to, const TensorMap& map, int x, int y, int z, int w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
// This copies contiguous bytes to shared memory. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// This copies contiguous bytes from memory to the L2 cache. `bytes` and the address are multiples of 16.
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// The tensor cores and the copy engine see what threads wrote to shared memory after this and a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- conversions ------------------------------------------------------------------------------------------------------

// These put two neighbours into one register, the first into its lower half.
__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 pack_f16x2(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ float widen_f16(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
// Byte i of the result is the byte of (high, low) that the lower three bits of nibble i of SELECTOR name; or, if the
// nibble's highest bit is set, eight copies of that byte's sign.
template <u32 SELECTOR>
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high) {
  u32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "n"(SELECTOR));
  return v;
}
// Of two BF16 numbers each (Hopper).
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ u32 sub_bf16x2(u32 a, u32 b) {
  u32 v;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
// Values beyond ±448 become ±448.
__device__ __forceinline__ u16 pack_e4m3x2(float low, float high) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

// -- the tensor cores -------------------------------------------------------------------------------------------------

// A descriptor says where an operand of wgmma lies in shared memory: its address, the two strides of its canonical
// layout in bytes, and whether its rows of 128 bytes are swizzled. (wgmma.py makes the products themselves.)
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading, u32 stride, bool swizzled) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)swizzled << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// The compiler must not move what uses the sums of a wgmma above the wait for it.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
