// A call from its values to its launch, for callers other than torch.
#pragma once

#include <stdexcept>

#include "arguments.h"

namespace specmeta {

// The GPU can't be used, or CUDA reports an error.
class CudaError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs an operation on the device where its tensors are; `stream` is a cudaStream_t, and unused on the CPU. `values`
// are in the order of the table. Throws std::runtime_error for a wrong argument.
void run(Op op, const Value* values, void* stream);

// The GPU on which memory lies; of a null pointer, the current one.
int32_t cuda_device(const void* memory);

}  // namespace specmeta
