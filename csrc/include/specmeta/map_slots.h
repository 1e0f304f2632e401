// map_slots: where the KV of each token goes, from its position.
//
//   0 <= position_ids[t] < the row's capacity:  slot_mapping[t] = page * page_size + position_ids[t] % page_size
//   any other token:                            slot_mapping[t] = pad_slot
#pragma once

#include "specmeta/slots.h"

namespace specmeta {

// What there is to know of a row: one sector of memory.
struct alignas(32) SlotsRow {
  static constexpr bool kIsRepeatable = true;

  int32_t token_begin = 0;
  int32_t tokens_end = 0;
  int64_t capacity = 0;          // -1: the row is empty
  const int32_t* ids = nullptr;  // of its pages

  SPECMETA_HD int32_t token_end() const { return tokens_end; }
  static constexpr int32_t page_begin = 0, page_end = 0;
};

template <class Cta>
SPECMETA_HD void map_slots(Cta& cta, const MapSlotsParams& p) {
  const int32_t live = live_rows(p.rows);
  const SlotWriter slots(p.rows, p.pages, p.slot_mapping, p.pad_slot);
  const Covered all = walk(
      cta, p.rows.batch, /*has_more=*/true,
      [&](int32_t, int32_t b) {
        const TokenSpan read = read_span(p.rows, b, live);
        RowCheck check = check_slot(p.rows, b, live);
        const PageRange range = check.alive ? read_pages(p.pages, check.slot) : PageRange();
        const TokenSpan span = locate(cta, p.rows, b, live, read, check);
        SlotsRow row;
        row.token_begin = span.begin;
        row.tokens_end = span.end;
        row.capacity = -1;
        if (check.alive && span.q() > 0) {
          row.ids = first_page(p.pages, range, check.slot);
          row.capacity =
              find_capacity(p.pages, Layout(), check.slot, count_allocated(p.pages, range, check.faults), kInt32Max);
        }
        if (cta.writes_rows()) report(cta, p.rows, check);
        return row;
      },
      [&](const Window& window) {
        for_tokens(cta, window,
                   TokenCopy{[positions = p.position_ids](int32_t t, const SlotsRow& row) {
                               return row.capacity < 0 ? 0 : positions.get(t);
                             },
                             [&cta, slots, rows = p.rows](int32_t t, const SlotsRow& row, int32_t b, int64_t position) {
                               if (position >= 0 && position < row.capacity) {
                                 const auto index = static_cast<uint32_t>(position);
                                 slots.write(cta, t, b, index, slots.load_page(row.ids, index));
                                 return;
                               }
                               slots.pad(t);
                               if (rows.status && row.capacity >= 0) {
                                 cta.atomic_or(rows.status + slot_of(rows.row_to_slot, b),
                                               position < 0 ? kBadCount : kOverflow);
                               }
                             }});
      });
  for_padding(cta, p.rows, all, [slots](int32_t t) { slots.pad(t); });
  for_all(cta, p.rows.tokens, p.num_slots, [slots](int32_t t) { slots.pad(t); });
}

}  // namespace specmeta
