// A block's shared memory, and a shadow of it that knows who last wrote and read every two bytes: two accesses, one of
// them a write, that no barrier has put in order are an error, whatever order they came in. (It is the idea of
// ThreadSanitizer and FastTrack, with warps for threads.)
#pragma once
#include <cstdlib>
#include <cstring>

#include "clocks.h"

namespace emulator {

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

constexpr uint32_t MOST_SHARED = 1 << 18;
// Static shared memory comes first, dynamic behind it.
constexpr uint32_t STATIC_SHARED = 24 << 10;
constexpr int MOST_WARPS = 20;

class SharedMemory {
 public:
  SharedMemory()
      : bytes((unsigned char*)aligned_alloc(1024, MOST_SHARED)), shadow_((Cell*)calloc(MOST_SHARED / 2, sizeof(Cell))) {}
  ~SharedMemory() {
    free(bytes);
    free(shadow_);
  }
  SharedMemory(const SharedMemory&) = delete;

  // A new block begins, whose agents' clocks are above `base`. What it does not write is NaN in every format.
  void begin(uint32_t dynamic_bytes, uint32_t base, int first_agent) {
    size = STATIC_SHARED + dynamic_bytes;
    base_ = base;
    first_agent_ = first_agent;
    memset(bytes, 0xff, size);
  }

  void read(uint32_t at, uint32_t count, int agent, const Clock& clock, const char* what) {
    check(at, count, what, "reads");
    for (uint32_t i = at / 2; i <= (at + count - 1) / 2; ++i) {
      Cell& cell = shadow_[i];
      if (cell.written > base_ && clock.seen[cell.writer] < cell.written) race(what, "reads", i, "wrote", cell.writer);
      const int warp = agent - first_agent_;
      if (warp >= 0 && warp < MOST_WARPS) {
        cell.read[warp] = clock.seen[agent];
      } else {
        cell.read_afar = clock.seen[agent];
        cell.reader_afar = agent;
      }
    }
  }

  void write(uint32_t at, uint32_t count, int agent, const Clock& clock, uint32_t stamp, const char* what) {
    check(at, count, what, "writes");
    for (uint32_t i = at / 2; i <= (at + count - 1) / 2; ++i) {
      Cell& cell = shadow_[i];
      if (cell.barrier > base_) fail("%s writes %u bytes at %d, where a barrier lies", what, count, (int)at - (int)STATIC_SHARED);
      if (cell.written > base_ && clock.seen[cell.writer] < cell.written) race(what, "writes", i, "wrote", cell.writer);
      for (int warp = 0; warp < MOST_WARPS; ++warp)
        if (cell.read[warp] > base_ && clock.seen[first_agent_ + warp] < cell.read[warp])
          race(what, "writes", i, "read", first_agent_ + warp);
      if (cell.read_afar > base_ && clock.seen[cell.reader_afar] < cell.read_afar)
        race(what, "writes", i, "read", cell.reader_afar);
      cell.written = stamp;
      cell.writer = agent;
    }
  }

  // From `stamp` on a barrier lies there, until the block ends: its memory is for nothing else while it is valid.
  void hold_barrier(uint32_t at, uint32_t stamp) {
    for (uint32_t i = at / 2; i < at / 2 + 4; ++i) shadow_[i].barrier = stamp;
  }

  unsigned char* const bytes;
  uint32_t size = 0;

 private:
  struct Cell {
    uint32_t written, barrier, read_afar, read[MOST_WARPS];
    uint16_t writer, reader_afar;
  };

  void check(uint32_t at, uint32_t count, const char* what, const char* does) const {
    if (at + count > size || at + count < at)
      fail("%s %s %u bytes at %d of its block's shared memory, of which it asked for %u", what, does, count,
           (int)at - (int)STATIC_SHARED, size - STATIC_SHARED);
  }
  [[noreturn]] void race(const char* what, const char* does, uint32_t cell, const char* did, int other) const;

  Cell* shadow_;
  uint32_t base_ = 0;
  int first_agent_ = 0;
};

}  // namespace emulator
