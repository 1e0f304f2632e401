// The operations on the CPU, one thread each.
#pragma once

#include "specmeta/params.h"

namespace specmeta::cpu {

void run(const AdvanceParams& params);
void run(const StageParams& params);
void run(const AcceptParams& params);
void run(const CountSampledParams& params);
void run(const LocateSampledParams& params);
void run(const KeepLastParams& params);
void run(const DraftListsParams& params);
void run(const MapSlotsParams& params);
void run(const DraftStepParams& params);

}  // namespace specmeta::cpu
