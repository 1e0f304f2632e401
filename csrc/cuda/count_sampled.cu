// count_sampled: how many ids a sampler has left in each row (pseudocode: specmeta/count_sampled.h).
//
// Grid: from the number of rows, never from values; a thread a row. Capturable: the parameters travel by value, no
// memory is allocated, no size is read back.
//
// Memory, in bytes: read 4 to 8 an id up to the first that is none, 1 for discarded, 4 to 8 for a backup token; written
// 4 to 8 a row and output.
#include "cta.cuh"
#include "specmeta/count_sampled.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) count_sampled_kernel(const __grid_constant__ CountSampledParams params) {
  run<BareRow>(params, [](auto& cta, const CountSampledParams& p) { count_sampled(cta, p); });
}

cudaError_t launch(const CountSampledParams& params, cudaStream_t stream) {
  return launch_grid<BareRow>(count_sampled_kernel, params, stream);
}

}  // namespace specmeta::cuda
