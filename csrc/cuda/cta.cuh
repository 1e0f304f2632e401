// A Cta that is a CUDA block.
#pragma once

#include <cub/block/block_scan.cuh>

#include "specmeta/common.h"

namespace specmeta::cuda {

// One block walks the batch in tiles of this many rows.
inline constexpr int kThreads = 512;

template <class RowType>
class BlockCta {
 public:
  using Row = RowType;
  using Scan = cub::BlockScan<int64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  struct Shared {
    typename Scan::TempStorage scan;
    alignas(Row) unsigned char tile[kThreads * sizeof(Row)];  // bytes: shared memory has no constructors
  };

  __device__ explicit BlockCta(Shared& shared) : shared_(shared) {}

  __device__ int64_t rank() const { return threadIdx.x; }
  __device__ int64_t size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ int64_t exclusive_sum(int64_t x, int64_t& total) const {
    int64_t before;
    Scan(shared_.scan).ExclusiveSum(x, before, total);
    __syncthreads();  // the scan's storage is used again
    return before;
  }
  __device__ Row* tile() const { return reinterpret_cast<Row*>(shared_.tile); }
  __device__ void atomic_or(int32_t* at, int32_t bits) const { atomicOr(at, bits); }

 private:
  Shared& shared_;
};

}  // namespace specmeta::cuda
