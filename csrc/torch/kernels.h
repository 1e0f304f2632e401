// Registers the operators for one device.
#pragma once

#include <torch/csrc/stable/library.h>

#include "../call/from_arguments.h"
#include "stack.h"

namespace specmeta {

// A boxed kernel: `read` makes the operation's parameters out of the call's arguments, and Device::run takes them.
template <class Device, auto read, size_t op>
void call(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  const OpSpec& spec = op_specs()[op];
  const Stack values(spec, stack);
  Arguments args(spec, values.values());
  Device::run(read(args), args.device_index());
}

template <class Device, auto read, size_t op>
void add(torch::stable::detail::StableLibrary& library) {
  library.impl(op_specs()[op].name.c_str(), &call<Device, read, op>);
}

// In the order of op_specs().
template <class Device>
void register_kernels(torch::stable::detail::StableLibrary& library) {
  add<Device, advance_params, 0>(library);
  add<Device, stage_params, 1>(library);
  add<Device, accept_greedy_params, 2>(library);
  add<Device, accept_sampled_params, 3>(library);
  add<Device, count_sampled_params, 4>(library);
  add<Device, locate_sampled_params, 5>(library);
  add<Device, keep_last_params, 6>(library);
  add<Device, draft_lists_params, 7>(library);
  add<Device, map_slots_params, 8>(library);
  add<Device, draft_step_params, 9>(library);
}

}  // namespace specmeta
