// How much there is to do, and how many Ctas it is worth, from sizes alone: rows, tokens, and elements of the page
// lists.
#pragma once

#include "specmeta/cta.h"
#include "specmeta/params.h"

namespace specmeta {

inline int64_t work(const Rows& rows, const Layout& layout, bool by_token) {
  return int64_t{rows.batch} + (by_token ? max32(rows.tokens, layout.num_slots) : 0) + layout.kv_capacity +
         int64_t{rows.batch} * layout.block_table.width;
}

inline int64_t work(const AdvanceParams& p) {
  return work(p.rows, p.layout, p.position_ids || p.layout.slot_mapping);
}
inline int64_t work(const StageParams& p) {
  return work(p.rows, p.layout, p.position_ids || p.input_ids || p.layout.slot_mapping);
}
inline int64_t work(const AcceptParams& p) {
  return int64_t{p.rows.batch} * (1 + int64_t{p.accepted_tokens.width}) + (p.draft_input_ids ? p.rows.tokens : 0);
}
inline int64_t work(const CountSampledParams& p) {
  return p.rows.batch;
}
inline int64_t work(const LocateSampledParams& p) {
  return p.rows.batch;
}
inline int64_t work(const KeepLastParams& p) {
  return p.rows.batch;
}
inline int64_t work(const DraftListsParams& p) {  // of a step
  return int64_t{p.rows.batch} + p.kv_indices.width;
}
inline int64_t work(const MapSlotsParams& p) {
  return int64_t{p.rows.batch} + p.num_slots;
}
inline int64_t work(const DraftStepParams& p) {
  if (p.last) return p.rows.batch;
  return work(p.rows, p.layout, p.position_ids || p.input_ids || p.layout.slot_mapping);
}

// One Cta does this much alone as fast as several would together.
inline constexpr int64_t kAloneWork = 8192;
inline constexpr int32_t kMaxBlocks = 1024;

// How many Ctas of tile_size threads: one, or a power of two.
inline int32_t count_blocks(int32_t rows, int64_t work, int32_t tile_size) {
  if (rows <= tile_size && work <= kAloneWork) return 1;
  int32_t blocks = 2;
  while (blocks < kMaxBlocks && int64_t{blocks} * 2 * kLeastShare <= work) blocks *= 2;
  return blocks;
}

}  // namespace specmeta
