// Stands in for the CUDA runtime: a launch is handed to a callback, with all that the host code made of it.
// It has what the library and the code that nvcc generates for it call; to link another call fails.
#include <cuda_runtime_api.h>

#include <map>
#include <string>

namespace {

// `grid` has three numbers; may_overlap: the launch may begin before the one before it has ended.
using OnLaunch = void (*)(const char* kernel, const unsigned* grid, unsigned threads, bool may_overlap,
                          const void* params);

OnLaunch on_launch = nullptr;
int ptx_version = 0;
int current_device = 0;
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
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
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
  bool may_overlap = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization) return cudaErrorNotSupported;
    may_overlap = config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
  }
  on_launch(found->second.c_str(), grid, config->blockDim.x * config->blockDim.y * config->blockDim.z, may_overlap,
            args[0]);
  return cudaSuccess;
}

}  // extern "C"
