// advance: fast-forward or rewind staged rows once num_accepted is known on the device (pseudocode:
// specmeta/advance.h).
//
// Grid: from the sizes of the tensors, never from values. Each block takes a tile of kThreads rows, then its share of
// all tokens and pages. Capturable: the parameters travel by value, no memory is allocated, no size is read back.
#include "cta.cuh"
#include "specmeta/advance.h"

namespace specmeta::cuda {
namespace {

__global__ void __maxnreg__(kMaxRegisters) advance_kernel(const __grid_constant__ AdvanceParams params) {
  run<LayoutRow>(params, [](auto& cta, const AdvanceParams& p) { advance(cta, p); });
}

}  // namespace

cudaError_t launch(const AdvanceParams& params, cudaStream_t stream) {
  return launch_grid(advance_kernel, params, stream);
}

}  // namespace specmeta::cuda
