// advance: fast-forward or rewind staged rows once num_accepted is known on the device (pseudocode:
// specmeta/advance.h).
//
// Grid and block: from the sizes of the tensors, never from values. Up to 1,024 rows each block places all of them,
// with more it takes tiles of so many; then it has its share of all tokens and pages. Capturable: the parameters travel
// by value, no memory is allocated, no size is read back.
//
// Memory, in bytes: read 4 to 8 a row for each of seq_lens, num_accepted and num_pages, 4 for cu_seqlens_q, 8 a token,
// 4 a used page; written 4 to 8 a row and output, 16 a token, 4 a used page. With more than 1,024 rows, 32 a row more,
// written once and read by each block. tests/cpp/test_memory.cpp counts the sectors.
#include "cta.cuh"
#include "specmeta/advance.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) advance_kernel(const __grid_constant__ AdvanceParams params) {
  run<LayoutRow>(params, [](auto& cta, const AdvanceParams& p) { advance(cta, p); });
}

cudaError_t launch(const AdvanceParams& params, cudaStream_t stream) {
  return launch_grid<LayoutRow>(advance_kernel, params, stream);
}

}  // namespace specmeta::cuda
