// The emulator's own versions of the functions that wrap PTX instructions in the kernels' source. This is the one list
// of what it knows: translate.py takes the names from here, drops the functions of these names from the source, and
// refuses one that wraps an instruction and is not here. What is not computed in place is in instructions.cpp.
#pragma once
#include "language.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// -- dependent launches: kernels run one after the other; a read too early is found all the same (global_memory.h) -----

inline void inject_delay(u32) {}
inline void griddepcontrol_launch_dependents() {}
void griddepcontrol_wait();

// -- barriers in shared memory, and what completes them ----------------------------------------------------------------

void mbarrier_init(u32 barrier, u32 arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(u32 barrier);
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes);
void mbarrier_wait(u32 barrier, u32 parity);
inline void mbarrier_wait_cluster(u32 barrier, u32 parity) { mbarrier_wait(barrier, parity); }
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
void st_async(u32 to, u32 barrier, u32 a, u32 b, u32 c, u32 d);
inline void fence_proxy_async() {}

// -- polled values in global memory -----------------------------------------------------------------------

void st_relaxed(u16* to, u16 v);
uint4 ld_relaxed_v4(const void* p);
void wait_there(uint4& v, const void* p);
uint4 ld_cg_v4(const void* p);
inline float ld_cg(const float* p) { return *p; }

// -- clusters ----------------------------------------------------------------------------------------------------------

void cluster_arrive();
void cluster_arrive_relaxed();
void cluster_wait();
u32 mapa(u32 address, int rank);
float ld_cluster(u32 address, int rank);
void st_cluster(u32 address, float v);
void st_cluster_v2(u32 address, float a, float b);
void st_cluster_v4(u32 address, const uint4& v);

// -- this block's shared memory, by address ----------------------------------------------------------------------------

void ld_shared_v2(u32& a, u32& b, u32 address);
void st_shared(u32 address, u32 v);
void ldmatrix_x4(u32 (&r)[4], u32 address);
void ldmatrix_x4_trans(u32 (&r)[4], u32 address);

// -- conversions -------------------------------------------------------------------------------------------------------

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
inline u16 round_bf16(float x) {
  const u32 bits = bits_as<u32>(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16x2(float low, float high) { return (u32)round_bf16(low) | (u32)round_bf16(high) << 16; }
inline u32 scaled(u32 v, u32 s) {
  const auto one = [](u32 a, u32 b) { return fmaf(bits_as<float>(a), bits_as<float>(b), bits_as<float>(a)); };
  return pack_bf16x2(one(v << 16, s << 16), one(v & 0xffff0000u, s & 0xffff0000u));
}
template <int FIRST>
inline u32 widened_pair(u32 bytes) {
  return pack_bf16x2((int8_t)(bytes >> 8 * FIRST), (int8_t)(bytes >> 8 * (FIRST + 1)));
}

// -- the tensor cores --------------------------------------------------------------------------------------------------

void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int LEFT>
inline void wgmma_wait() {}
template <class T>
inline void wgmma_hold(T&) {}
void wgmma_of_registers(float* d, int count, const u32 (&a)[4], u64 b, int more);
template <int COUNT>
inline void wgmma(float (&d)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
  wgmma_of_registers(d, COUNT, {a0, a1, a2, a3}, b, more);
}
