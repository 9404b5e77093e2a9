// The tensors that kernels may touch, and which of their bytes the kernels of a chain of dependent launches wrote: a
// kernel that reads such a byte, or writes any, before its griddepcontrol.wait has made a mistake that a GPU shows only
// now and then.
#pragma once
#include <algorithm>
#include <vector>

#include "shared_memory.h"

namespace emulator {

class GlobalMemory {
 public:
  void allow(const void* begin, size_t bytes) {
    const size_t at = (size_t)begin;
    for (Range& range : ranges_)
      if (range.begin == at && range.end == at + bytes) return;
    ranges_.push_back({at, at + bytes, std::vector<unsigned char>(bytes / 2 + 1)});
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    last_ = 0;
  }
  void forget() { ranges_.clear(), last_ = 0; }
  // A launch that waits for all before it begins a chain.
  void begin_chain() {
    for (Range& range : ranges_) std::fill(range.written.begin(), range.written.end(), 0);
  }
  void read(const void* p, size_t bytes, bool waited, const char* what) {
    Range& range = range_of(p, bytes, what, "reads");
    if (waited) return;
    for (size_t i = ((size_t)p - range.begin) / 2; i <= ((size_t)p + bytes - 1 - range.begin) / 2; ++i)
      if (range.written[i])
        fail("%s reads, before griddepcontrol.wait, byte %zu of a tensor of %zu, which a kernel of this chain writes", what,
             (size_t)p - range.begin, range.end - range.begin);
  }
  void write(const void* p, size_t bytes, bool waited, const char* what) {
    Range& range = range_of(p, bytes, what, "writes");
    if (!waited)
      fail("%s writes, before griddepcontrol.wait, byte %zu of a tensor of %zu", what, (size_t)p - range.begin,
           range.end - range.begin);
    for (size_t i = ((size_t)p - range.begin) / 2; i <= ((size_t)p + bytes - 1 - range.begin) / 2; ++i) range.written[i] = 1;
  }

 private:
  struct Range {
    size_t begin, end;
    std::vector<unsigned char> written;  // of every two bytes
  };

  Range& range_of(const void* p, size_t bytes, const char* what, const char* does) {
    const size_t at = (size_t)p;
    if (last_ < ranges_.size() && ranges_[last_].begin <= at && at + bytes <= ranges_[last_].end) return ranges_[last_];
    const auto above = std::upper_bound(ranges_.begin(), ranges_.end(), at, [](size_t a, const Range& r) { return a < r.begin; });
    if (above == ranges_.begin()) fail("%s %s %zu bytes outside of every tensor", what, does, bytes);
    Range& range = *(above - 1);
    if (at + bytes > range.end)
      fail("%s %s %zu bytes outside of every tensor, %zu beyond the end of one of %zu", what, does, bytes, at - range.end,
           range.end - range.begin);
    last_ = above - 1 - ranges_.begin();
    return range;
  }

  std::vector<Range> ranges_;
  size_t last_ = 0;
};

}  // namespace emulator
