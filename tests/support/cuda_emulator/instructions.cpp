// What instructions.h declares: instructions of one thread on shared and global memory, barriers, and the copy engine.
#include "instructions.h"

#include "machine.h"

using namespace emulator;

namespace {

// A shared memory address: the block's rank in the upper byte, the place in its memory below.
constexpr u32 PLACE = 0xffffff;
constexpr int RANK = 24;

Block& block_of(u32 address, const char* what) {
  Cluster& cluster = *current->block->cluster;
  const u32 rank = address >> RANK;
  if (rank >= cluster.blocks.size()) fail("%s: address %#x belongs to no block of %zu", what, address, cluster.blocks.size());
  Block& block = *cluster.blocks[rank];
  if (&block == current->block) return block;
  if (!current->cluster_waits) fail("%s: nothing says yet that block %u of the cluster has started", what, rank);
  if (!block.left) fail("%s: block %u of the cluster has ended", what, rank);
  return block;
}

void check_alignment(size_t address, size_t bytes, const char* what) {
  if (address % bytes) fail("%s: expected an address at a multiple of %zu bytes, got %zu beyond one", what, bytes, address % bytes);
}

Block& own_block(u32 address, const char* what) {
  if (address >> RANK != (u32)current->block->rank) fail("%s: address %#x is another block's", what, address);
  return *current->block;
}

template <class T>
T load(Block& block, u32 address, const char* what) {
  check_alignment(address & PLACE, sizeof(T), what);
  block.memory.read(address & PLACE, sizeof(T), current->warp->agent, current->warp->clock, what);
  T value;
  memcpy(&value, block.memory.bytes + (address & PLACE), sizeof(T));
  return value;
}

template <class T>
void store(Block& block, u32 address, const T& value, const char* what) {
  check_alignment(address & PLACE, sizeof(T), what);
  Warp& warp = *current->warp;
  block.memory.write(address & PLACE, sizeof(T), warp.agent, warp.clock, warp.clock.seen[warp.agent], what);
  memcpy(block.memory.bytes + (address & PLACE), &value, sizeof(T));
}

Barrier& barrier_of(Block& block, u32 address, const char* what) {
  const auto found = block.barriers.find(address & PLACE);
  if (found == block.barriers.end()) fail("%s: there is no barrier at %#x", what, address);
  // Whoever uses a barrier must come after its initialisation, and after nothing else was written there.
  block.memory.read(address & PLACE, 8, current->warp->agent, current->warp->clock, what);
  return found->second;
}

// Which threads have come, and what they knew.
void arrive(Rendezvous& rendezvous, int all) {
  if (++rendezvous.arrived < all) return;
  rendezvous.arrived = 0;
  rendezvous.released = std::move(rendezvous.next);
  rendezvous.next = {};
  ++rendezvous.phase;
}

bool has_passed(const Thread& t) { return ((const Rendezvous*)t.object)->phase != t.value; }

void arrive_at_cluster(const char* what, bool releases) {
  Cluster& cluster = *current->block->cluster;
  meet(what, [&](Warp& warp) {
    if (releases)
      release(warp, cluster.rendezvous.next);
    else
      cluster.rendezvous.next.join(warp.fenced);
    for (Thread* thread : warp.threads) {
      if (thread->cluster_arrivals++ != thread->cluster_waits) fail("%s: the warp has arrived before, and not waited", what);
      thread->cluster_phase = cluster.rendezvous.phase;
    }
    for (int i = 0; i < LANES; ++i) arrive(cluster.rendezvous, (int)cluster.blocks.size() * machine.threads);
  });
}

}  // namespace

// -- barriers of threads -----------------------------------------------------------------------------------------------

