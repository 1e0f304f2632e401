#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>
#include <string>

#include "../cuda/launch.h"
#include "kernels.h"

// Only CUDA builds of torch export this, and the library also loads under the others: a weak symbol is null there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("specmeta: CUDA: ") + cudaGetErrorString(error));
}

struct Cuda {
  template <class Params>
  static void run(const Params& params, int32_t device_index) {
    if (!aoti_torch_get_current_cuda_stream) throw std::runtime_error("specmeta: this torch was built without CUDA");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
    const torch::stable::accelerator::DeviceGuard guard(device_index);
    check(specmeta::cuda::launch(params, static_cast<cudaStream_t>(stream)));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specmeta, CUDA, m) {
  specmeta::register_kernels<Cuda>(m);
}
