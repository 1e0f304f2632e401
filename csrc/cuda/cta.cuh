// A Cta that is a CUDA block, and the launch of a grid of them.
#pragma once

#include <atomic>
#include <cub/warp/warp_scan.cuh>

#include "launch.h"
#include "specmeta/grid.h"
#include "specmeta/work.h"

namespace specmeta::cuda {

// A block of kTileRows threads has room for 64 registers a thread; fewer, since a kernel this short is better small.
// NOTE: kernels aren't in an anonymous namespace: its name follows from the file's path, and what fits into the
// registers follows from names, too.
inline constexpr int kMaxRegisters = 48;

// kHasSteps: the grid's y is a step.
template <class RowType, bool kHasSteps>
class BlockCta : public GridCta<BlockCta<RowType, kHasSteps>> {
 public:
  using Row = RowType;
  using Scan = cub::WarpScan<uint32_t>;
  static constexpr int kWarps = kTileRows / 32;
  struct Shared {
    typename Scan::TempStorage scan[kWarps];
    uint32_t totals[kWarps];
    unsigned long long sum;
    int32_t min;
    alignas(Row) unsigned char tile[kTileRows * sizeof(Row)];  // bytes: shared memory has no constructors
    alignas(GridState) unsigned char grid[sizeof(GridState)];
    alignas(WalkState) unsigned char walk[sizeof(WalkState)];
  };

  __device__ BlockCta(Shared& shared, const Rows& rows) : GridCta<BlockCta>(rows), shared_(shared) {}

  // NOTE: read anew each time. What a compiler works out from threadIdx beforehand, once for the whole kernel, takes
  // more registers than there are.
  __device__ int32_t rank() const {
    int32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  __device__ int32_t size() const { return blockDim.x; }
  __device__ int32_t lanes() const { return 32; }
  // NOTE: two rounds without a loop: the compiler must see that the lanes are together.
  template <class Begin>
  __device__ int32_t find_owner(int32_t n, int32_t x, Begin begin) const {
    static_assert(kTileRows <= 32 * 32);
    const auto lane = static_cast<int32_t>(static_cast<unsigned>(rank()) % 32);
    const auto count = [&](int32_t lo, int32_t part) {  // of the lanes' parts, those that begin at x or before
      const int32_t at = lo + lane * part;
      return __popc(__ballot_sync(0xffffffff, at < n && begin(at) <= x));
    };
    const int32_t part = (n + 31) / 32;
    const int32_t lo = (count(0, part) - 1) * part;
    return lo + count(lo, 1) - 1;
  }
  __device__ int32_t tile_rows() const { return kTileRows; }  // a smaller block has all rows
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool x) const { return __syncthreads_or(x); }
  __device__ int32_t count(bool x) const { return __syncthreads_count(x); }
  // NOTE: of a warp, then of the warps' totals. cub::BlockScan has every thread add up the totals of all warps, which
  // takes 64 registers.
  __device__ int64_t exclusive_sum(int64_t x, int64_t& total) const {
    const unsigned thread = rank(), warp = thread / 32, lane = thread % 32;
    uint32_t in_warp;
    Scan(shared_.scan[warp]).InclusiveSum(static_cast<uint32_t>(x), in_warp);
    if (lane == 31) shared_.totals[warp] = in_warp;
    const bool is_wide = __syncthreads_or(x > INT32_MAX / kTileRows);  // 32 bits may be too few
    const uint32_t of_warp = lane * 32 < blockDim.x ? shared_.totals[lane] : 0;
    total = __reduce_add_sync(0xffffffff, of_warp);
    int64_t before = __reduce_add_sync(0xffffffff, lane < warp ? of_warp : 0) + in_warp - static_cast<uint32_t>(x);
    __syncthreads();                                                   // the totals are used again
    if (is_wide) {                                                     // so rare that it may take its time
      auto* const addends = reinterpret_cast<int64_t*>(shared_.tile);  // it's empty before rows are placed
      addends[thread] = x;
      __syncthreads();
      before = 0;
      total = 0;
      SPECMETA_NO_UNROLL
      for (unsigned i = 0; i < blockDim.x; ++i) {
        if (i == thread) before = total;
        total += addends[i];
      }
      __syncthreads();  // the addends are read until here
    }
    return before;
  }
  __device__ int64_t sum(int64_t x) const {
    if (rank() == 0) shared_.sum = 0;
    __syncthreads();
    if (x != 0) atomicAdd(&shared_.sum, static_cast<unsigned long long>(x));
    __syncthreads();
    const auto total = static_cast<int64_t>(shared_.sum);
    __syncthreads();  // it's used again
    return total;
  }
  __device__ int32_t min(int32_t x) const {
    if (rank() == 0) shared_.min = INT32_MAX;
    __syncthreads();
    if (x != INT32_MAX) atomicMin(&shared_.min, x);
    __syncthreads();
    const int32_t least = shared_.min;
    __syncthreads();  // it's used again
    return least;
  }
  __device__ Row* tile() const { return reinterpret_cast<Row*>(shared_.tile); }
  __device__ WalkState& walk_state() const { return *reinterpret_cast<WalkState*>(shared_.walk); }
  __device__ int32_t step() const { return kHasSteps ? blockIdx.y : 0; }
  __device__ int32_t num_blocks() const { return gridDim.x; }
  __device__ int32_t index() const { return blockIdx.x; }
  __device__ int64_t least_share() const { return kLeastShare; }
  __device__ Row* records() { return this->template records_as<Row>(); }
  __device__ void atomic_or(int32_t* at, int32_t bits) const { atomicOr(at, bits); }

