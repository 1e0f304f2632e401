// What torch hands to a boxed kernel, as a call's values.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <memory>

#include "../call/arguments.h"

namespace specmeta {

class Stack {
 public:
  // Owns every tensor before anything may throw.
  Stack(const OpSpec& op, const StableIValue* stack);

  const Value* values() const { return values_.data(); }

 private:
  // A call owns the handles on its stack. torch::stable::Tensor would add an allocation for each.
  struct DeleteTensor {
    void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
  };
  std::array<std::unique_ptr<AtenTensorOpaque, DeleteTensor>, kMaxArgs> tensors_;
  std::array<Value, kMaxArgs> values_;
};

}  // namespace specmeta
