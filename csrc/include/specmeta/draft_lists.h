// draft_lists: the page lists of all draft steps at once, as draft_step would leave them one after the other.
//
//   step k:  n = seq_lens[b] + k + 1;  kv_indptr[k], kv_indices[k], last_page_len[k] of rows of that length
//            slot_mapping[b * K + k] = the slot of cache index n - 1
//   position_ids = seq_lens
#pragma once

#include "specmeta/layout.h"

namespace specmeta {

// One of the K steps.
template <class Cta>
SPECMETA_HD void draft_lists(Cta& cta, const DraftListsParams& p, int32_t step) {
  const int32_t live = live_rows(p.rows);
  Layout out;
  if (p.kv_indptr) out.kv_indptr = p.kv_indptr.row(step);
  if (p.kv_indices) out.kv_indices = p.kv_indices.row(step);
  if (p.last_page_len) out.last_page_len = p.last_page_len.row(step);
  out.kv_capacity = p.kv_indices.width;
  out.pad_page = p.pad_page;
  out.pad_seq_len = p.pad_seq_len;
  const LayoutWriter layout(p.rows, p.pages, out, Ints());
  const SlotWriter slots(p.rows, p.pages, p.slot_mapping, p.pad_slot);

  const Covered all = walk(
      cta, p.rows.batch, out.has_lists(),
      [&](int32_t first, int32_t b) {
        RowCheck check = check_slot(p.rows, b, live);
        PageRange range;
        int32_t length = 0;
        if (check.alive) {
          range = read_pages(p.pages, check.slot);
          const int64_t cached = p.seq_lens.get_count(b);
          if (cached < 0) check.faults |= kBadCount;
          if (cached > 0) {
            const int64_t wanted = cached + step + 1;
            const int32_t allocated = count_allocated(p.pages, range, check.faults);
            if (wanted > find_capacity(p.pages, out, check.slot, allocated, wanted)) {
              check.faults |= kOverflow;
            } else {
              length = static_cast<int32_t>(wanted);
            }
          }
        }
        const LayoutRow row = layout.place(cta, first, b, check, {b, b + 1}, length, range);
        if (b < p.rows.batch && cta.writes_rows() && p.slot_mapping) {
          const int32_t t = b * p.num_steps + step;
          if (row.seq_len > 0) {
            const auto index = static_cast<uint32_t>(row.seq_len - 1);
            slots.write(cta, t, b, index, slots.load_page(row.ids + row.page_begin, index));
          } else {
            slots.pad(t);
          }
        }
        if (b < p.rows.batch && cta.writes_rows() && p.position_ids && step == 0)
          p.position_ids.set(b, max32(row.seq_len - 1, 0));
        return row;
      },
      [&](const Window& window) { layout.fill(cta, window); });
  layout.finish(cta, all);
}

}  // namespace specmeta