void __syncthreads() {
  Block& block = *current->block;
  const u32 phase = block.rendezvous.phase;
  block.rendezvous.next.join(current->warp->clock);
  arrive(block.rendezvous, machine.threads);
  if (block.rendezvous.phase == phase) {
    wait("__syncthreads", has_passed, &block.rendezvous, phase);
    return;
  }
  for (Warp& warp : block.warps) {
    warp.clock.join(block.rendezvous.released);
    warp.clock.seen[warp.agent] = ++block.cluster->stamps[warp.agent];
  }
}
// Threads of whole warps.
void emulator::arrive_at_part(u32 barrier, int threads, bool waits) {
  if (barrier < 1 || barrier > 15) fail("bar: a block has barriers 1 to 15 for parts of it, got %u", barrier);
  Rendezvous& here = current->block->parts[barrier];
  uint32_t phase = 0;
  meet(waits ? "bar_sync" : "bar_arrive", [&](Warp& warp) {
    release(warp, here.next);
    for (auto& lane : warp.lane) lane.word[0] = here.phase;
    for (int i = 0; i < LANES; ++i) arrive(here, threads);
  });
  phase = current->warp->lane[current->lane].word[0];
  if (!waits) return;
  wait("bar_sync", has_passed, &here, phase);
  current->warp->clock.join(here.released);
}
void __syncwarp() {
  meet("__syncwarp", [](Warp&) {});
}
float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  auto& mine = current->warp->lane[current->lane];
  float result;
  mine.word[0] = bits_as<u32>(value);
  mine.word[1] = current->lane ^ lane_mask;
  mine.result = &result;
  meet("__shfl_xor_sync", [](Warp& warp) {
    for (auto& lane : warp.lane) *(float*)lane.result = bits_as<float>(warp.lane[lane.word[1] % LANES].word[0]);
  });
  return result;
}
void cluster_arrive() { arrive_at_cluster("cluster_arrive", true); }
void cluster_arrive_relaxed() { arrive_at_cluster("cluster_arrive_relaxed", false); }
void cluster_wait() {
  Cluster& cluster = *current->block->cluster;
  meet("cluster_wait", [](Warp&) {});
  if (current->cluster_waits++ == current->cluster_arrivals) fail("cluster_wait: the warp has not arrived");
  wait("cluster_wait", has_passed, &cluster.rendezvous, current->cluster_phase);
  current->warp->clock.join(cluster.rendezvous.released);
}

// -- barriers in shared memory, and what completes them ----------------------------------------------------------------

void mbarrier_init(u32 barrier, u32 arrivals) {
  Block& block = own_block(barrier, "mbarrier_init");
  store(block, barrier, (u64)arrivals, "mbarrier_init");
  block.memory.hold_barrier(barrier & PLACE, current->warp->clock.seen[current->warp->agent]);
  block.barriers[barrier & PLACE] = {(int)arrivals, (int)arrivals, 0, 0, {}, false};
}
void fence_mbarrier_init() { release(*current->warp, current->warp->fenced); }
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  Barrier& here = barrier_of(own_block(barrier, "mbarrier_arrive"), barrier, "mbarrier_arrive");
  if (here.pending == 0) fail("mbarrier_arrive: all of %d arrivals have come", here.expected);
  release(*current->warp, here.released);
  here.bytes += (int)bytes;
  --here.pending;
  here.complete();
}
void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
void mbarrier_arrive_remote(u32 barrier, u32 rank) {
  if (machine.cluster_size < 2) return mbarrier_arrive(barrier);
  const u32 there = mapa(barrier, (int)rank);
  Barrier& afar = barrier_of(block_of(there, "mbarrier_arrive_remote"), there, "mbarrier_arrive_remote");
  if (afar.pending == 0) fail("mbarrier_arrive_remote: all of %d arrivals have come", afar.expected);
  release(*current->warp, afar.released);
  --afar.pending;
  afar.complete();
}
void mbarrier_wait(u32 barrier, u32 parity) {
  Barrier& here = barrier_of(own_block(barrier, "mbarrier_wait"), barrier, "mbarrier_wait");
  wait("mbarrier_wait", [](const Thread& t) { return (((const Barrier*)t.object)->phase & 1) != t.value; }, &here, parity);
  current->warp->clock.join(here.released);
  current->behind |= here.behind;
}
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  check_alignment(to, 16, "bulk_load");
  check_alignment((size_t)from, 16, "bulk_load");
  check_alignment(bytes, 16, "bulk_load");
  if (bytes) machine.global.read(from, bytes, current->waited || current->block->waited, "bulk_load");
  Block& block = own_block(to, "bulk_load");
  barrier_of(own_block(barrier, "bulk_load"), barrier, "bulk_load");
  block.cluster->copies.push_back(
      {&block, to & PLACE, bytes, barrier & PLACE, (const unsigned char*)from, current->warp->clock, "bulk_load",
       current->waited, {}});
  ++block.copies;
}
// The caches are coherent, so bytes that another kernel still writes may be fetched.
void bulk_prefetch(const void* from, u32 bytes) {
  check_alignment((size_t)from, 16, "bulk_prefetch");
  check_alignment(bytes, 16, "bulk_prefetch");
  machine.global.read(from, bytes, true, "bulk_prefetch");
}

