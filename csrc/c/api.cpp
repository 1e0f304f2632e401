// specmeta.h: each struct is read member by member, in the order of the table.
#include <array>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "../call/run.h"
#include "specmeta.h"
#include "specmeta/grid.h"

namespace specmeta {
namespace {

int report(int code, const char* text, char* error, size_t error_size) {
  if (error) std::snprintf(error, error_size, "%s", text);
  return code;
}

TensorView view(const OpSpec& op, const ArgSpec& spec, const specmeta_tensor& tensor, int32_t device) {
  if (tensor.rank < 0 || tensor.rank > 2) {
    throw std::runtime_error("specmeta." + op.name + ": " + arg_name(spec.name) + ": expected rank 1 or 2, got " +
                             std::to_string(tensor.rank));
  }
  TensorView view{};
  view.data = tensor.data;
  view.shape = tensor.shape;
  view.strides = tensor.strides;
  view.rank = tensor.rank;
  view.device_type = device == SPECMETA_CPU ? kCpu : kCuda;
  view.device_index = device;
  static constexpr Element kElements[] = {Element::kInt32, Element::kInt64, Element::kBool};
  static constexpr const char* kNames[] = {"int32", "int64", "bool"};
  const bool is_known = tensor.dtype >= SPECMETA_INT32 && tensor.dtype <= SPECMETA_BOOL;
  view.element = is_known ? kElements[tensor.dtype - SPECMETA_INT32] : Element::kOther;
  view.dtype = is_known ? kNames[tensor.dtype - SPECMETA_INT32] : "one that specmeta.h doesn't have";
  view.storage_bytes = -1;
  return view;
}

template <class Args>
void call(Op op, const Args* args, int32_t device, void* stream) {
  const OpSpec& spec = op_spec(op);
  const std::string prefix = "specmeta." + spec.name + ": ";
  if (!args) throw std::runtime_error(prefix + "args: expected a struct, got a null pointer");
  if (args->struct_size != sizeof(Args) || args->abi_version != SPECMETA_ABI_VERSION) {
    throw std::runtime_error(prefix + "args: expected a struct of " + std::to_string(sizeof(Args)) +
                             " bytes and ABI version " + std::to_string(SPECMETA_ABI_VERSION) + " from specmeta_" +
                             spec.name + "_init(), got " + std::to_string(args->struct_size) + " bytes and version " +
                             std::to_string(args->abi_version));
  }
  if (device < SPECMETA_CPU) {
    throw std::runtime_error(prefix + "device: expected SPECMETA_CPU or a GPU's number, got " + std::to_string(device));
  }
  std::array<Value, kMaxArgs> values;
  const char* member = reinterpret_cast<const char*>(args) + 2 * sizeof(uint32_t);
  for (size_t i = 0; i < spec.args.size(); ++i) {
    Value& value = values[i];
    if (spec.args[i].kind == ArgKind::kTensor) {
      const auto& tensor = *reinterpret_cast<const specmeta_tensor*>(member);
      member += sizeof tensor;
      value.given = tensor.dtype != 0;
      if (value.given) value.tensor = view(spec, spec.args[i], tensor, device);
    } else {
      value.integer = *reinterpret_cast<const int64_t*>(member);
      member += sizeof value.integer;
      value.given = !spec.args[i].nullable || value.integer != SPECMETA_NONE;
    }
  }
  run(op, values.data(), stream);
}

template <class Args>
int guarded_call(Op op, const Args* args, int32_t device, void* stream, char* error, size_t error_size) {
  try {
    call(op, args, device, stream);
    return report(SPECMETA_OK, "", error, error_size);
  } catch (const CudaError& e) {
    return report(SPECMETA_CUDA_ERROR, e.what(), error, error_size);
  } catch (const std::runtime_error& e) {
    return report(SPECMETA_INVALID_ARGUMENT, e.what(), error, error_size);
  } catch (const std::exception& e) {
    return report(SPECMETA_INTERNAL_ERROR, e.what(), error, error_size);
  }
}

}  // namespace
}  // namespace specmeta

#define SPECMETA_DEFINE(name)                                                                        \
  int specmeta_##name(const specmeta_##name##_args* args, int32_t device, void* stream, char* error, \
                      size_t error_size) noexcept {                                                  \
    return specmeta::guarded_call(specmeta::Op::name, args, device, stream, error, error_size);      \
  }
SPECMETA_OPERATORS(SPECMETA_DEFINE)
#undef SPECMETA_DEFINE

int64_t specmeta_workspace_size(int64_t rows, int64_t num_steps) noexcept {
  if (rows < 0 || rows >= specmeta::kInt32Max || num_steps < 1 || num_steps > specmeta::kMaxSteps) return -1;
  return specmeta::workspace_words(static_cast<int32_t>(rows), num_steps);
}
