// draft_step: record draft k and give each row its next position (pseudocode: specmeta/draft_step.h).
//
// Grid: one block of kThreads, whatever the values. Each tile of kThreads rows is read once, scanned, and its pages are
// shared among the threads. Capturable: the parameters travel by value, no memory is allocated, no size is read back.
#include "cta.cuh"
#include "launch.h"
#include "specmeta/draft_step.h"

namespace specmeta::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) draft_step_kernel(const __grid_constant__ DraftStepParams params) {
  using Cta = BlockCta<LayoutRow>;
  __shared__ typename Cta::Shared shared;
  Cta cta(shared);
  draft_step(cta, params);
}

}  // namespace

cudaError_t launch(const DraftStepParams& params, cudaStream_t stream) {
  draft_step_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace specmeta::cuda
