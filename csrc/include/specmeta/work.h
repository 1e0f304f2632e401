// How much there is to do, and how many Ctas it is worth, from sizes alone: rows, tokens, and elements of the page
// lists. For a token there is several times as much to do as for a page.
#pragma once

#include "specmeta/cta.h"
#include "specmeta/params.h"

namespace specmeta {

inline int64_t work(const Rows& rows, const Layout& layout, bool by_token) {
  return int64_t{rows.batch} + (by_token ? 4 * int64_t{max32(rows.tokens, layout.num_slots)} : 0) + layout.kv_capacity +
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
inline int64_t work(const MapSlotsParams& p) {  // a token's page is read after its position
  return int64_t{p.rows.batch} + 8 * int64_t{p.num_slots};
}
inline int64_t work(const DraftStepParams& p) {
  if (p.last) return p.rows.batch;
  return work(p.rows, p.layout, p.position_ids || p.input_ids || p.layout.slot_mapping);
}

inline constexpr int32_t kMaxBlocks = 256;  // a GPU has one to two hundred multiprocessors

// How many threads a Cta has on a GPU: as many as there are rows, if it may.
inline int32_t count_threads(int32_t rows) {
  int32_t threads = kTileRows / 4;
  while (threads < rows && threads < kTileRows) threads *= 2;
  return threads;
}

// How many such Ctas: a power of two. Several that each place all rows cost little: as many as have work for all that
// their threads may have in flight. Others agree through a workspace, which takes as long as one alone takes for two
// shares.
inline int32_t count_blocks(int32_t rows, int64_t work, bool is_repeatable) {
  const bool is_replicated = is_repeatable && rows <= kTileRows;
  const int64_t share = is_replicated ? 8 * int64_t{count_threads(rows)} : kLeastShare;
  if (!is_replicated && rows <= kTileRows && work <= 2 * share) return 1;
  int32_t blocks = is_replicated ? 1 : 2;
  while (blocks < kMaxBlocks && blocks * 2 * share <= work) blocks *= 2;
  return blocks;
}

}  // namespace specmeta
