// How the machine runs a grid: see machine.h.
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <numeric>

namespace emulator {

Machine machine;
Thread* current;

static jmp_buf failed;
static char message[2000];
static void (*entry)(void**);
static void** arguments;

void fail(const char* format, ...) {
  int at = snprintf(message, sizeof(message), "%s: ", machine.kernel);
  if (current)
    at += snprintf(message + at, sizeof(message) - at, "block %d, thread %d: ", current->block->index, current->index);
  va_list rest;
  va_start(rest, format);
  vsnprintf(message + at, sizeof(message) - at, format, rest);
  va_end(rest);
  _longjmp(failed, 1);
}

void SharedMemory::race(const char* what, const char* does, uint32_t cell, const char* did, int other) const {
  const int agents = machine.threads / LANES + 1, warp = other % agents;
  char who[60] = "its copy engine";
  if (warp < agents - 1) snprintf(who, sizeof(who), "warp %d of block %d of the cluster", warp, other / agents);
  fail("%s %s bytes %d and %d of shared memory, which %s %s with no barrier between", what, does,
       (int)cell * 2 - (int)STATIC_SHARED, (int)cell * 2 + 1 - (int)STATIC_SHARED, who, did);
}

void wait(const char* what, Ready ready, const void* object, uint64_t value) {
  current->object = object;
  current->value = value;
  if (ready && ready(*current)) return;
  current->what = what;
  current->ready = ready;
  current->fiber.stop();
  current->ready = nullptr;
}

static void run_thread(void* argument) {
  Thread* thread = (Thread*)argument;
  for (;;) {  // The next launch begins here again.
    entry(arguments);
    thread->done = true;
    thread->fiber.stop();
  }
}

// A warp's turn: its lanes, in any order, until they all wait, or for a few rounds.
static void take_turn(Warp& warp) {
  for (uint32_t rounds = 1 + machine.random() % 8, left = rounds; left; --left) {
    const uint32_t first = machine.random() % LANES, stride = 1 + 2 * (machine.random() % 16);
    bool ran = false;
    for (int i = 0; i < LANES; ++i) {
      Thread& thread = *warp.threads[(first + i * stride) % LANES];
      if (thread.done || (thread.ready && !thread.ready(thread))) continue;
      const bool polls = thread.started && !thread.ready;
      if (polls && left < rounds) continue;
      thread.started = true;
      ran = true;
      if (!polls) machine.progress = true;
      current = &thread;
      thread.fiber.resume(run_thread, &thread);
      current = nullptr;
      if (!thread.done) continue;
      if (thread.fiber.overflown()) fail("a thread needs more than %zu bytes of stack", Fiber::STACK);
      if (!thread.async.empty()) {
        current = &thread;
        fail("a thread ends while copies by cp.async are under way");
      }
      --warp.block->cluster->left;
      if (--warp.block->left == 0 && warp.block->copies) {
        current = &thread;
        fail("the block ends while copies to its shared memory are under way");
      }
    }
    if (!ran) return;
  }
}

static void arrive_copy(Cluster& cluster, size_t which) {
  const Copy copy = std::move(cluster.copies[which]);
  cluster.copies.erase(cluster.copies.begin() + (long)which);
  Block& block = *copy.block;
  Clock clock = copy.clock;
  const uint32_t stamp = ++cluster.stamps[block.engine];
  clock.seen[block.engine] = stamp;
  block.memory.write(copy.to, copy.bytes, block.engine, clock, stamp, copy.what);
  memcpy(block.memory.bytes + copy.to, copy.from, copy.bytes);
  --block.copies;
  Barrier& barrier = block.barriers.at(copy.barrier);
  barrier.released.join(clock);
  barrier.bytes -= (int)copy.bytes;
  barrier.behind |= copy.waited;
  barrier.complete();
  machine.progress = true;
}

// The next steps of a thread's copies by cp.async, up to an arrival or the end of a group.
static void land(Thread& thread) {
  Block& block = *thread.block;
  while (!thread.async.empty()) {
    AsyncStep step = std::move(thread.async.front());
    thread.async.pop_front();
    machine.progress = true;
    if (step.kind == AsyncStep::GROUP) {
      --thread.groups;
      return;
    }
    if (step.kind == AsyncStep::ARRIVE) {
      Barrier& barrier = block.barriers.at(step.to);
      barrier.released.join(thread.landed);
      if (barrier.pending == 0) fail("cp_async_arrive: all of %d arrivals have come", barrier.expected);
      --barrier.pending;
      barrier.complete();
      return;
    }
    const uint32_t stamp = ++block.cluster->stamps[block.engine];
    step.clock.seen[block.engine] = stamp;
    block.memory.write(step.to, 16, block.engine, step.clock, stamp, "cp_async_16");
    if (step.from)
      memcpy(block.memory.bytes + step.to, step.from, 16);
    else
      memset(block.memory.bytes + step.to, 0, 16);
    thread.landed.join(step.clock);
  }
}

static void begin_cluster(int first_block) {
  auto cluster = std::make_unique<Cluster>();
  const int warps = machine.threads / LANES, agents = (warps + 1) * machine.cluster_size;
  cluster->left = machine.cluster_size * machine.threads;
  cluster->stamps.assign(agents, machine.highest + 1);
  for (int rank = 0; rank < machine.cluster_size; ++rank) {
    if (machine.spare.empty()) machine.spare.push_back(std::make_unique<Block>());
    Block* block = machine.spare.back().release();
    machine.spare.pop_back();
    block->cluster = cluster.get();
    block->index = first_block + rank;
    block->rank = rank;
    block->engine = rank * (warps + 1) + warps;
    block->rendezvous = {};
    block->parts.clear();
    block->barriers.clear();
    block->left = machine.threads;
    block->copies = 0;
    block->waited = false;
    block->memory.begin(machine.shared, machine.highest, rank * (warps + 1));
    block->warps.assign(warps, {});
    while ((int)block->threads.size() < machine.threads) block->threads.push_back(std::make_unique<Thread>());
    for (int i = 0; i < machine.threads; ++i) {
      Thread& thread = *block->threads[i];
      Warp& warp = block->warps[i / LANES];
      warp.block = block;
      warp.agent = rank * (warps + 1) + i / LANES;
      warp.clock.seen.assign(agents, machine.highest);
      warp.clock.seen[warp.agent] = machine.highest + 1;
      warp.threads[i % LANES] = &thread;
      thread.block = block;
      thread.warp = &warp;
      thread.index = i;
      thread.lane = i % LANES;
      thread.done = thread.started = thread.behind = false;
      thread.waited = machine.ordered;
      thread.async.clear();
      thread.groups = 0;
      thread.landed = {};
      thread.ready = nullptr;
      thread.cluster_phase = thread.cluster_arrivals = thread.cluster_waits = 0;
    }
    cluster->blocks.push_back(block);
  }
  machine.resident.push_back(std::move(cluster));
}

static void end_cluster(size_t which) {
  Cluster& cluster = *machine.resident[which];
  for (const uint32_t stamp : cluster.stamps) machine.highest = std::max(machine.highest, stamp);
  for (Block* block : cluster.blocks) machine.spare.emplace_back(block);
  machine.resident.erase(machine.resident.begin() + (long)which);
}

[[noreturn]] static void fail_stuck() {
  std::map<std::string, int> waits;
  for (auto& cluster : machine.resident)
    for (Block* block : cluster->blocks)
      for (int i = 0; i < machine.threads; ++i)
        if (!block->threads[i]->done) ++waits[block->threads[i]->what];
  std::string all;
  for (auto& [what, count] : waits) all += (all.empty() ? "" : ", ") + std::to_string(count) + " at " + what;
  fail("it never ends: these threads wait for ever: %s", all.c_str());
}

static void run_grid() {
  constexpr int MOST_POLLS = 200;
  std::vector<int> clusters(machine.grid / machine.cluster_size);
  std::iota(clusters.begin(), clusters.end(), 0);
  std::shuffle(clusters.begin(), clusters.end(), machine.random);
  std::vector<Warp*> warps;
  size_t next = 0, resident = 0;
  for (int idle = 0; next < clusters.size() || !machine.resident.empty();) {
    if (machine.resident.empty() || idle > MOST_POLLS) {
      if (next == clusters.size()) fail_stuck();
      begin_cluster(clusters[next++] * machine.cluster_size);
      idle = 0;
    }
    if (resident != machine.resident.size()) {
      warps.clear();
      for (auto& cluster : machine.resident)
        for (Block* block : cluster->blocks)
          for (Warp& warp : block->warps) warps.push_back(&warp);
      resident = machine.resident.size();
    }
    machine.progress = false;
    std::shuffle(warps.begin(), warps.end(), machine.random);
    // Some lag behind, unless nobody went on.
    for (Warp* warp : warps)
      if (idle || machine.random() % 4) take_turn(*warp);
    for (auto& cluster : machine.resident)
      if (!cluster->copies.empty() && (!machine.progress || machine.random() % 2))
        arrive_copy(*cluster, machine.random() % cluster->copies.size());
    for (auto& cluster : machine.resident)
      for (Block* block : cluster->blocks)
        for (int i = 0; i < machine.threads; ++i)
          if (Thread& thread = *block->threads[i]; !thread.async.empty() && (idle || machine.random() % 2)) land(thread);
    idle = machine.progress ? 0 : idle + 1;
    for (size_t i = machine.resident.size(); i-- > 0;)
      if (machine.resident[i]->left == 0) end_cluster(i), resident = 0;
  }
}

}  // namespace emulator

