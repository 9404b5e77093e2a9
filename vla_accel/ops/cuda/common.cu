// What all CUDA C++ here begins with: types, shared memory's addresses and barriers, dependent launches, clusters. The
// first file of every source (`runtime.source_of`).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Tests set INJECT_DELAY (microseconds): a warp waits up to so long where an order must not depend on luck, between letting
// the successor start and what it writes, and before it counts itself as ready.
__device__ __forceinline__ void inject_delay(u32 salt) {
#ifdef INJECT_DELAY
  u64 begun, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
  const u32 mixed = (blockIdx.x * 2654435761u ^ (threadIdx.x / 32 + 1) * 40503u ^ salt * 69069u) >> 7;
  const u64 least = mixed % (INJECT_DELAY * 1000u);
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begun < least);
  __syncwarp();
#endif
}
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  inject_delay(1);
}
// Until all that was launched before has finished. Before it, only what no kernel of the chain writes may be read.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Every wait is bounded: a mistake must end a launch with an error, which `runtime.synchronize` explains, and must not
// hang the GPU. A wait is one piece of assembly, so that the compiler treats it as it would treat an instruction; its
// clock is read only after the hardware's own time limit has passed once.
#ifndef WAIT_TICKS
#define WAIT_TICKS 4  // of 2^32 ns: 13 to 17 s
#endif
#define WAIT_POLLS 33554432  // of a counter in L2, which takes 0.3 us or more to read: 10 s
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

__device__ __forceinline__ void wait_parity(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 begun, now;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
      "mov.u32 begun, %%globaltimer_hi;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\n"
      "mov.u32 now, %%globaltimer_hi;\nsub.u32 now, now, begun;\n"
      "setp.lt.u32 p, now, " TEXT(WAIT_TICKS) ";\n@p bra again;\ntrap;\ndone:\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}
// Until a counter in global memory is `count` or more.
__device__ __forceinline__ void wait_count(const u32* counter, u32 count) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 seen, polls;\nmov.u32 polls, 0;\n"
      "again:\nld.acquire.gpu.global.u32 seen, [%0];\nsetp.ge.u32 p, seen, %1;\n@p bra done;\n"
      "add.u32 polls, polls, 1;\nsetp.lt.u32 p, polls, " TEXT(WAIT_POLLS) ";\n@p bra again;\ntrap;\ndone:\n}"
      ::"l"(counter), "r"(count) : "memory");
}

// Of a cluster. An arrival without release is for a block that has nothing to show: that has only started, or only read.
// All threads of a warp must execute these barriers together, whatever branches they come from.
__device__ __forceinline__ void arrive_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive_started() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Another block's place in shared memory. Written to once it is known that the block has started.
__device__ __forceinline__ u32 remote_address(u32 address, int rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
