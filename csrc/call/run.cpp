#include "run.h"

#include "../cpu/run.h"
#include "from_arguments.h"
#ifdef SPECMETA_WITH_CUDA
#include "../cuda/launch.h"
#endif

namespace specmeta {
namespace {

#ifdef SPECMETA_WITH_CUDA
void check(cudaError_t error) {
  if (error != cudaSuccess) throw CudaError(std::string("specmeta: CUDA: ") + cudaGetErrorString(error));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_));
    if (device == before_) return;
    check(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};
#else
[[noreturn]] void fail_without_cuda() {
  throw CudaError("specmeta: the tensors are on a GPU, but the library was built without CUDA");
}
#endif

}  // namespace

void run(Op op, const Value* values, void* stream) {
  Arguments args(op_spec(op), values);
  if (args.device_type() == kCpu) {
    with_params(op, args, [](const auto& params) { cpu::run(params); });
    return;
  }
#ifdef SPECMETA_WITH_CUDA
  with_params(op, args, [&args, stream](const auto& params) {
    const DeviceGuard guard(args.device_index());
    check(cuda::launch(params, static_cast<cudaStream_t>(stream)));
  });
#else
  static_cast<void>(stream);
  fail_without_cuda();
#endif
}

int32_t cuda_device(const void* memory) {
#ifdef SPECMETA_WITH_CUDA
  int device = 0;
  if (!memory) {
    check(cudaGetDevice(&device));
    return device;
  }
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, memory));
  return attributes.device;
#else
  static_cast<void>(memory);
  fail_without_cuda();
#endif
}

}  // namespace specmeta
