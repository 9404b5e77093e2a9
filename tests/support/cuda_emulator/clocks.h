// Who knows of whom: vector clocks. An agent is a warp, or a block's copy engine. It counts its releases; a clock holds,
// of every agent of a cluster, the last count whose accesses are known to have come before.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulator {

struct Clock {
  std::vector<uint32_t> seen;

  void join(const Clock& other) {
    if (seen.size() < other.seen.size()) seen.resize(other.seen.size());
    for (size_t i = 0; i < other.seen.size(); ++i) seen[i] = std::max(seen[i], other.seen[i]);
  }
};

}  // namespace emulator
