#include "arguments.h"

#include <optional>
#include <stdexcept>

namespace specmeta {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::to;

// What a tensor without elements points to: not null, since null means "not given", and never read.
alignas(8) char no_elements[8];

// Calls one of torch's functions that return an error and, through their last argument, a result.
template <class Result>
Result get(AOTITorchError (*function)(AtenTensorHandle, Result*), AtenTensorHandle tensor) {
  Result result{};
  STABLE_TORCH_ERROR_CODE_CHECK(function(tensor, &result));
  return result;
}

std::string brackets(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// As Python writes it.
std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return torch::headeronly::toString(type);
  }
}

std::string device_name(int32_t type, int32_t index) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  return (type == aoti_torch_device_type_cuda() ? "cuda:" : "device " + std::to_string(type) + ":") +
         std::to_string(index);
}

}  // namespace

Arguments::Arguments(const OpSpec& op, StableIValue* stack) : op_(op) {
  // Own everything before anything may throw.
  for (const ArgSpec& spec : op.args) {
    Value& value = values_.at(num_values_);
    const StableIValue item = stack[num_values_++];
    value.spec = &spec;
    value.given = true;
    if (spec.kind == ArgKind::kTensor) {
      value.tensor.reset(spec.required ? to<AtenTensorHandle>(item)
                                       : to<std::optional<AtenTensorHandle>>(item).value_or(nullptr));
      value.given = value.tensor != nullptr;
    } else if (spec.kind == ArgKind::kBool) {
      value.integer = to<bool>(item);
    } else if (spec.default_value == "None") {
      const auto integer = to<std::optional<int64_t>>(item);
      value.given = integer.has_value();
      value.integer = integer.value_or(0);
    } else {
      value.integer = to<int64_t>(item);
    }
  }
  for (size_t i = 0; i < num_values_; ++i) {
    Value& value = values_[i];
    if (!value.given) continue;
    if (value.spec->kind == ArgKind::kTensor) {
      check_tensor(value);
      check_shape(value);
      if (value.bytes > 0) tensors_[num_tensors_++] = &value;
    } else if (value.spec->kind == ArgKind::kInt) {
      const ArgSpec& spec = *value.spec;
      if (value.integer < spec.low || value.integer > spec.high) {
        fail(spec.name, "an integer in [" + std::to_string(spec.low) + ", " + std::to_string(spec.high) + "]",
             std::to_string(value.integer));
      }
    }
  }
  check_overlap();
}

void Arguments::check_tensor(Value& value) {
  const ArgSpec& spec = *value.spec;
  const Arg name = spec.name;
  const AtenTensorHandle tensor = value.tensor.get();

  const auto type = to<ScalarType>(from(get(aoti_torch_get_dtype, tensor)));
  value.wide = type == ScalarType::Long;
  value.item = value.wide ? 8 : type == ScalarType::Bool ? 1 : 4;
  static constexpr const char* kExpected[] = {"dtype int32", "dtype int64", "dtype int32 or int64", "dtype bool"};
  const bool right = spec.dtype == DType::kInt32   ? type == ScalarType::Int
                     : spec.dtype == DType::kInt64 ? value.wide
                     : spec.dtype == DType::kBool  ? type == ScalarType::Bool
                                                   : value.wide || type == ScalarType::Int;
  if (!right) fail(name, kExpected[static_cast<int>(spec.dtype)], dtype_name(type));

  const int32_t device_type = get(aoti_torch_get_device_type, tensor);
  const int32_t device_index = get(aoti_torch_get_device_index, tensor);
  if (!first_tensor_) {
    first_tensor_ = &value;
    device_type_ = device_type;
    device_index_ = device_index;
  } else if (device_type != device_type_ || device_index != device_index_) {
    fail(name, "a tensor on " + device_name(device_type_, device_index_) + " as " + arg_name(first_tensor_->spec->name),
         device_name(device_type, device_index));
  }
}

