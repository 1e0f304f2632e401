#include "run.h"

#include "specmeta/accept.h"
#include "specmeta/advance.h"
#include "specmeta/count_sampled.h"
#include "specmeta/cta.h"
#include "specmeta/draft_lists.h"
#include "specmeta/draft_step.h"
#include "specmeta/keep_last.h"
#include "specmeta/locate_sampled.h"
#include "specmeta/map_slots.h"
#include "specmeta/stage.h"

// Flattened: an algorithm's parts are large, and a compiler would not put them together.
namespace specmeta::cpu {

[[gnu::flatten]] void run(const AdvanceParams& params) {
  SerialCta<LayoutRow> cta;
  advance(cta, params);
}

[[gnu::flatten]] void run(const StageParams& params) {
  SerialCta<LayoutRow> cta;
  stage(cta, params);
}

[[gnu::flatten]] void run(const AcceptParams& params) {
  SerialCta<AcceptRow> cta;
  accept(cta, params);
}

[[gnu::flatten]] void run(const CountSampledParams& params) {
  SerialCta<BareRow> cta;
  count_sampled(cta, params);
}

[[gnu::flatten]] void run(const LocateSampledParams& params) {
  SerialCta<BareRow> cta;
  locate_sampled(cta, params);
}

[[gnu::flatten]] void run(const KeepLastParams& params) {
  SerialCta<BareRow> cta;
  keep_last(cta, params);
}

[[gnu::flatten]] void run(const DraftListsParams& params) {
  for (int32_t step = 0; step < params.num_steps; ++step) {
    SerialCta<LayoutRow> cta;
    draft_lists(cta, params, step);
  }
}

[[gnu::flatten]] void run(const MapSlotsParams& params) {
  SerialCta<SlotsRow> cta;
  map_slots(cta, params);
}

[[gnu::flatten]] void run(const DraftStepParams& params) {
  SerialCta<LayoutRow> cta;
  draft_step(cta, params);
}

}  // namespace specmeta::cpu
