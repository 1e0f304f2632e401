// The Python module specmeta._raw: the operations on pointers, without torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "../call/run.h"
#include "dlpack.h"
#include "specmeta/grid.h"

namespace py = pybind11;

namespace specmeta {
namespace {

using Sizes = std::vector<int64_t>;

constexpr int32_t kHost = -1;  // the CPU among device numbers

Sizes contiguous_strides(const Sizes& shape) {
  Sizes strides(shape.size(), 1);
  // Sizes for which this wraps are refused later.
  for (size_t d = shape.size(); d-- > 1;) __builtin_mul_overflow(strides[d], shape[d], &strides[d - 1]);
  return strides;
}

// Memory of the caller's. What keeps it alive is the caller's affair.
class Tensor {
 public:
  // Strides are in elements. `dtype` is a name of NumPy's, `device` the number of a GPU or kHost.
  Tensor(uintptr_t data, Sizes shape, std::optional<Sizes> strides, std::string dtype, int32_t device, bool read_only)
      : data_(reinterpret_cast<void*>(data)),
        shape_(std::move(shape)),
        strides_(strides ? std::move(*strides) : contiguous_strides(shape_)),
        dtype_(std::move(dtype)),
        device_(device),
        read_only_(read_only) {
    if (strides_.size() != shape_.size()) throw std::invalid_argument("as many strides as sizes are needed");
  }

  int32_t device() const { return device_; }

  TensorView view() const {
    TensorView view{};
    view.data = data_;
    view.shape = shape_.data();
    view.strides = strides_.data();
    view.rank = static_cast<int64_t>(shape_.size());
    view.device_type = device_ == kHost ? kCpu : kCuda;
    view.device_index = device_;
    view.element = dtype_ == "int32"   ? Element::kInt32
                   : dtype_ == "int64" ? Element::kInt64
                   : dtype_ == "bool"  ? Element::kBool
                                       : Element::kOther;
    view.dtype = dtype_.c_str();
    view.storage_bytes = -1;
    view.read_only = read_only_;
    return view;
  }

 private:
  void* data_;
  Sizes shape_;
  Sizes strides_;
  std::string dtype_;
  int32_t device_;
  bool read_only_;
};

std::string dtype_name(const dlpack::Tensor& tensor) {
  const std::string bits = std::to_string(tensor.bits) + (tensor.lanes == 1 ? "" : "x" + std::to_string(tensor.lanes));
  switch (tensor.type_code) {
    case dlpack::kInt:
      return "int" + bits;
    case dlpack::kUint:
      return "uint" + bits;
    case dlpack::kFloat:
      return "float" + bits;
    case dlpack::kBfloat:
      return "bfloat" + bits;
    case dlpack::kComplex:
      return "complex" + bits;
    case dlpack::kBool:
      return tensor.bits == 8 && tensor.lanes == 1 ? "bool" : "bool" + bits;
    default:
      return "DLPack type " + std::to_string(tensor.type_code);
  }
}

// The capsule is only looked at: it stays the owner.
Tensor from_dlpack(const py::object& capsule) {
  const dlpack::Tensor* tensor = nullptr;
  bool read_only = false;
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedName)) {
    const void* pointer = PyCapsule_GetPointer(capsule.ptr(), dlpack::kVersionedName);
    const auto& managed = *static_cast<const dlpack::ManagedVersioned*>(pointer);
    if (managed.major != 1) throw py::buffer_error("DLPack version " + std::to_string(managed.major));
    tensor = &managed.tensor;
    read_only = (managed.flags & dlpack::kReadOnly) != 0;
  } else if (PyCapsule_IsValid(capsule.ptr(), dlpack::kName)) {
    const void* pointer = PyCapsule_GetPointer(capsule.ptr(), dlpack::kName);
    tensor = &static_cast<const dlpack::Managed*>(pointer)->tensor;
  } else {
    throw py::buffer_error("something else than a DLPack capsule");
  }
  const bool on_host = tensor->device_type == dlpack::kCpu || tensor->device_type == dlpack::kCudaHost;
  if (!on_host && tensor->device_type != dlpack::kCuda && tensor->device_type != dlpack::kCudaManaged) {
    throw py::buffer_error("DLPack device " + std::to_string(tensor->device_type));
  }
  const Sizes shape(tensor->shape, tensor->shape + tensor->ndim);
  std::optional<Sizes> strides;
  if (tensor->strides) strides.emplace(tensor->strides, tensor->strides + tensor->ndim);
  return Tensor(reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset, shape, strides, dtype_name(*tensor),
                on_host ? kHost : tensor->device_id, read_only);
}

// `arguments` are in the order of the table: None, a Tensor or an integer each.
void call(size_t op, const py::list& arguments, uintptr_t stream) {
  const OpSpec& spec = op_specs().at(op);
  if (arguments.size() != spec.args.size()) throw std::invalid_argument("wrong number of arguments");
  std::array<Value, kMaxArgs> values;
  for (size_t i = 0; i < spec.args.size(); ++i) {
    const py::handle argument = arguments[i];
    Value& value = values[i];
    value.given = !argument.is_none();
    if (!value.given) continue;
    if (spec.args[i].kind == ArgKind::kTensor) {
      value.tensor = argument.cast<const Tensor&>().view();
    } else {
      value.integer = argument.cast<int64_t>();
    }
  }
  const py::gil_scoped_release release;
  run(static_cast<Op>(op), values.data(), reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(_raw, m) {
  m.doc() = "The operations on pointers, without torch: what specmeta.cupy stands on.";
  m.attr("HOST") = kHost;
  py::class_<Tensor>(m, "Tensor")
      .def(py::init<uintptr_t, Sizes, std::optional<Sizes>, std::string, int32_t, bool>(), py::arg("data"),
           py::arg("shape"), py::arg("strides"), py::arg("dtype"), py::arg("device"), py::arg("read_only"))
      .def_property_readonly("device", &Tensor::device);
  m.def("from_dlpack", &from_dlpack, py::arg("capsule"), py::keep_alive<0, 1>());
  m.def(
      "cuda_device", [](uintptr_t memory) { return cuda_device(reinterpret_cast<const void*>(memory)); },
      py::arg("memory"));
  m.def("call", &call, py::arg("op"), py::arg("arguments"), py::arg("stream"));
  m.def("schema", &schema_text);
  m.def("workspace_words", &workspace_words, py::arg("rows"), py::arg("steps"));
}

}  // namespace specmeta
