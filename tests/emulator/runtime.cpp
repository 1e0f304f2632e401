// Stands in for the CUDA runtime: a launch is handed to a callback, with all that the host code made of it.
#include <cuda_runtime_api.h>

#include <map>
#include <string>

namespace {

// `grid` has three numbers.
using OnLaunch = void (*)(const char* kernel, const unsigned* grid, unsigned threads, const void* params);

OnLaunch on_launch = nullptr;
int ptx_version = 0;
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;  // of host functions; they are registered before main()
  return names;
}

}  // namespace

extern "C" {

// architecture: 90 for sm_90.
void emulate(int architecture, OnLaunch callback) {
  ptx_version = architecture;
  on_launch = callback;
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  kernels()[host] = device;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// What the <<<>>> of each kernel would call: none is launched so.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = ptx_version;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of the emulator";
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
  const auto found = kernels().find(function);
  if (!on_launch || found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  const unsigned grid[] = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  on_launch(found->second.c_str(), grid, config->blockDim.x * config->blockDim.y * config->blockDim.z, args[0]);
  return cudaSuccess;
}

}  // extern "C"
