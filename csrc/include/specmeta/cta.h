// A Cta is a group of threads that runs one algorithm: a CUDA block, one CPU thread, or (in the C++ tests) real threads
// with a barrier. Every algorithm is written once against this interface:
//
//   Row                                  what a tile holds of each row
//   int64_t rank(), size()               this thread, and how many there are
//   void sync()                          a barrier that also orders memory; nothing else here does
//   int64_t exclusive_sum(x, total&)     the sum over lower ranks, and over all; called by every thread
//   Row* tile()                          size() rows that all threads share
//   void atomic_or(int32_t*, int32_t)
//
// A batch is walked in tiles of size() rows: each thread reads the scalars of one row once, the scans give every row
// its place, and then all threads share the tile's tokens and pages in equal parts.
#pragma once

#include "specmeta/common.h"

namespace specmeta {

// A Cta of one thread: the CPU operators.
template <class RowType>
class SerialCta {
 public:
  using Row = RowType;

  int64_t rank() const { return 0; }
  int64_t size() const { return 1; }
  void sync() const {}
  int64_t exclusive_sum(int64_t x, int64_t& total) const {
    total = x;
    return 0;
  }
  Row* tile() { return &row_; }
  void atomic_or(int32_t* at, int32_t bits) const { *at |= bits; }

 private:
  Row row_;
};

}  // namespace specmeta
