// locate_sampled: which token was accepted last (pseudocode: specmeta/locate_sampled.h).
//
// Grid: from the number of rows, never from values; a thread a row. Capturable: the parameters travel by value, no
// memory is allocated, no size is read back.
//
// Memory, in bytes: read 12 to 16 a row; written 4 a row and output.
#include "cta.cuh"
#include "specmeta/locate_sampled.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) locate_sampled_kernel(const __grid_constant__ LocateSampledParams params) {
  run<BareRow>(params, [](auto& cta, const LocateSampledParams& p) { locate_sampled(cta, p); });
}

cudaError_t launch(const LocateSampledParams& params, cudaStream_t stream) {
  return launch_grid<BareRow>(locate_sampled_kernel, params, stream);
}

}  // namespace specmeta::cuda
