#include "stack.h"

#include <optional>

namespace specmeta {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::to;

// Calls one of torch's functions that return an error and, through their last argument, a result.
template <class Result>
Result get(AOTITorchError (*function)(AtenTensorHandle, Result*), AtenTensorHandle tensor) {
  Result result{};
  TORCH_ERROR_CODE_CHECK(function(tensor, &result));
  return result;
}

// As Python writes it.
const char* dtype_name(ScalarType type) {
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

TensorView view(AtenTensorHandle tensor) {
  const auto type = to<ScalarType>(from(get(aoti_torch_get_dtype, tensor)));
  return {
      get(aoti_torch_get_data_ptr, tensor),
      get(aoti_torch_get_sizes, tensor),
      get(aoti_torch_get_strides, tensor),
      get(aoti_torch_get_dim, tensor),
      get(aoti_torch_get_device_type, tensor),
      get(aoti_torch_get_device_index, tensor),
      type == ScalarType::Int    ? Element::kInt32
      : type == ScalarType::Long ? Element::kInt64
      : type == ScalarType::Bool ? Element::kBool
                                 : Element::kOther,
      dtype_name(type),
      get(aoti_torch_get_storage_size, tensor),
      get(aoti_torch_get_storage_offset, tensor),
      false,
  };
}

}  // namespace

Stack::Stack(const OpSpec& op, const StableIValue* stack) {
  const size_t size = op.args.size();
  for (size_t i = 0; i < size; ++i) {
    const ArgSpec& spec = op.args[i];
    const StableIValue item = stack[i];
    Value& value = values_[i];
    value.given = true;
    if (spec.kind == ArgKind::kTensor) {
      tensors_[i].reset(spec.required ? to<AtenTensorHandle>(item)
                                      : to<std::optional<AtenTensorHandle>>(item).value_or(nullptr));
      value.given = tensors_[i] != nullptr;
    } else if (spec.kind == ArgKind::kBool) {
      value.integer = to<bool>(item);
    } else if (spec.nullable) {
      const auto integer = to<std::optional<int64_t>>(item);
      value.given = integer.has_value();
      value.integer = integer.value_or(0);
    } else {
      value.integer = to<int64_t>(item);
    }
  }
  for (size_t i = 0; i < size; ++i) {
    if (tensors_[i]) values_[i].tensor = view(tensors_[i].get());
  }
}

}  // namespace specmeta
