// advance: fast-forward or rewind rows that the host staged before it knew num_accepted.
//
//   for each row with seq_lens[b] > 0:
//     c = num_accepted[count_index[b]]            (clamped to [0, max_accepted]; index -1: no increment at all)
//     seq_lens[b] += c + seq_len_bias             (below its query tokens, or past the capacity: emptied and flagged)
//     position_ids[t] += c + position_bias        for its query tokens
//   and the layout that follows from the lengths
#pragma once

#include "specmeta/layout.h"

namespace specmeta {

// The row's new length, 0 where it is empty.
SPECMETA_HD int64_t advance_row(const AdvanceParams& p, int64_t b, RowCheck& check, LayoutRow& row) {
  const int64_t old_len = p.seq_lens.get_count(b);
  if (old_len < 0) check.faults |= kBadCount;
  if (old_len <= 0) return 0;
  const Allocation allocation = find_allocation(p.pages, check);
  row.pages = allocation.ids;

  int64_t increment = 0;
  const int64_t k = p.count_index ? p.count_index[b] : check.slot;
  if (k >= 0 && k < p.num_counts) {
    int64_t count = p.num_accepted.get_count(k);
    if (p.max_accepted >= 0) {
      if (count < 0 || count > p.max_accepted) check.faults |= kBadCount;
      count = clamp64(count, 0, p.max_accepted);
    }
    increment = count + p.seq_len_bias;
    row.shift = count + p.position_bias;
  } else if (k != -1) {
    check.faults |= kBadSlot;
  }

  const int64_t new_len = old_len + increment;
  if (new_len < row.q()) {
    check.faults |= kUnderflow;
    return 0;
  }
  if (new_len > find_capacity(p.pages, p.layout, allocation, new_len)) {
    check.faults |= kOverflow;
    return 0;
  }
  return new_len;
}

template <class Cta>
SPECMETA_HD void advance(Cta& cta, const AdvanceParams& p) {
  const int64_t live = live_rows(p.rows);
  TokenRanges ranges(p.rows, live);
  LayoutWriter layout(p.rows, p.pages, p.layout);
  const Ints& positions = p.position_ids_out ? p.position_ids_out : p.position_ids;

  for (int64_t first = 0; first < p.rows.batch; first += cta.size()) {
    const int64_t b = first + cta.rank();
    RowCheck check = check_slot(p.rows, b, live);
    LayoutRow row;
    ranges.locate(cta, first, b, check, row);
    if (check.alive) row.seq_len = static_cast<int32_t>(advance_row(p, b, check, row));
    layout.place(cta, first, b, check, row);
    if (positions || p.layout.slot_mapping) {
      ranges.for_tokens(cta, [&](int64_t t, const LayoutRow& r) {
        if (positions) {
          const int64_t moved = clamp64(p.position_ids.get(t), -kPositionLimit, kPositionLimit) + r.shift;
          positions.set(t, r.seq_len > 0 ? clamp64(moved, 0, p.pages.max_seq_len - 1) : 0);
        }
        layout.write_slot(cta, t, r);
      });
    }
    layout.write_pages(cta, first);
    cta.sync();  // the tile is read until here
  }
  if (positions || p.layout.slot_mapping) {
    ranges.for_padding(cta, [&](int64_t t) {
      if (positions) positions.set(t, 0);
      layout.pad_slot(t);
    });
  }
  layout.finish(cta);
}

}  // namespace specmeta
