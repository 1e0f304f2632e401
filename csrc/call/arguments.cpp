#include "arguments.h"

#include <optional>
#include <stdexcept>

namespace specmeta {
namespace {

// What a tensor without elements points to: not null, since null means "not given", and never read.
alignas(8) char no_elements[8];

void* data_of(const Value& value) {
  if (!value.given) return nullptr;
  return value.tensor.data ? value.tensor.data : no_elements;
}

bool accepts(DType dtype, Element element) {
  switch (dtype) {
    case DType::kInt32:
      return element == Element::kInt32;
    case DType::kInt64:
      return element == Element::kInt64;
    case DType::kEither:
      return element == Element::kInt32 || element == Element::kInt64;
    case DType::kBool:
      return element == Element::kBool;
  }
  return false;
}

int64_t item_bytes(Element element) {
  return element == Element::kInt64 ? 8 : element == Element::kBool ? 1 : 4;
}

// The distance of a table's rows. Where they have no elements it may be anything, and is not to be multiplied.
int64_t row_stride(const TensorView& table) {
  return table.shape[1] == 0 ? 0 : table.strides[0];
}

std::string brackets(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string device_name(int32_t type, int32_t index) {
  if (type == kCpu) return "cpu";
  return (type == kCuda ? "cuda:" : "device " + std::to_string(type) + ":") + std::to_string(index);
}

}  // namespace

Arguments::Arguments(const OpSpec& op, const Value* values) : op_(op), values_(values) {
  for (size_t i = 0; i < op.args.size(); ++i) {
    const ArgSpec& spec = op.args[i];
    const Value& value = values[i];
    if (!value.given) {
      static constexpr const char* kExpected[] = {"a tensor", "an integer", "a bool"};
      const bool may_be_none = spec.kind == ArgKind::kTensor ? !spec.required : spec.nullable;
      if (!may_be_none) fail(spec.name, kExpected[static_cast<int>(spec.kind)], "None");
      continue;
    }
    if (spec.kind == ArgKind::kTensor) {
      check_tensor(spec, value.tensor);
      check_shape(spec, value.tensor);
    } else if (spec.kind == ArgKind::kInt && (value.integer < spec.low || value.integer > spec.high)) {
      fail(spec.name, "an integer in [" + std::to_string(spec.low) + ", " + std::to_string(spec.high) + "]",
           std::to_string(value.integer));
    }
  }
  check_overlap();
}

const Value& Arguments::find(Arg name) const {
  const uint8_t position = op_.positions[static_cast<size_t>(name)];
  if (position == kNoArgument) throw std::logic_error(op_.name + " has no argument " + arg_name(name));
  return values_[position];
}

void Arguments::check_tensor(const ArgSpec& spec, const TensorView& tensor) {
  static constexpr const char* kExpected[] = {"dtype int32", "dtype int64", "dtype int32 or int64", "dtype bool"};
  if (!accepts(spec.dtype, tensor.element)) fail(spec.name, kExpected[static_cast<int>(spec.dtype)], tensor.dtype);
  if (spec.written && tensor.read_only) fail(spec.name, "memory that may be written", "a read-only array");

  if (!first_tensor_) {
    first_tensor_ = &spec;
    device_type_ = tensor.device_type;
    device_index_ = tensor.device_index;
  } else if (tensor.device_type != device_type_ || tensor.device_index != device_index_) {
    fail(spec.name, "a tensor on " + device_name(device_type_, device_index_) + " as " + arg_name(first_tensor_->name),
         device_name(tensor.device_type, tensor.device_index));
  }
}

void Arguments::check_shape(const ArgSpec& spec, const TensorView& tensor) {
  const Arg name = spec.name;
  const std::vector<Dim>& dims = spec.dims;
  const int rank = static_cast<int>(dims.size());
  const int64_t* shape = tensor.shape;
  if (tensor.rank != rank) {
    fail(name, "shape [" + spec.shape + "]", brackets(shape, tensor.rank));
  }
  for (int d = 0; d < rank; ++d) {
    const int64_t n = shape[d];
    if (n < 0 || n >= kInt32Max) fail(name, "sizes in [0, 2147483646]", brackets(shape, rank));
    if (dims[d].symbol == '1' && n != 1) fail(name, "shape [1]", brackets(shape, rank));
    if (dims[d].symbol == '1' || dims[d].symbol == 'Z') continue;
    Size& size = sizes_[dims[d].symbol - 'A'];
    if (size.value < 0) {
      if (n < dims[d].plus) fail(name, "shape [" + spec.shape + "]: at least one element", brackets(shape, rank));
      size = {n - dims[d].plus, name};
    } else if (n != size.value + dims[d].plus) {
      fail(name,
           "shape [" + spec.shape + "] with " + dims[d].symbol + " = " + std::to_string(size.value) + " as in " +
               arg_name(size.from),
           brackets(shape, rank));
    }
  }

  if (shape[0] == 0 || shape[rank - 1] == 0) return;
  const int64_t* strides = tensor.strides;
  const int64_t last = shape[rank - 1];
  const bool dense = last == 1 || strides[rank - 1] == 1;
  const bool apart = rank == 1 || shape[0] == 1 || !spec.written || strides[0] >= last;
  if (!dense || !apart) {
    fail(name, rank == 1 ? "a contiguous tensor" : "rows that are contiguous and do not overlap",
         "strides " + brackets(strides, rank));
  }
  const int64_t item = item_bytes(tensor.element);
  const auto data = reinterpret_cast<uintptr_t>(tensor.data);
  // All in bytes: to the last row, negative if in reverse; from `data` on; from the storage's begin on.
  int64_t to_last_row = 0, bytes = 0, end = 0;
  Extent extent{&spec, 0, 0};
  if (__builtin_mul_overflow((shape[0] - 1) * item, rank == 2 ? strides[0] : 0, &to_last_row) ||
      __builtin_add_overflow(max64(to_last_row, 0), last * item, &bytes) ||
      __builtin_mul_overflow(tensor.storage_offset, item, &end) || __builtin_add_overflow(end, bytes, &end) ||
      __builtin_add_overflow(data, min64(to_last_row, 0), &extent.begin) ||
      __builtin_add_overflow(data, bytes, &extent.end)) {
    fail(name, "memory within the address space",
         "strides " + brackets(strides, rank) + " from address " + std::to_string(data));
  }
  const bool is_known = tensor.storage_bytes >= 0;
  if (!tensor.data || (is_known && end > tensor.storage_bytes)) {  // somebody resized its storage
    fail(name, "a storage of at least " + std::to_string(end) + " bytes",
         is_known ? std::to_string(tensor.storage_bytes) : "a null pointer");
  }
  if (data % item != 0) {
    fail(name, "memory on a boundary of " + std::to_string(item) + " bytes", "an unaligned pointer");
  }
  extents_[num_extents_++] = extent;
}

void Arguments::check_overlap() const {
  for (size_t i = 0; i < num_extents_; ++i) {
    const Extent& a = extents_[i];
    if (!a.spec->written) continue;
    for (size_t j = 0; j < num_extents_; ++j) {
      const Extent& b = extents_[j];
      if (j == i || (j < i && b.spec->written)) continue;
      if (a.begin >= b.end || b.begin >= a.end) continue;
      const std::string name = arg_name(a.spec->name), shared = "bytes shared with ";
      if (name + "_out" == arg_name(b.spec->name)) {
        fail(b.spec->name, "memory of its own, or to be left out: " + name + " is updated in place then",
             shared + name);
      }
      fail(a.spec->name, "memory of its own, since it is written", shared + arg_name(b.spec->name));
    }
  }
}

void Arguments::fail(Arg name, const std::string& expected, const std::string& got) const {
  throw std::runtime_error("specmeta." + op_.name + ": " + arg_name(name) + ": expected " + expected + ", got " + got);
}

void Arguments::needs(Arg name, std::initializer_list<Arg> others) const {
  if (!has(name)) return;
  const Arg first = *others.begin();
  std::string expected = "a tensor";
  for (const Arg other : others) {
    if (has(other)) return;
    if (other != first) expected += std::string(" (or ") + arg_name(other) + ")";
  }
  fail(first, expected + ", since " + arg_name(name) + " is given", "None");
}

void Arguments::all_or_none(std::initializer_list<Arg> names) const {
  std::optional<Arg> given, missing;
  for (const Arg name : names) (has(name) ? given : missing) = name;
  if (given && missing) fail(*missing, std::string("a tensor, since ") + arg_name(*given) + " is given", "None");
}

Ints Arguments::ints(Arg name) const {
  const Value& value = find(name);
  if (!value.given) return {};
  return {data_of(value), value.tensor.element == Element::kInt64};
}
int32_t* Arguments::int32(Arg name) const {
  return static_cast<int32_t*>(data_of(find(name)));
}
int64_t* Arguments::int64(Arg name) const {
  return static_cast<int64_t*>(data_of(find(name)));
}
uint8_t* Arguments::boolean_tensor(Arg name) const {
  return static_cast<uint8_t*>(data_of(find(name)));
}
Table Arguments::table(Arg name) const {
  const Value& value = find(name);
  if (!value.given) return {};
  return {static_cast<int32_t*>(data_of(value)), row_stride(value.tensor), static_cast<int32_t>(value.tensor.shape[1])};
}
IntsTable Arguments::ints_table(Arg name) const {
  const Value& value = find(name);
  if (!value.given) return {};
  return {ints(name), row_stride(value.tensor), static_cast<int32_t>(value.tensor.shape[1])};
}
int64_t Arguments::integer(Arg name, int64_t otherwise) const {
  const Value& value = find(name);
  return value.given ? value.integer : otherwise;
}

}  // namespace specmeta
