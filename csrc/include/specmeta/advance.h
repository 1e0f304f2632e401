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

// Where a row's counts take it, before its query tokens are looked at.
struct Move {
  bool is_empty = true;  // without a fault
  int32_t length = 0;
  int32_t shift = 0;     // of its positions; where that doesn't fit, the nearest that does
  int32_t faults = 0;    // unless something else empties the row
  bool is_over = false;  // past its capacity
};

// Nothing is looked at before every read is under way: each takes as long as dozens of instructions.
SPECMETA_HD Move read_move(const AdvanceParams& p, int32_t b, const RowCheck& check, PageRange& pages) {
  Move move;
  if (!check.alive) return move;
  pages = read_pages(p.pages, check.slot);
  const Fetched fetched_len = p.seq_lens.fetch(b);
  const int32_t k = p.count_index ? saturate32(p.count_index.get(b)) : check.slot;
  const bool has_count = k >= 0 && k < p.num_counts;
  const Fetched fetched_count = has_count && p.num_accepted ? p.num_accepted.fetch(k) : Fetched();
  const int64_t old_len = p.seq_lens.count(fetched_len);
  int64_t count = p.num_accepted.count(fetched_count);

  if (old_len < 0) move.faults |= kBadCount;
  if (old_len <= 0) return move;
  const int32_t allocated = count_allocated(p.pages, pages, move.faults);
  int64_t increment = 0;
  if (!p.num_accepted || has_count) {
    if (p.num_accepted && p.max_accepted >= 0) {
      if (count < 0 || count > p.max_accepted) move.faults |= kBadCount;
      count = clamp64(count, 0, p.max_accepted);
    }
    increment = count + p.seq_len_bias;
    move.shift = saturate32(count + p.position_bias);
  } else if (k != -1) {
    move.faults |= kBadSlot;
  }
  const int64_t length = old_len + increment;
  move.is_empty = false;
  move.is_over = length > find_capacity(p.pages, p.layout, check.slot, allocated, length);
  move.length = saturate32(max64(length, -1));
  return move;
}

// What the positions of row b move by, read once more: for the rare one that doesn't fit into 32 bits.
SPECMETA_HD int64_t read_shift(const AdvanceParams& p, int32_t b) {
  if (!p.num_accepted) return p.position_bias;
  const int64_t k = p.count_index ? p.count_index.get(b) : slot_of(p.rows.row_to_slot, b);
  const int64_t count = p.num_accepted.get_count(k);
  return (p.max_accepted >= 0 ? clamp64(count, 0, p.max_accepted) : count) + p.position_bias;
}

// The row's new length, 0 where it is empty.
SPECMETA_HD int32_t advance_row(const Move& move, int32_t q, RowCheck& check) {
  check.faults |= move.faults;
  if (move.is_empty) return 0;
  if (move.length < q) {
    check.faults |= kUnderflow;
    return 0;
  }
  if (move.is_over) {
    check.faults |= kOverflow;
    return 0;
  }
  return move.length;
}

template <class Cta>
SPECMETA_HD void advance(Cta& cta, const AdvanceParams& p) {
  const int32_t live = live_rows(p.rows);
  LayoutWriter layout(p.rows, p.pages, p.layout, p.seq_lens);
  const Ints positions = p.position_ids_out ? p.position_ids_out : p.position_ids;
  const SlotWriter slots(p.rows, p.pages, p.layout.slot_mapping, p.layout.pad_slot);
  const bool by_token = positions || p.layout.slot_mapping;

  const Covered all = walk(
      cta, p.rows.batch, by_token || p.layout.has_lists(),
      [&](int32_t first, int32_t b) {
        const TokenSpan read = read_span(p.rows, b, live);
        RowCheck check = check_slot(p.rows, b, live);
        PageRange pages;
        Move move;
        TokenSpan span;
        if constexpr (Cta::kIsSerial) {
          span = locate(cta, p.rows, b, live, read, check);
          move = read_move(p, b, check, pages);
        } else {  // its reads are under way before the barrier
          move = read_move(p, b, check, pages);
          span = locate(cta, p.rows, b, live, read, check);
        }
        const int32_t length = check.alive ? advance_row(move, span.q(), check) : 0;
        LayoutRow row = layout.place(cta, first, b, check, span, length, pages);
        row.own = move.shift;
        return row;
      },
      [&](const Window& window) {
        if (by_token) {
          for_tokens(
              cta, window, SlotCopy<Cta>{cta, slots},
              TokenCopy{[from = p.position_ids, to = positions](int32_t t, const LayoutRow&) {
                          return from && to ? from.get(t) : t;
                        },
                        [&p, has_from = static_cast<bool>(p.position_ids), to = positions,
                         last = p.pages.max_seq_len - 1](int32_t t, const LayoutRow& row, int32_t b, int64_t position) {
                          if (!to) return;
                          int64_t shift = has_from ? row.own : row.origin;
                          if (has_from && (row.own == INT32_MAX || row.own == INT32_MIN)) shift = read_shift(p, b);
                          // Clamped before the sum, which cannot overflow then.
                          to.set(t, row.seq_len > 0 ? clamp64(position, -shift, last - shift) + shift : 0);
                        }});
        }
        layout.fill(cta, window);
      },
      [&] { layout.arrive(cta); });
  if (by_token) {
    for_padding(cta, p.rows, all, [&](int32_t t) {
      if (positions) positions.set(t, 0);
      slots.pad(t);
    });
  }
  layout.finish(cta, all);
}

}  // namespace specmeta
