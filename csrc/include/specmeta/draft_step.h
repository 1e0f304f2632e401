// draft_step: record draft k in the ledger, and give each row the next position of the draft loop.
//
// clang-format off
//   kept = seq_lens[b] - num_rejected[b]
//   known_lens[s] + draft_index == kept + shift:  tokens[s, known_lens[s] + draft_index] = draft_tokens[b]
//                                                 num_drafts[s] = draft_index + 1;  written_lens[s] = kept
//   otherwise (the middle of a prompt):           written_lens[s] = kept - draft_index
//   unless last:  seq_lens[b] = kept + 1;  position_ids[b] += 1;  input_ids[b] = draft_tokens[b]
//                 and the layout that follows
// clang-format on
#pragma once

#include "specmeta/layout.h"

namespace specmeta {

// What is read of a row; all of it is under way before any is looked at.
struct DraftInputs {
  Fetched old_len;
  int32_t rejected = 0;
  Fetched token;
  Fetched position;
  int32_t known = 0;
  PageRange pages;
};

SPECMETA_HD DraftInputs read_row(const DraftStepParams& p, int32_t b, bool writes, const RowCheck& check) {
  DraftInputs in;
  if (check.alive) {
    if (p.tokens && writes) in.known = load(p.known_lens + check.slot);
    in.pages = read_pages(p.pages, check.slot);
  }
  if (b >= p.rows.batch) return in;
  if (p.num_rejected) in.rejected = load(p.num_rejected + b);
  in.old_len = p.seq_lens.fetch(b);
  if (p.draft_tokens && writes) in.token = p.draft_tokens.fetch(b);
  if (p.position_ids && !p.last && writes) in.position = p.position_ids.fetch(b);
  return in;
}

// The row's new length, 0 where it is empty.
SPECMETA_HD int32_t draft_row(const DraftStepParams& p, const DraftInputs& in, bool writes, RowCheck& check) {
  const int32_t s = check.slot;
  const int64_t old_len = p.seq_lens.count(in.old_len);
  if (old_len < 0) check.faults |= kBadCount;
  if (old_len <= 0) return 0;
  const int32_t allocated = count_allocated(p.pages, in.pages, check.faults);

  int64_t rejected = 0;
  if (p.num_rejected) {
    const int64_t most = min64(p.max_rejected, old_len - 1);
    if (in.rejected < 0 || in.rejected > most) check.faults |= kBadCount;
    rejected = clamp64(in.rejected, 0, most);
  }
  const int64_t kept = old_len - rejected;

  int64_t written = kept;
  if (p.tokens && writes) {
    const int64_t at = in.known + p.draft_index;
    if (at != kept + p.shift) {
      // Made in the middle of a prompt: the cache holds earlier drafts where the prompt goes on.
      written = max64(kept - p.draft_index, 0);
    } else if (at >= 0 && at < p.tokens.width) {
      p.tokens.set(s, at, p.draft_tokens.value(in.token));
      store(p.num_drafts + s, saturate32(p.draft_index + 1));
    }
  }
  if (p.written_lens && writes) store(p.written_lens + s, saturate32(written));
  if (p.last) return 0;

  if (kept + 1 > find_capacity(p.pages, p.layout, check.slot, allocated, kept + 1)) {
    check.faults |= kOverflow;
    return 0;
  }
  return static_cast<int32_t>(kept + 1);
}

template <class Cta>
SPECMETA_HD void draft_step(Cta& cta, const DraftStepParams& p) {
  const int32_t live = live_rows(p.rows);
  LayoutWriter layout(p.rows, p.pages, p.layout, p.seq_lens);
  const SlotWriter slots(p.rows, p.pages, p.layout.slot_mapping, p.layout.pad_slot);
  const Ints& positions = p.position_ids_out ? p.position_ids_out : p.position_ids;

  const Covered all = walk(
      cta, p.rows.batch, !p.last && p.layout.has_lists(),
      [&](int32_t first, int32_t b) {
        RowCheck check = check_slot(p.rows, b, live);
        const bool writes = cta.writes_rows();
        const DraftInputs in = read_row(p, b, writes, check);
        const int32_t length = check.alive ? draft_row(p, in, writes, check) : 0;
        if (p.last) {
          if (writes) report(cta, p.rows, check);
          return LayoutRow();
        }
        const auto next =
            static_cast<int32_t>(clamp64(p.position_ids.value(in.position), -1, int64_t{p.pages.max_seq_len} - 2) + 1);
        const TokenSpan span{b, b + 1};  // every row has one, an empty one too
        const LayoutRow row = layout.place(cta, first, b, check, span, length, in.pages);
        if (b < p.rows.batch && writes) {
          const bool empty = row.seq_len == 0;
          if (positions) positions.set(b, empty ? 0 : next);
          if (p.input_ids) p.input_ids.set(b, empty ? p.pad_token : p.draft_tokens.value(in.token));
          slots.write(cta, b, b, row, slots.load_page(b, row));
        }
        return row;
      },
      [&](const Window& window) { layout.fill(cta, window); },
      [&] {
        if (!p.last) layout.arrive(cta);
      });
  if (p.last) return;
  if (positions || p.input_ids || p.layout.slot_mapping) {
    for_all(cta, p.rows.batch, p.rows.tokens, [&](int32_t t) {
      if (positions) positions.set(t, 0);
      if (p.input_ids) p.input_ids.set(t, p.pad_token);
      slots.pad(t);
    });
  }
  layout.finish(cta, all);
}

}  // namespace specmeta