using namespace emulator;

Index emulator::thread_index() { return {current->index}; }
Index emulator::block_index() { return {current->block->index}; }
Index emulator::grid_size() { return {machine.grid}; }
unsigned char* emulator::dynamic_shared() { return current->block->memory.bytes + STATIC_SHARED; }
void* emulator::static_shared(int number, size_t bytes, size_t alignment) {
  static std::map<int, uint32_t> places;
  static uint32_t end;
  if (!places.count(number)) {
    places[number] = (end + alignment - 1) / alignment * alignment;
    end = places[number] + bytes;
    if (end > STATIC_SHARED) fail("%u bytes of static shared memory are more than %u", end, STATIC_SHARED);
  }
  return current->block->memory.bytes + places[number];
}

extern "C" {

void emulator_allow(const void* begin, size_t bytes) { machine.global.allow(begin, bytes); }
void emulator_forget() { machine.global.forget(); }
// Between launches: the memory of the threads' stacks and of shared memory, which launches use again.
void emulator_release() { machine.spare.clear(), machine.spare.shrink_to_fit(); }

// This runs a grid to its end; it returns what went wrong, or null.
const char* emulator_launch(const char* kernel, void (*call)(void**), void** values, int grid, int threads, int cluster,
                            int shared, int dependent, int ordered, unsigned seed) {
  machine.kernel = kernel;
  machine.grid = grid;
  machine.threads = threads;
  machine.cluster_size = cluster;
  machine.shared = shared;
  machine.ordered = ordered;
  machine.random.seed(seed);
  entry = call;
  arguments = values;
  current = nullptr;
  if (_setjmp(failed)) {
    // Threads stand anywhere: nothing of them is used again.
    for (auto& cluster_ : machine.resident)
      for (Block* block : cluster_->blocks) delete block;
    machine.resident.clear();
    machine.highest = 0;
    machine.spare.clear();
    return message;
  }
  if (threads % LANES || threads / LANES >= MOST_WARPS || grid % cluster || shared + STATIC_SHARED > MOST_SHARED)
    fail("%d blocks of %d threads in clusters of %d with %d bytes each cannot be emulated", grid, threads, cluster, shared);
  if (!dependent) machine.global.begin_chain();
  run_grid();
  return nullptr;
}
}
