// The emulator's own versions of the functions that wrap PTX instructions in the kernels' source. This is the one list
// of what it knows: translate.py takes the names from here, drops the functions of these names from the source, and
// refuses one that wraps an instruction and is not here. What is not computed in place is in instructions.cpp.
#pragma once
#include <initializer_list>

#include "language.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// What several of these share; no names of the kernels.
namespace emulator {
  void tma_load_box(u32 to, const u64 (&map)[16], std::initializer_list<int> place, u32 barrier, u32 mask,
                    const char* what);
  void store_matrices(u32 address, const u32* r, int count);
  void wait_for_copies(int left);
  void arrive_at_part(u32 barrier, int threads, bool waits);
  void wgmma_of_shared(float* d, int count, u64 a, u64 b, int more, int kind);
  float widen_e4m3(unsigned char v);
}  // namespace emulator

// -- dependent launches: kernels run one after the other; a read too early is found all the same (global_memory.h) -----

inline void inject_delay(u32) {}
inline void griddepcontrol_launch_dependents() {}
void griddepcontrol_wait();

// -- barriers in shared memory, and what completes them ----------------------------------------------------------------

void mbarrier_init(u32 barrier, u32 arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(u32 barrier);
void mbarrier_arrive_remote(u32 barrier, u32 rank);
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes);
void mbarrier_wait(u32 barrier, u32 parity);
inline void mbarrier_wait_cluster(u32 barrier, u32 parity) { mbarrier_wait(barrier, parity); }
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
void bulk_prefetch(const void* from, u32 bytes);
template <class Map>
inline void tma_load_2d(u32 to, const Map& map, int x, int y, u32 barrier, u16 mask, u64) {
  emulator::tma_load_box(to, map.opaque, {x, y}, barrier, mask, "tma_load_2d");
}
template <class Map>
inline void tma_load_5d(u32 to, const Map& map, int x, int eights, int group, u32 barrier, u64) {
  emulator::tma_load_box(to, map.opaque, {x, 0, 0, eights, group}, barrier, 0, "tma_load_5d");
}
template <class Map>
inline void prefetch_tensormap(const Map&) {}
inline u64 policy_evict_first() { return 0; }
inline u64 policy_evict_last() { return 0; }
void st_async(u32 to, u32 barrier, u32 a, u32 b, u32 c, u32 d);
inline void fence_proxy_async() {}

// -- polled values in global memory -----------------------------------------------------------------------

void st_relaxed(u16* to, u16 v);
void st_relaxed(u32* to, u32 v);
void st_relaxed_v4(void* to, const uint4& v);
void count_poll(u32& polls);
uint4 ld_relaxed_v4(const void* p);
void wait_there(uint4& v, const void* p);
uint4 ld_cg_v4(const void* p);
uint4 ld_global_v4(const void* p);
inline float2 ld_constant_f2(const float* p) { return *(const float2*)p; }
inline float ld_cg(const float* p) { return *p; }

// -- arrivals that are counted in global memory ------------------------------------------------------------------------

void red_release(u32* counter);
void wait_count(const u32* counter, u32 target);

// -- copies by the threads of a warp -----------------------------------------------------------------------------------

void cp_async_16(u32 to, const void* from, bool real, u64 policy);
void cp_async_commit();
void cp_async_arrive(u32 barrier);
template <int LEFT>
inline void cp_async_wait() {
  emulator::wait_for_copies(LEFT);
}

// -- clusters ----------------------------------------------------------------------------------------------------------

void cluster_arrive();
void cluster_arrive_relaxed();
void cluster_wait();
u32 mapa(u32 address, int rank);
float ld_cluster(u32 address, int rank);
void st_cluster(u32 address, float v);
void st_cluster_v2(u32 address, float a, float b);
void st_cluster_v4(u32 address, const uint4& v);
void st_cluster_f4(u32 address, float a, float b, float c, float d);

// -- parts of a block --------------------------------------------------------------------------------------------------

template <int COUNT>
inline void setmaxnreg_dec() {}
template <int COUNT>
inline void setmaxnreg_inc() {}
template <int THREADS>
inline void bar_sync(u32 barrier) {
  emulator::arrive_at_part(barrier, THREADS, true);
}
template <int THREADS>
inline void bar_arrive(u32 barrier) {
  emulator::arrive_at_part(barrier, THREADS, false);
}

// -- this block's shared memory, by address ----------------------------------------------------------------------------

u16 ld_shared_u16(u32 address);
uint4 ld_shared_v4(u32 address);
float4 ld_shared_f4(u32 address);
void st_shared_f2(u32 address, float a, float b);
inline void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 r[4] = {a, b, c, d};
  emulator::store_matrices(address, r, 4);
}
inline void stmatrix_x2_trans(u32 address, u32 a, u32 b) {
  const u32 r[2] = {a, b};
  emulator::store_matrices(address, r, 2);
}
inline void stmatrix_x1_trans(u32 address, u32 a) { emulator::store_matrices(address, &a, 1); }
void ldmatrix_x4(u32 (&r)[4], u32 address);
void ldmatrix_x4_trans(u32 (&r)[4], u32 address);

// -- conversions -------------------------------------------------------------------------------------------------------

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
inline float reciprocal_fast(float x) { return 1.f / x; }
inline float tanh_fast(float x) { return tanhf(x); }
inline u16 round_bf16(float x) {
  const u32 bits = bits_as<u32>(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16x2(float low, float high) { return (u32)round_bf16(low) | (u32)round_bf16(high) << 16; }
namespace emulator {
  template <class Operation>
  u32 each_of_two(u32 a, u32 b, Operation operation) {
    const auto one = [&](u32 x, u32 y) { return operation(bits_as<float>(x), bits_as<float>(y)); };
    return pack_bf16x2(one(a << 16, b << 16), one(a & 0xffff0000u, b & 0xffff0000u));
  }
}  // namespace emulator
inline u32 scaled(u32 v, u32 s) {
  return emulator::each_of_two(v, s, [](float a, float b) { return fmaf(a, b, a); });
}
template <u32 SELECTOR>
inline u32 permute_bytes(u32 low, u32 high) {
  const u64 both = (u64)high << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = SELECTOR >> 4 * i & 15, byte = (u32)(both >> (nibble & 7) * 8) & 255;
    result |= (nibble < 8 ? byte : byte >> 7 ? 255 : 0) << 8 * i;
  }
  return result;
}
inline u32 mul_bf16x2(u32 a, u32 b) {
  return emulator::each_of_two(a, b, [](float x, float y) { return x * y; });
}
inline u32 sub_bf16x2(u32 a, u32 b) {
  return emulator::each_of_two(a, b, [](float x, float y) { return x - y; });
}
float widen_f16(u16 v);
u32 pack_f16x2(float low, float high);
u16 pack_e4m3x2(float low, float high);

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
template <int COUNT>
inline void wgmma_bf16_by_registers(float (&d)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
  wgmma_of_registers(d, COUNT, {a0, a1, a2, a3}, b, more);
}
template <int COUNT>
inline void wgmma_bf16(float (&d)[COUNT], u64 a, u64 b, int more) {
  emulator::wgmma_of_shared(d, COUNT, a, b, more, 0);
}
template <int COUNT>
inline void wgmma_f16(float (&d)[COUNT], u64 a, u64 b, int more) {
  emulator::wgmma_of_shared(d, COUNT, a, b, more, 1);
}
template <int COUNT>
inline void wgmma_e4m3(float (&d)[COUNT], u64 a, u64 b, int more) {
  emulator::wgmma_of_shared(d, COUNT, a, b, more, 2);
}
