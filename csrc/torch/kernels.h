// Registers the operators for one device.
#pragma once

#include <torch/csrc/stable/library.h>

#include "../call/from_arguments.h"
#include "stack.h"

namespace specmeta {

// A boxed kernel: makes the operation's parameters out of the call's arguments, and Device::run takes them.
template <class Device, Op op>
void call(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  const OpSpec& spec = op_spec(op);
  const Stack values(spec, stack);
  Arguments args(spec, values.values());
  with_params(op, args, [&args](const auto& params) { Device::run(params, args.device_index()); });
}

template <class Device>
void register_kernels(torch::stable::detail::StableLibrary& library) {
#define SPECMETA_REGISTER(name) library.impl(#name, &call<Device, Op::name>);
  SPECMETA_OPERATORS(SPECMETA_REGISTER)
#undef SPECMETA_REGISTER
}

}  // namespace specmeta
