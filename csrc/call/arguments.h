// A call's arguments, whoever made it: checked against the operator's table, handed out by name.
#pragma once

#include <array>
#include <initializer_list>
#include <string>

#include "schema.h"
#include "specmeta/params.h"

namespace specmeta {

// As torch numbers them.
inline constexpr int32_t kCpu = 0;
inline constexpr int32_t kCuda = 1;

enum class Element : uint8_t { kInt32, kInt64, kBool, kOther };

// A tensor of the caller's. Nothing here is owned; `shape` and `strides` (in elements) have `rank` entries.
struct TensorView {
  void* data;
  const int64_t* shape;
  const int64_t* strides;
  int64_t rank;
  int32_t device_type;
  int32_t device_index;
  Element element;
  const char* dtype;  // as Python writes it, for messages
  // The memory that it lies in: how many bytes (-1: not known), and how many elements stand before `data`.
  int64_t storage_bytes;
  int64_t storage_offset;
  bool read_only;
};

// An argument as it came. Where it is not given, nothing else is read; no initialisers, since a call has dozens.
struct Value {
  bool given;
  int64_t integer;  // an int or a bool
  TensorView tensor;
};

class Arguments {
 public:
  // `values` are in the order of op.args and outlive this. Checks dtype, device, layout, shape, limits and overlap;
  // throws std::runtime_error.
  Arguments(const OpSpec& op, const Value* values);

  // Also false where the operator has no such argument.
  bool has(Arg name) const { return op_.has(name) && find(name).given; }
  Ints ints(Arg name) const;
  int32_t* int32(Arg name) const;
  int64_t* int64(Arg name) const;
  uint8_t* boolean_tensor(Arg name) const;
  Table table(Arg name) const;
  IntsTable ints_table(Arg name) const;
  int64_t integer(Arg name, int64_t otherwise) const;
  bool boolean(Arg name) const { return find(name).integer != 0; }

  // The size that a shape symbol stands for, or -1 where no argument tells it.
  int64_t size(char symbol) const { return sizes_[symbol - 'A'].value; }
  // The argument that tells it.
  Arg origin(char symbol) const { return sizes_[symbol - 'A'].from; }

  // The number of elements of a one-dimensional tensor that was given.
  int64_t length(Arg name) const { return find(name).tensor.shape[0]; }

  [[noreturn]] void fail(Arg name, const std::string& expected, const std::string& got) const;
  // Throws where `name` is given and none of `others` is.
  void needs(Arg name, std::initializer_list<Arg> others) const;
  // Throws where some of these are given and others are not.
  void all_or_none(std::initializer_list<Arg> names) const;

  int32_t device_type() const { return device_type_; }
  int32_t device_index() const { return device_index_; }

 private:
  struct Size {
    int64_t value = -1;
    Arg from{};
  };
  // From the lowest element to the end of the highest, as addresses.
  struct Extent {
    const ArgSpec* spec;
    uintptr_t begin;
    uintptr_t end;
  };

  // An operator that has no such argument must not be asked for it.
  const Value& find(Arg name) const;
  void check_tensor(const ArgSpec& spec, const TensorView& tensor);
  void check_shape(const ArgSpec& spec, const TensorView& tensor);
  void check_overlap() const;

  const OpSpec& op_;
  const Value* values_;
  std::array<Size, 26> sizes_;
  std::array<Extent, kMaxArgs> extents_;  // of the tensors that have elements
  size_t num_extents_ = 0;
  const ArgSpec* first_tensor_ = nullptr;
  int32_t device_type_ = kCpu;
  int32_t device_index_ = 0;
};

}  // namespace specmeta
