// advance: fast-forward or rewind staged rows once num_accepted is known on the device (pseudocode:
// specmeta/advance.h).
//
// Grid: one block of kThreads, whatever the values. Each tile of kThreads rows is read once, scanned, and its tokens
// and pages are shared among the threads. Capturable: the parameters travel by value, no memory is allocated, no size
// is read back.
#include "cta.cuh"
#include "launch.h"
#include "specmeta/advance.h"

namespace specmeta::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) advance_kernel(const __grid_constant__ AdvanceParams params) {
  using Cta = BlockCta<LayoutRow>;
  __shared__ typename Cta::Shared shared;
  Cta cta(shared);
  advance(cta, params);
}

}  // namespace

cudaError_t launch(const AdvanceParams& params, cudaStream_t stream) {
  advance_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace specmeta::cuda
