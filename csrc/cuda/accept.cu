// accept_greedy and accept_sampled: how many drafts stand, and their commit (pseudocode: specmeta/accept.h). Which of
// the two it is does not depend on device values: target_tokens is given, or sampled_tokens is.
//
// Grid: one block of kThreads, whatever the values. Each tile of kThreads rows is read once, scanned, and its tokens
// are shared among the threads. Capturable: the parameters travel by value, no memory is allocated, no size is read
// back.
#include "cta.cuh"
#include "launch.h"
#include "specmeta/accept.h"

namespace specmeta::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) accept_kernel(const __grid_constant__ AcceptParams params) {
  using Cta = BlockCta<AcceptRow>;
  __shared__ typename Cta::Shared shared;
  Cta cta(shared);
  accept(cta, params);
}

}  // namespace

cudaError_t launch(const AcceptParams& params, cudaStream_t stream) {
  accept_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace specmeta::cuda
