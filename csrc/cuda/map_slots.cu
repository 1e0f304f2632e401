// map_slots: where the KV of each token goes (pseudocode: specmeta/map_slots.h).
//
// Grid and block: from the sizes of the tensors, never from values. Up to 1,024 rows each block places all of them,
// with more it takes tiles of so many; then it has its share of all tokens. Capturable: the parameters travel by value,
// no memory is allocated, no size is read back.
//
// Memory, in bytes: read 8 a row, 4 to 8 a token and 4 a page that tokens stand in; written 8 a token. With more than
// 1,024 rows, 32 a row more, written once and read by each block.
#include "cta.cuh"
#include "specmeta/map_slots.h"

namespace specmeta::cuda {

__global__ void __maxnreg__(kMaxRegisters) map_slots_kernel(const __grid_constant__ MapSlotsParams params) {
  run<SlotsRow>(params, [](auto& cta, const MapSlotsParams& p) { map_slots(cta, p); });
}

cudaError_t launch(const MapSlotsParams& params, cudaStream_t stream) {
  return launch_grid<SlotsRow>(map_slots_kernel, params, stream);
}

}  // namespace specmeta::cuda
