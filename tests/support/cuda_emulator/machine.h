// Threads, warps, blocks, clusters, and the order in which they run: a random one, that a seed repeats. A thread runs
// until it waits for something. Clusters begin one after the other, the next where all that have begun are stuck: as many
// are resident as wait for each other.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <random>

#include "fiber.h"
#include "global_memory.h"
#include "language.h"
#include "shared_memory.h"

namespace emulator {

constexpr int LANES = 32;

struct Thread;
struct Block;
struct Cluster;
using Ready = bool (*)(const Thread&);

// What a thread does by cp.async, in this order: a copy of 16 bytes, the end of a group, an arrival.
struct AsyncStep {
  enum { COPY, GROUP, ARRIVE } kind;
  uint32_t to;                // the address, or the barrier's
  const unsigned char* from;  // null for zeros
  Clock clock;                // what the thread knew
};

struct Thread {
  Fiber fiber;
  Block* block;
  struct Warp* warp;
  int index, lane;
  bool done, started;
  bool waited;  // for the kernels before
  bool behind;  // It comes after a thread that has waited, by what that one fetched: it may write.
  // What it waits for: `ready` looks at `object` and `value`.
  const char* what;
  Ready ready;
  const void* object;
  uint64_t value;
  // Of the cluster's barrier: what it arrived at, and how often it has arrived and waited.
  uint32_t cluster_phase, cluster_arrivals, cluster_waits;
  // By cp.async: what has not been done, the groups among it, and a clock of what has landed.
  std::deque<AsyncStep> async;
  int groups;
  Clock landed;
};

struct Warp {
  Block* block;
  int agent;
  // What it knows, and what even a relaxed arrival at the cluster's barrier lets others know: what came before
  // fence.mbarrier_init (which on a GPU means initialised barriers alone).
  Clock clock, fenced;
  Thread* threads[LANES];
  // An instruction of all lanes: what they brought, and where they want the result.
  const char* meeting;
  int arrived;
  uint32_t phase;
  struct {
    uint32_t word[4];
    uint64_t descriptor;
    void* result;
  } lane[LANES];
};

// A barrier of all threads of a block, or of a cluster. What was released to a phase is acquired by those who wait for it.
struct Rendezvous {
  int arrived = 0;
  uint32_t phase = 0;
  Clock next, released;
};

// One in shared memory (mbarrier): arrivals it expects in a phase, those that are pending, and bytes, which may come
// before they are expected.
struct Barrier {
  int expected, pending, bytes;
  uint32_t phase;
  Clock released;
  bool behind = false;  // What it waits for was fetched by a thread that had waited for the kernels before.

  void complete() {
    if (pending || bytes) return;
    ++phase;
    pending = expected;
  }
};

struct Block {
  SharedMemory memory;
  Cluster* cluster;
  int index, rank, engine;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  Rendezvous rendezvous;
  std::map<uint32_t, Rendezvous> parts;  // barriers of some of its threads, by their number
  std::map<uint32_t, Barrier> barriers;  // by their place in shared memory
  int left, copies;                      // threads, and copies to its shared memory that are under way
  bool waited;                           // for the kernels before, by a counter
};

// A copy by the engine: it takes its time, and may come as late as anything else that somebody waits for.
struct Copy {
  Block* block;  // whose engine and memory and barrier
  uint32_t to, bytes, barrier;
  const unsigned char* from;
  Clock clock;
  const char* what;
  bool waited;                     // whoever asked for it had, for the kernels before
  std::vector<unsigned char> box;  // what a tensor map makes of it; `from` lies in it
};

struct Cluster {
  std::vector<Block*> blocks;
  Rendezvous rendezvous;
  std::vector<uint32_t> stamps;  // of every agent: its count
  std::deque<Copy> copies;
  int left;
};

struct Machine {
  const char* kernel;
  int grid, threads, cluster_size, shared;
  bool ordered;  // The launch waits for everything before it: no kernel of its chain still runs.
  std::mt19937 random;
  GlobalMemory global;
  bool progress;
  std::vector<std::unique_ptr<Cluster>> resident;
  std::vector<std::unique_ptr<Block>> spare;
  uint32_t highest = 0;  // of all counts of clusters that have ended: those that begin count from here
};

extern Machine machine;
extern Thread* current;

// The current thread stops until `ready` says so, or, without it, until its next turn.
void wait(const char* what, Ready ready, const void* object = nullptr, uint64_t value = 0);

// All lanes of a warp meet at an instruction; the last to come computes it for all.
template <class Compute>
void meet(const char* what, Compute compute) {
  Warp& warp = *current->warp;
  if (warp.arrived && strcmp(warp.meeting, what))
    fail("%s: other lanes of its warp are at %s", what, warp.meeting);
  warp.meeting = what;
  const uint32_t phase = warp.phase;
  if (++warp.arrived < LANES) {
    wait(what, [](const Thread& t) { return t.warp->phase != t.value; }, nullptr, phase);
    return;
  }
  warp.arrived = 0;
  ++warp.phase;
  compute(warp);
}

// What a warp did so far is known to whoever acquires `clock`.
inline void release(Warp& warp, Clock& clock) {
  clock.join(warp.clock);
  warp.clock.seen[warp.agent] = ++warp.block->cluster->stamps[warp.agent];
}

}  // namespace emulator
