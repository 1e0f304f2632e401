// draft_step: record draft k and give each row its next position (pseudocode: specmeta/draft_step.h).
//
// Grid and block: from the sizes of the tensors, never from values. Up to 1,024 rows each block places all of them,
// with more it takes tiles of so many; then it has its share of all pages. Capturable: the parameters travel by value,
// no memory is allocated, no size is read back.
//
// Memory, in bytes: read 4 to 8 a row for each of seq_lens, num_rejected, draft_tokens, known_lens, position_ids and
// num_pages, 4 a used page; written 4 to 8 a row and output, 4 a used page. With more than 1,024 rows, 32 a row more,
// written once and read by each block.
#include "cta.cuh"
#include "specmeta/draft_step.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) draft_step_kernel(const __grid_constant__ DraftStepParams params) {
  run<LayoutRow>(params, [](auto& cta, const DraftStepParams& p) { draft_step(cta, p); });
}

cudaError_t launch(const DraftStepParams& params, cudaStream_t stream) {
  return launch_grid<LayoutRow>(draft_step_kernel, params, stream);
}

}  // namespace specmeta::cuda
