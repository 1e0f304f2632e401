// stage: the rows of a step from the state by slot; the first node of an iteration (pseudocode: specmeta/stage.h).
//
// Grid and block: from the sizes of the tensors, never from values. Up to 1,024 rows each block places all of them,
// with more it takes tiles of so many; then it has its share of all tokens and pages. Capturable: the parameters travel
// by value, no memory is allocated, no size is read back.
//
// Memory, in bytes: read 4 a row for each of committed_lens, known_lens, num_drafts, query_lens and num_pages, 8 a
// token of the ledger, 4 a used page; written 4 to 8 a row and output, 24 a token, 4 a used page. With more than 1,024
// rows, 32 a row more, written once and read by each block. tests/cpp/test_memory.cpp counts the sectors.
#include "cta.cuh"
#include "specmeta/stage.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) stage_kernel(const __grid_constant__ StageParams params) {
  run<LayoutRow>(params, [](auto& cta, const StageParams& p) { stage(cta, p); });
}

cudaError_t launch(const StageParams& params, cudaStream_t stream) {
  return launch_grid<LayoutRow>(stage_kernel, params, stream);
}

}  // namespace specmeta::cuda
