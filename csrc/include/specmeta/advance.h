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

// The row's new length, 0 where it is empty; `shift` is what its positions move by.
SPECMETA_HD int32_t advance_row(const AdvanceParams& p, int32_t b, int32_t q, RowCheck& check, int64_t& shift) {
  const int64_t old_len = p.seq_lens.get_count(b);
  if (old_len < 0) check.faults |= kBadCount;
  if (old_len <= 0) return 0;
  const int32_t allocated = count_allocated(p.pages, check);

  int64_t increment = 0;
  const int64_t k = p.count_index ? p.count_index.get(b) : check.slot;
  if (!p.num_accepted) {
    increment = p.seq_len_bias;
    shift = p.position_bias;
  } else if (k >= 0 && k < p.num_counts) {
    int64_t count = p.num_accepted.get_count(k);
    if (p.max_accepted >= 0) {
      if (count < 0 || count > p.max_accepted) check.faults |= kBadCount;
      count = clamp64(count, 0, p.max_accepted);
    }
    increment = count + p.seq_len_bias;
    shift = count + p.position_bias;
  } else if (k != -1) {
    check.faults |= kBadSlot;
  }

  const int64_t new_len = old_len + increment;
  if (new_len < q) {
    check.faults |= kUnderflow;
    return 0;
  }
  if (new_len > find_capacity(p.pages, p.layout, check.slot, allocated, new_len)) {
    check.faults |= kOverflow;
    return 0;
  }
  return static_cast<int32_t>(new_len);
}

template <class Cta>
SPECMETA_HD void advance(Cta& cta, const AdvanceParams& p) {
  const int32_t live = live_rows(p.rows);
  const LayoutWriter layout(p.rows, p.pages, p.layout);
  const Ints positions = p.position_ids_out ? p.position_ids_out : p.position_ids;
  const SlotWriter slots(p.rows, p.pages, p.layout.slot_mapping, p.layout.pad_slot);
  const bool by_token = positions || p.layout.slot_mapping;

  const Covered all = walk(
      cta, p.rows.batch, by_token || p.layout.has_lists(),
      [&](int32_t first, int32_t b) {
        RowCheck check = check_slot(p.rows, b, live);
        const TokenSpan span = locate(cta, p.rows, b, live, check);
        int64_t shift = 0;
        const int32_t length = check.alive ? advance_row(p, b, span.q(), check, shift) : 0;
        LayoutRow row = layout.place(cta, first, b, check, span, length);
        row.shift = shift;
        return row;
      },
      [&](const Window& window) {
        if (by_token) {
          for_tokens(
              cta, window,
              [from = p.position_ids, to = positions, last = p.pages.max_seq_len - 1](int32_t t, const LayoutRow& row) {
                if (!to) return;
                const int64_t shift = from ? row.shift : row.origin;
                const int64_t position = from ? from.get(t) : t;  // clamped before the sum, which cannot overflow then
                to.set(t, row.seq_len > 0 ? clamp64(position, -shift, last - shift) + shift : 0);
              },
              [&cta, slots](int32_t t, const LayoutRow& row) { slots.write(cta, t, row); });
        }
        layout.fill(cta, window);
      });
  if (by_token) {
    for_padding(cta, p.rows, all, [&](int32_t t) {
      if (positions) positions.set(t, 0);
      slots.pad(t);
    });
  }
  layout.finish(cta, all);
}

}  // namespace specmeta
