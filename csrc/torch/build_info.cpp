// What `python -m specmeta doctor` tells about the library.
#ifndef SPECMETA_CUDA_VERSION
#define SPECMETA_CUDA_VERSION ""
#define SPECMETA_CUDA_ARCHITECTURES ""
#endif

// "compiler \t CUDA toolkit \t architectures"; the last two are empty without CUDA kernels.
extern "C" __attribute__((visibility("default"))) const char* specmeta_build_info() {
  return __VERSION__ "\t" SPECMETA_CUDA_VERSION "\t" SPECMETA_CUDA_ARCHITECTURES;
}