// -- copies by the threads of a warp -----------------------------------------------------------------------------------

void cp_async_16(u32 to, const void* from, bool real, u64) {
  check_alignment(to, 16, "cp_async_16");
  check_alignment((size_t)from, 16, "cp_async_16");
  own_block(to, "cp_async_16");
  if (real) machine.global.read(from, 16, current->waited || current->block->waited, "cp_async_16");
  current->async.push_back({AsyncStep::COPY, to & PLACE, real ? (const unsigned char*)from : nullptr, {}});
  release(*current->warp, current->async.back().clock);
}
void cp_async_commit() {
  current->async.push_back({AsyncStep::GROUP, 0, nullptr, {}});
  ++current->groups;
}
void cp_async_arrive(u32 barrier) {
  barrier_of(own_block(barrier, "cp_async_arrive"), barrier, "cp_async_arrive");
  current->async.push_back({AsyncStep::ARRIVE, barrier & PLACE, nullptr, {}});
}
void emulator::wait_for_copies(int left) {
  wait("cp_async_wait", [](const Thread& t) { return t.groups <= (int)t.value; }, nullptr, left);
  // What comes behind may still follow an arrival that is not done.
  if (left == 0) wait("cp_async_wait", [](const Thread& t) { return t.async.empty(); });
  current->warp->clock.join(current->landed);
}

// A tensor map here is what driver.py wrote. A box has rows of 64 or 128 bytes, one after the other along each dimension,
// swizzled: pieces of 16 bytes, four or eight of a row, change places by the address' bits from the seventh on. What is
// outside of the tensor is zero.
void emulator::tma_load_box(u32 to, const u64 (&map)[16], std::initializer_list<int> place, u32 barrier, u32 mask,
                            const char* what) {
  const u64 *sizes = map + 2, *strides = map + 7, *sides = map + 11;
  const int64_t size = (int64_t)(map[1] >> 32), x = place.begin()[0], inner = (int64_t)sides[0] * size;
  const u32 rank = (u32)map[1];
  if (rank != place.size()) fail("%s: expected a map of %zu dimensions, got one of %u", what, place.size(), rank);
  u64 rows = 1;
  for (u32 d = 1; d < rank; ++d) rows *= sides[d];
  const u32 bytes = (u32)(rows * inner), pieces = (u32)inner / 16;
  check_alignment(to, 128, what);
  if (mask == 0) mask = 1u << current->block->rank;
  std::vector<unsigned char> box(bytes);
  const int64_t there = std::min<int64_t>(inner, ((int64_t)sizes[0] - x) * size);
  for (u64 row = 0; row < rows; ++row) {
    bool inside = x >= 0 && there > 0;
    const unsigned char* from = (const unsigned char*)map[0] + x * size;
    u64 rest = row;
    for (u32 d = 1; d < rank; rest /= sides[d++]) {
      const int64_t at = place.begin()[d] + (int64_t)(rest % sides[d]);
      inside = inside && at >= 0 && at < (int64_t)sizes[d];
      from += at * (int64_t)strides[d - 1];
    }
    if (!inside) continue;
    machine.global.read(from, (size_t)there, current->waited, what);
    for (int64_t i = 0; i < there; ++i) {
      const u32 at = (to & PLACE) + (u32)(row * inner + i);
      box[(at ^ (at >> 7 & (pieces - 1)) << 4) - (to & PLACE)] = from[i];
    }
  }
  for (u32 rank = 0; mask >> rank; ++rank) {
    if (!(mask >> rank & 1)) continue;
    const auto there = [&](u32 address) { return (address & PLACE) | rank << RANK; };
    Block& block = block_of(there(to), what);
    barrier_of(block, there(barrier), what);
    block.cluster->copies.push_back(
        {&block, to & PLACE, bytes, barrier & PLACE, nullptr, current->warp->clock, what, current->waited, box});
    block.cluster->copies.back().from = block.cluster->copies.back().box.data();
    ++block.copies;
  }
}
// The store may come late, too, but nobody can tell: whoever does not wait for the barrier is found by the clocks.
void st_async(u32 to, u32 barrier, u32 a, u32 b, u32 c, u32 d) {
  if (machine.cluster_size < 2) fail("st_async: the kernel was not launched in clusters");
  Block& block = block_of(to, "st_async");
  if (to >> RANK != barrier >> RANK) fail("st_async: the barrier lies in another block than the address");
  Barrier& there = barrier_of(block, barrier, "st_async");
  const uint4 v{a, b, c, d};
  store(block, to, v, "st_async");
  release(*current->warp, there.released);
  there.bytes -= (int)sizeof(v);
  there.complete();
}

