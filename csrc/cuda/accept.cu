// accept_greedy and accept_sampled: how many drafts stand, and their commit (pseudocode: specmeta/accept.h). Which of
// the two it is does not depend on device values: target_tokens is given, or sampled_tokens is.
//
// Grid and block: from the sizes of the tensors, never from values. Each block takes tiles of up to 1,024 rows, then
// its share of all tokens. Capturable: the parameters travel by value, no memory is allocated, no size is read back.
//
// Memory, in bytes: read 4 to 8 a row for each of cu_seqlens_q, num_draft_tokens, seq_lens and known_lens, 16 a token;
// written 4 to 8 a row and output, 8 an element of accepted_tokens, 8 a token. Of many blocks, 32 a row more, written
// once and read by each block.
#include "cta.cuh"
#include "specmeta/accept.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) accept_kernel(const __grid_constant__ AcceptParams params) {
  run<AcceptRow>(params, [](auto& cta, const AcceptParams& p) { accept(cta, p); });
}

cudaError_t launch(const AcceptParams& params, cudaStream_t stream) {
  return launch_grid<AcceptRow>(accept_kernel, params, stream);
}

}  // namespace specmeta::cuda
