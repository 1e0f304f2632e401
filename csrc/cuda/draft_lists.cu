// draft_lists: the page lists of all draft steps at once (pseudocode: specmeta/draft_lists.h).
//
// Grid and block: from the sizes of the tensors, never from values; in y, a step. Up to 1,024 rows each block places
// all of them, with more it takes tiles of so many; then it has its share of all pages. Capturable: the parameters
// travel by value, no memory is allocated, no size is read back.
//
// Memory, in bytes and for each step: read 4 to 8 a row for seq_lens and num_pages, 4 a used page; written 16 a row, 4
// a used page. With more than 1,024 rows, 32 a row more, written once and read by each block.
#include "cta.cuh"
#include "specmeta/draft_lists.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) draft_lists_kernel(const __grid_constant__ DraftListsParams params) {
  run<LayoutRow, true>(params, [](auto& cta, const DraftListsParams& p) { draft_lists(cta, p, cta.step()); });
}

cudaError_t launch(const DraftListsParams& params, cudaStream_t stream) {
  return launch_grid<LayoutRow>(draft_lists_kernel, params, stream, params.num_steps);
}

}  // namespace specmeta::cuda
