// stage: the rows of a step from the state by slot; the first node of an iteration (pseudocode: specmeta/stage.h).
//
// Grid: one block of kThreads, whatever the values. Each tile of kThreads rows is read once, scanned, and its tokens
// and pages are shared among the threads. Capturable: the parameters travel by value, no memory is allocated, no size
// is read back.
#include "cta.cuh"
#include "launch.h"
#include "specmeta/stage.h"

namespace specmeta::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) stage_kernel(const __grid_constant__ StageParams params) {
  using Cta = BlockCta<LayoutRow>;
  __shared__ typename Cta::Shared shared;
  Cta cta(shared);
  stage(cta, params);
}

}  // namespace

cudaError_t launch(const StageParams& params, cudaStream_t stream) {
  stage_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace specmeta::cuda
