// A call's arguments: taken off the boxed stack, checked against the operator's table, handed out by name.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <string>

#include "schema.h"
#include "specmeta/params.h"

namespace specmeta {

class Arguments {
 public:
  // Takes every value off the stack, then checks dtype, device, layout, shape, limits and overlap; throws
  // std::runtime_error.
  Arguments(const OpSpec& op, StableIValue* stack);

  bool has(Arg name) { return find(name).given; }
  Ints ints(Arg name);
  int32_t* int32(Arg name);
  int64_t* int64(Arg name);
  uint8_t* boolean_tensor(Arg name);
  Table table(Arg name);
  IntsTable ints_table(Arg name);
  int64_t integer(Arg name, int64_t otherwise);
  bool boolean(Arg name) { return find(name).integer != 0; }

  // The size that a shape symbol stands for, or -1 where no argument tells it.
  int64_t size(char symbol) const { return sizes_[symbol - 'A'].value; }
  // The argument that tells it.
  Arg origin(char symbol) const { return sizes_[symbol - 'A'].from; }

  // The number of elements of a one-dimensional tensor that was given.
  int64_t length(Arg name) { return find(name).shape[0]; }

  [[noreturn]] void fail(Arg name, const std::string& expected, const std::string& got) const;
  // Throws where `name` is given and none of `others` is.
  void needs(Arg name, std::initializer_list<Arg> others);
  // Throws where some of these are given and others are not.
  void all_or_none(std::initializer_list<Arg> names);

  int32_t device_index() const { return device_index_; }

 private:
  // A call owns the handles on its stack. torch::stable::Tensor would add an allocation for each.
  struct DeleteTensor {
    void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
  };
  struct Value {
    const ArgSpec* spec = nullptr;
    std::unique_ptr<AtenTensorOpaque, DeleteTensor> tensor;
    int64_t integer = 0;
    bool given = false;
    bool wide = false;
    int64_t item = 0;  // bytes of an element
    int64_t shape[2] = {1, 1};
    int64_t stride = 0;  // of the first of two dimensions
    char* data = nullptr;
    int64_t bytes = 0;  // from the first element to the end of the last
  };
  struct Size {
    int64_t value = -1;
    Arg from{};
  };

  // An operator that has no such argument must not be asked for it.
  Value& find(Arg name) { return values_.at(op_.positions[static_cast<size_t>(name)]); }
  void check_tensor(Value& value);
  void check_shape(Value& value);
  void check_overlap() const;

  const OpSpec& op_;
  static constexpr size_t kMaxArgs = 48;
  std::array<Value, kMaxArgs> values_;
  size_t num_values_ = 0;
  std::array<const Value*, kMaxArgs> tensors_;  // those given that have elements
  size_t num_tensors_ = 0;
  std::array<Size, 26> sizes_;
  const Value* first_tensor_ = nullptr;
  int32_t device_type_ = 0;
  int32_t device_index_ = 0;
};

}  // namespace specmeta
