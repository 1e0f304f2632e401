// stage: the rows of a step, from the state by slot; the first node of an iteration.
//
//   c = committed_lens[s]                              (at most limit_lens[s])
//   q = query_lens[b], at most known_lens[s] - c + num_drafts[s], at most the room in pages, ledger and token buffer
//   cu_seqlens_q = running sum of q;  seq_lens = c + q;  position_ids = c + j;  input_ids = tokens[s, c + j]
//   and the layout that follows from the lengths
#pragma once

#include "specmeta/layout.h"

namespace specmeta {

struct StagePlan {
  int32_t cached = 0;   // c
  int32_t q = 0;        // before the cut at the token buffer
  int32_t certain = 0;  // query tokens that are no drafts
};

SPECMETA_HD int64_t shorten(int64_t q, int64_t room, RowCheck& check) {
  room = max64(room, 0);
  if (q <= room) return q;
  check.faults |= kOverflow;
  return room;
}

SPECMETA_HD StagePlan stage_row(const StageParams& p, int32_t b, RowCheck& check) {
  const int32_t s = check.slot;
  StagePlan plan;
  int64_t cached = load(p.committed_lens + s);
  if (p.limit_lens) cached = min64(cached, load(p.limit_lens + s));
  const int64_t asked = p.query_lens ? load(p.query_lens + b) : kCountLimit;
  const int64_t drafts = p.num_drafts ? load(p.num_drafts + s) : 0;
  if (cached < 0 || asked < 0 || drafts < 0) {
    check.faults |= kBadCount;
    return plan;
  }
  const int32_t allocated = count_allocated(p.pages, check);

  int64_t q = asked;
  if (p.known_lens) {
    const int64_t known = load(p.known_lens + s);
    plan.certain = static_cast<int32_t>(max64(known - cached, 0));
    q = min64(q, max64(known - cached + drafts, 0));
  }
  q = shorten(q, find_capacity(p.pages, p.layout, check.slot, allocated, cached + q) - cached, check);
  if (p.tokens) q = shorten(q, p.tokens.width - cached, check);
  plan.cached = static_cast<int32_t>(cached);
  plan.q = static_cast<int32_t>(q);
  return plan;
}

template <class Cta>
SPECMETA_HD void stage(Cta& cta, const StageParams& p) {
  const int32_t live = live_rows(p.rows);
  const LayoutWriter layout(p.rows, p.pages, p.layout);
  const SlotWriter slots(p.rows, p.pages, p.layout.slot_mapping, p.layout.pad_slot);
  const bool by_token = p.position_ids || p.input_ids || p.layout.slot_mapping;

  const Covered all = walk(
      cta, p.rows.batch, by_token || p.layout.has_lists(),
      [&](int32_t first, int32_t b) {
        RowCheck check = check_slot(p.rows, b, live);
        StagePlan plan;
        if (check.alive) plan = stage_row(p, b, check);
        const TokenSpan span = assign(cta, p.rows, plan.q);
        if (span.q() < plan.q) check.faults |= kOverflow;
        const LayoutRow row = layout.place(cta, first, b, check, span, span.q() > 0 ? plan.cached + span.q() : 0);
        if (b < p.rows.batch) {
          if (p.cu_seqlens_q) store(p.cu_seqlens_q + b + 1, span.end);
          if (p.num_draft_tokens) {
            store(p.num_draft_tokens + b, row.seq_len > 0 ? max32(span.q() - plan.certain, 0) : 0);
          }
        }
        return row;
      },
      [&](const Window& window) {
        if (by_token) {
          for_tokens(
              cta, window,
              [positions = p.position_ids](int32_t t, const LayoutRow& row) {
                if (positions) positions.set(t, row.seq_len > 0 ? t + row.origin : 0);
              },
              [ids = p.input_ids, tokens = p.tokens, pad_token = p.pad_token](int32_t t, const LayoutRow& row) {
                if (ids) ids.set(t, row.seq_len > 0 ? tokens.get(row.slot, t + row.origin) : pad_token);
              },
              [&cta, slots](int32_t t, const LayoutRow& row) { slots.write(cta, t, row); });
        }
        layout.fill(cta, window);
      });
  if (p.cu_seqlens_q && cta.block() == 0 && cta.rank() == 0) store(p.cu_seqlens_q, 0);
  if (by_token) {
    for_padding(cta, p.rows, all, [&](int32_t t) {
      if (p.position_ids) p.position_ids.set(t, 0);
      if (p.input_ids) p.input_ids.set(t, p.pad_token);
      slots.pad(t);
    });
  }
  layout.finish(cta, all);
}

}  // namespace specmeta