// -- global memory -----------------------------------------------------------------------------------------------------

void griddepcontrol_wait() { current->waited = true; }

template <class T>
static T load_global(const void* p, bool ordered, const char* what) {
  check_alignment((size_t)p, sizeof(T), what);
  machine.global.read(p, sizeof(T), ordered, what);
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
static void store_global(T* p, T value, const char* what) {
  check_alignment((size_t)p, sizeof(T), what);
  machine.global.write(p, sizeof(T), current->waited || current->behind || current->block->waited, what);
  *p = value;
}
void count_poll(u32& polls) {
  if (++polls > 100000) fail("threads wait for ever: count_poll");
}
void st_relaxed(u32* to, u32 v) { store_global(to, v, "st_relaxed"); }
void st_relaxed_v4(void* to, const uint4& v) { store_global((uint4*)to, v, "st_relaxed_v4"); }
void st_relaxed(u16* to, u16 v) { store_global(to, v, "st_relaxed"); }
// It may be called in a loop until another thread has stored, which gets its turn so.
uint4 ld_relaxed_v4(const void* p) {
  wait("ld_relaxed_v4", nullptr);
  return load_global<uint4>(p, true, "ld_relaxed_v4");
}
void wait_there(uint4& v, const void* p) {
  const auto are_there = [](const Thread& t) {
    const u16* v = (const u16*)t.object;
    return std::none_of(v, v + 8, [](u16 one) { return one == 0xffff; });
  };
  if (current->object = &v; are_there(*current)) return;
  wait("wait_there", are_there, p);
  v = load_global<uint4>(p, true, "wait_there");
}
// Counters in global memory put the blocks of a grid in order; other blocks' accesses to it are not checked.
void red_release(u32* counter) { store_global(counter, load_global<u32>(counter, true, "red_release") + 1, "red_release"); }
void wait_count(const u32* counter, u32 target) {
  machine.global.read(counter, sizeof(u32), true, "wait_count");
  wait("wait_count", [](const Thread& t) { return (int)(*(const u32*)t.object - (u32)t.value) >= 0; }, counter, target);
}
uint4 ld_global_v4(const void* p) { return load_global<uint4>(p, current->waited || current->block->waited, "ld_global_v4"); }
uint4 ld_cg_v4(const void* p) { return load_global<uint4>(p, current->waited || current->block->waited, "ld_cg_v4"); }

// -- shared memory -----------------------------------------------------------------------------------------------------

size_t __cvta_generic_to_shared(const void* p) {
  const size_t at = (const unsigned char*)p - current->block->memory.bytes;
  if (at > MOST_SHARED) fail("smem_of: the pointer is not to shared memory");
  return at | (size_t)current->block->rank << RANK;
}
u32 mapa(u32 address, int rank) {
  own_block(address, "mapa");
  if (rank < 0 || rank >= (int)current->block->cluster->blocks.size())
    fail("mapa: expected a rank below %zu, got %d", current->block->cluster->blocks.size(), rank);
  return (address & PLACE) | (u32)rank << RANK;
}
float ld_cluster(u32 address, int rank) {
  const u32 there = mapa(address, rank);
  return load<float>(block_of(there, "ld_cluster"), there, "ld_cluster");
}
void st_cluster(u32 address, float v) { store(block_of(address, "st_cluster"), address, v, "st_cluster"); }
void st_cluster_v2(u32 address, float a, float b) {
  store(block_of(address, "st_cluster_v2"), address, make_float2(a, b), "st_cluster_v2");
}
void st_cluster_v4(u32 address, const uint4& v) { store(block_of(address, "st_cluster_v4"), address, v, "st_cluster_v4"); }
u16 ld_shared_u16(u32 address) { return load<u16>(own_block(address, "ld_shared_u16"), address, "ld_shared_u16"); }
uint4 ld_shared_v4(u32 address) { return load<uint4>(own_block(address, "ld_shared_v4"), address, "ld_shared_v4"); }
float4 ld_shared_f4(u32 address) { return load<float4>(own_block(address, "ld_shared_f4"), address, "ld_shared_f4"); }
void st_shared_f2(u32 address, float a, float b) {
  store(own_block(address, "st_shared_f2"), address, make_float2(a, b), "st_shared_f2");
}
void st_cluster_f4(u32 address, float a, float b, float c, float d) {
  store(block_of(address, "st_cluster_f4"), address, make_float4(a, b, c, d), "st_cluster_f4");
}

// -- plain accesses: the compiler announces each (-fsanitize=thread), and bad alignment (-fsanitize=alignment) ---------

static void access(const void* p, size_t bytes, bool writes) {
  if (!current || current->fiber.owns(p)) return;
  Block& block = *current->block;
  const size_t at = (const unsigned char*)p - block.memory.bytes;
  if (at < MOST_SHARED) {
    Warp& warp = *current->warp;
    if (writes)
      block.memory.write((u32)at, (u32)bytes, warp.agent, warp.clock, warp.clock.seen[warp.agent], "the code");
    else
      block.memory.read((u32)at, (u32)bytes, warp.agent, warp.clock, "the code");
  } else {
    const bool waited = current->waited || block.waited;
    if (writes)
      machine.global.write(p, bytes, waited || current->behind, "the code");
    else
      machine.global.read(p, bytes, waited, "the code");
  }
}

extern "C" {
#define ACCESS(n)                                                      \
  void __tsan_read##n(void* p) { access(p, n, false); }                \
  void __tsan_write##n(void* p) { access(p, n, true); }                \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false); }      \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true); }      \
  void __tsan_read##n##_pc(void* p, void*) { access(p, n, false); }    \
  void __tsan_write##n##_pc(void* p, void*) { access(p, n, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, true); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  access(from, bytes, false);
  access(to, bytes, true);
  return memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  access(to, bytes, true);
  return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
// The data begin with the place in the source: file, line, column; then comes the type, and the alignment's logarithm.
struct Misaligned {
  const char* file;
  u32 line, column;
  const void* type;
  unsigned char log_alignment;
};
void __ubsan_handle_type_mismatch_v1(Misaligned* where, void* p) {
  fail("%s:%u: expected a pointer to a multiple of %d bytes, got %zu beyond one", where->file, where->line,
       1 << where->log_alignment, (size_t)p % (1u << where->log_alignment));
}
}
