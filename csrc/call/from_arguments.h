// From a call's arguments to an operation's parameters: what one argument asks of another is checked here, for every
// device and every caller.
#pragma once

#include "arguments.h"

namespace specmeta {

AdvanceParams advance_params(Arguments& args);
StageParams stage_params(Arguments& args);
AcceptParams accept_greedy_params(Arguments& args);
AcceptParams accept_sampled_params(Arguments& args);
CountSampledParams count_sampled_params(Arguments& args);
LocateSampledParams locate_sampled_params(Arguments& args);
KeepLastParams keep_last_params(Arguments& args);
DraftListsParams draft_lists_params(Arguments& args);
MapSlotsParams map_slots_params(Arguments& args);
DraftStepParams draft_step_params(Arguments& args);

// Hands an operation's parameters to `run`.
template <class Run>
void with_params(Op op, Arguments& args, Run run) {
  switch (op) {
#define SPECMETA_CASE(name) \
  case Op::name:            \
    return run(name##_params(args));
    SPECMETA_OPERATORS(SPECMETA_CASE)
#undef SPECMETA_CASE
    case Op::kCount:
      break;
  }
}

}  // namespace specmeta