  __device__ GridState& grid_state() const { return *reinterpret_cast<GridState*>(shared_.grid); }
  // NOTE: PTX, since libcu++ takes an address of any kind: code for shared memory, and a wait for which kind it is.
  __device__ uint64_t peek(const uint64_t* at) const {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(__cvta_generic_to_global(at)) : "memory");
    return x;
  }
  __device__ void post(uint64_t* at, uint64_t x) const {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"(x) : "memory");
  }
  __device__ uint64_t acquire(const uint64_t* at) const {
    uint64_t x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(__cvta_generic_to_global(at)) : "memory");
    return x;
  }
  __device__ uint64_t add(uint64_t* at, uint64_t x) const {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(at)), "l"(x)
                 : "memory");
    return before;
  }
  __device__ uint64_t release(uint64_t* at, uint64_t x) const {
    uint64_t before;
    asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(at)), "l"(x)
                 : "memory");
    return before;
  }
  __device__ void fence(const uint64_t*) const { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
  __device__ void pause() const { __nanosleep(20); }

 private:
  Shared& shared_;
};

// Whether `kernel`, as the current device runs it, waits for the launch before it: then it may begin while that one
// ends.
template <class Params>
bool has_dependent_launch(void (*kernel)(Params)) {
  static std::atomic<signed char> known[64];  // by device: 0 = not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  if (known[device] == 0) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    known[device] = error == cudaSuccess && attributes.ptxVersion >= 90 ? 1 : -1;  // as __CUDA_ARCH__ in run()
  }
  return known[device] > 0;
}

// The body of a kernel.
template <class Row, bool kHasSteps = false, class Params, class Operation>
__device__ __forceinline__ void run(const Params& params, Operation operation) {
  __shared__ typename BlockCta<Row, kHasSteps>::Shared shared;
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // whoever comes next may begin, and wait for this one as well
  cudaGridDependencySynchronize();
#endif
  BlockCta<Row, kHasSteps> cta(shared, params.rows);
  cta.enter();
  operation(cta, params);
  cta.leave();
}

// Launches `kernel`. The grid depends on sizes alone, so that a captured launch is right for all values.
template <class Row, class Params>
cudaError_t launch_grid(void (*kernel)(Params), const Params& params, cudaStream_t stream, int32_t steps = 1) {
  cudaLaunchConfig_t config = {};
  const bool can_share = params.rows.workspace != nullptr;
  const int32_t blocks = can_share ? count_blocks(params.rows.batch, work(params), Row::kIsRepeatable) : 1;
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(steps));
  config.blockDim = static_cast<unsigned>(count_threads(params.rows.batch));
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = has_dependent_launch(kernel) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace specmeta::cuda
