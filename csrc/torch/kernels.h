// Registers the five operators for one device.
#pragma once

#include <torch/csrc/stable/library.h>

#include "params.h"

namespace specmeta {

// A boxed kernel: the call's arguments become the operation's parameters, and Device::run takes them.
template <class Device, class Params, Params (*read)(Arguments&), size_t index>
void call(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(op_specs()[index], stack);
  Device::run(read(args), args.device_index());
}

// In the order of op_specs().
template <class Device>
void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("advance", &call<Device, AdvanceParams, advance_params, 0>);
  library.impl("stage", &call<Device, StageParams, stage_params, 1>);
  library.impl("accept_greedy", &call<Device, AcceptParams, accept_greedy_params, 2>);
  library.impl("accept_sampled", &call<Device, AcceptParams, accept_sampled_params, 3>);
  library.impl("draft_step", &call<Device, DraftStepParams, draft_step_params, 4>);
}

}  // namespace specmeta