void Arguments::check_shape(Value& value) {
  const ArgSpec& spec = *value.spec;
  const Arg name = spec.name;
  const AtenTensorHandle tensor = value.tensor.get();

  const std::vector<Dim>& dims = spec.dims;
  const int rank = static_cast<int>(dims.size());
  const int64_t* shape = get(aoti_torch_get_sizes, tensor);
  const int64_t got_rank = get(aoti_torch_get_dim, tensor);
  if (got_rank != rank) {
    fail(name, "shape [" + spec.shape + "]", brackets(shape, got_rank));
  }
  for (int d = 0; d < rank; ++d) {
    const int64_t n = shape[d];
    value.shape[d] = n;
    if (n >= kInt32Max) fail(name, "sizes below 2147483647", brackets(shape, got_rank));
    if (dims[d].symbol == '1' && n != 1) fail(name, "shape [1]", brackets(shape, got_rank));
    if (dims[d].symbol == '1' || dims[d].symbol == 'Z') continue;
    Size& size = sizes_[dims[d].symbol - 'A'];
    if (size.value < 0) {
      if (n < dims[d].plus) fail(name, "shape [" + spec.shape + "]: at least one element", brackets(shape, got_rank));
      size = {n - dims[d].plus, name};
    } else if (n != size.value + dims[d].plus) {
      fail(name,
           "shape [" + spec.shape + "] with " + dims[d].symbol + " = " + std::to_string(size.value) + " as in " +
               arg_name(size.from),
           brackets(shape, got_rank));
    }
  }

  const int64_t* strides = get(aoti_torch_get_strides, tensor);
  const int64_t n = shape[0] * (rank == 2 ? shape[1] : 1);
  value.stride = rank == 2 ? strides[0] : 0;
  if (n > 0) {
    const int64_t last = shape[rank - 1];
    const bool dense = last == 1 || strides[rank - 1] == 1;
    const bool apart = rank == 1 || shape[0] == 1 || !spec.written || strides[0] >= last;
    if (!dense || !apart) {
      fail(name, rank == 1 ? "a contiguous tensor" : "rows that are contiguous and do not overlap",
           "strides " + brackets(strides, rank));
    }
    value.data = static_cast<char*>(get(aoti_torch_get_data_ptr, tensor));
    value.bytes = ((rank == 2 ? (shape[0] - 1) * strides[0] : 0) + last) * value.item;
    const int64_t storage = get(aoti_torch_get_storage_size, tensor);
    const int64_t end = get(aoti_torch_get_storage_offset, tensor) * value.item + value.bytes;
    if (!value.data || end > storage) {  // somebody resized its storage
      fail(name, "a storage of at least " + std::to_string(end) + " bytes", std::to_string(storage));
    }
  } else {
    value.data = no_elements;
  }
}

void Arguments::check_overlap() const {
  for (size_t i = 0; i < num_tensors_; ++i) {
    const Value& a = *tensors_[i];
    if (!a.spec->written) continue;
    for (size_t j = 0; j < num_tensors_; ++j) {
      const Value& b = *tensors_[j];
      if (j == i || (j < i && b.spec->written)) continue;
      if (a.data < b.data + b.bytes && b.data < a.data + a.bytes) {
        fail(a.spec->name, "memory of its own, since it is written",
             std::string("bytes shared with ") + arg_name(b.spec->name));
      }
    }
  }
}

void Arguments::fail(Arg name, const std::string& expected, const std::string& got) const {
  throw std::runtime_error("specmeta." + op_.name + ": " + arg_name(name) + ": expected " + expected + ", got " + got);
}

void Arguments::needs(Arg name, std::initializer_list<Arg> others) {
  if (!has(name)) return;
  std::string list;
  for (const Arg other : others) {
    if (has(other)) return;
    list += (list.empty() ? "" : " or ") + std::string(arg_name(other));
  }
  fail(name, list + " beside it", "neither");
}

void Arguments::all_or_none(std::initializer_list<Arg> names) {
  std::optional<Arg> given, missing;
  for (const Arg name : names) (has(name) ? given : missing) = name;
  if (given && missing) fail(*missing, std::string("a tensor, since ") + arg_name(*given) + " is given", "None");
}

Ints Arguments::ints(Arg name) {
  const Value& value = find(name);
  return {value.data, value.wide};
}
int32_t* Arguments::int32(Arg name) {
  return reinterpret_cast<int32_t*>(find(name).data);
}
int64_t* Arguments::int64(Arg name) {
  return reinterpret_cast<int64_t*>(find(name).data);
}
uint8_t* Arguments::boolean_tensor(Arg name) {
  return reinterpret_cast<uint8_t*>(find(name).data);
}
Table Arguments::table(Arg name) {
  const Value& value = find(name);
  return value.given ? Table{reinterpret_cast<int32_t*>(value.data), value.stride, static_cast<int32_t>(value.shape[1])}
                     : Table{};
}
IntsTable Arguments::ints_table(Arg name) {
  const Value& value = find(name);
  return value.given ? IntsTable{{value.data, value.wide}, value.stride, static_cast<int32_t>(value.shape[1])}
                     : IntsTable{};
}
int64_t Arguments::integer(Arg name, int64_t otherwise) {
  const Value& value = find(name);
  return value.given ? value.integer : otherwise;
}

}  // namespace specmeta
