// draft_step: record draft k and give each row its next position (pseudocode: specmeta/draft_step.h).
//
// Grid: from the sizes of the tensors, never from values. Each block takes a tile of kThreads rows, then its share of
// all pages. Capturable: the parameters travel by value, no memory is allocated, no size is read back.
#include "cta.cuh"
#include "specmeta/draft_step.h"

namespace specmeta::cuda {
namespace {

__global__ void __maxnreg__(kMaxRegisters) draft_step_kernel(const __grid_constant__ DraftStepParams params) {
  run<LayoutRow>(params, [](auto& cta, const DraftStepParams& p) { draft_step(cta, p); });
}

}  // namespace

cudaError_t launch(const DraftStepParams& params, cudaStream_t stream) {
  return launch_grid(draft_step_kernel, params, stream);
}

}  // namespace specmeta::cuda
