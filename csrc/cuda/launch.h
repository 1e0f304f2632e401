// The operations on a GPU: one kernel launch each, on the given stream. Nothing is allocated, queried or synchronised,
// so that each may be captured into a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "specmeta/params.h"

namespace specmeta::cuda {

cudaError_t launch(const AdvanceParams& params, cudaStream_t stream);
cudaError_t launch(const StageParams& params, cudaStream_t stream);
cudaError_t launch(const AcceptParams& params, cudaStream_t stream);
cudaError_t launch(const CountSampledParams& params, cudaStream_t stream);
cudaError_t launch(const LocateSampledParams& params, cudaStream_t stream);
cudaError_t launch(const KeepLastParams& params, cudaStream_t stream);
cudaError_t launch(const DraftListsParams& params, cudaStream_t stream);
cudaError_t launch(const MapSlotsParams& params, cudaStream_t stream);
cudaError_t launch(const DraftStepParams& params, cudaStream_t stream);

}  // namespace specmeta::cuda
