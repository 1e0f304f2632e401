// map_slots: where the KV of each token goes (pseudocode: specmeta/map_slots.h).
//
// Grid: from the sizes of the tensors, never from values. Each block takes a tile of kThreads rows, then its share of
// all tokens. Capturable: the parameters travel by value, no memory is allocated, no size is read back.
//
// Memory, in bytes: read 8 a row, 4 to 8 a token and 4 a page that tokens stand in; written 8 a token. Of many blocks,
// 32 a row more, written once and read by each block.
#include "cta.cuh"
#include "specmeta/map_slots.h"

namespace specmeta::cuda {
namespace {

__global__ void __maxnreg__(kMaxRegisters) map_slots_kernel(const __grid_constant__ MapSlotsParams params) {
  run<SlotsRow>(params, [](auto& cta, const MapSlotsParams& p) { map_slots(cta, p); });
}

}  // namespace

cudaError_t launch(const MapSlotsParams& params, cudaStream_t stream) {
  return launch_grid<SlotsRow>(map_slots_kernel, params, stream);
}

}  // namespace specmeta::cuda
