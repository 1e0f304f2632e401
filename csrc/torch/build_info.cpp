#include "../call/schema.h"
#include "specmeta/grid.h"

// What Python asks the library for.
#ifndef SPECMETA_CUDA_VERSION
#define SPECMETA_CUDA_VERSION ""
#define SPECMETA_CUDA_ARCHITECTURES ""
#endif

// "compiler \t CUDA toolkit \t architectures"; the last two are empty without CUDA kernels.
extern "C" __attribute__((visibility("default"))) const char* specmeta_build_info() {
  return __VERSION__ "\t" SPECMETA_CUDA_VERSION "\t" SPECMETA_CUDA_ARCHITECTURES;
}

extern "C" __attribute__((visibility("default"))) long long specmeta_workspace_words(int rows, int steps) {
  return specmeta::workspace_words(rows, steps);
}

extern "C" __attribute__((visibility("default"))) const char* specmeta_schema() {
  return specmeta::schema_text().c_str();
}
