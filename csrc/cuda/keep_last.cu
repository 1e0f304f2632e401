// keep_last: each row keeps the last of its query tokens (pseudocode: specmeta/keep_last.h).
//
// Grid: one block, since everything moves in place. Capturable: the parameters travel by value, no memory is allocated,
// no size is read back.
//
// Memory, in bytes: read 8 to 16 a row and pass, of which there are four; written 4 to 8 a row and output, 4 to 8 a
// token.
#include "cta.cuh"
#include "specmeta/keep_last.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) keep_last_kernel(const __grid_constant__ KeepLastParams params) {
  run<BareRow>(params, [](auto& cta, const KeepLastParams& p) { keep_last(cta, p); });
}

cudaError_t launch(const KeepLastParams& params, cudaStream_t stream) {
  return launch_grid<BareRow>(keep_last_kernel, params, stream);
}

}  // namespace specmeta::cuda
