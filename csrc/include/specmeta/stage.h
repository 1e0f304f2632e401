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
  int64_t cached = 0;   // c
  int64_t q = 0;        // before the cut at the token buffer
  int64_t certain = 0;  // query tokens that are no drafts
};

SPECMETA_HD int64_t shorten(int64_t q, int64_t room, RowCheck& check) {
  room = max64(room, 0);
  if (q <= room) return q;
  check.faults |= kOverflow;
  return room;
}

SPECMETA_HD StagePlan stage_row(const StageParams& p, int64_t b, RowCheck& check, LayoutRow& row) {
  const int64_t s = check.slot;
  StagePlan plan;
  int64_t cached = p.committed_lens[s];
  if (p.limit_lens) cached = min64(cached, p.limit_lens[s]);
  const int64_t asked = p.query_lens ? p.query_lens[b] : kCountLimit;
  const int64_t drafts = p.num_drafts ? p.num_drafts[s] : 0;
  if (cached < 0 || asked < 0 || drafts < 0) {
    check.faults |= kBadCount;
    return plan;
  }
  const Allocation allocation = find_allocation(p.pages, check);
  row.pages = allocation.ids;

  int64_t q = asked;
  if (p.known_lens) {
    plan.certain = max64(p.known_lens[s] - cached, 0);
    q = min64(q, max64(p.known_lens[s] - cached + drafts, 0));
  }
  q = shorten(q, find_capacity(p.pages, p.layout, allocation, cached + q) - cached, check);
  if (p.tokens) q = shorten(q, p.tokens.width - cached, check);
  plan.cached = cached;
  plan.q = q;
  return plan;
}

template <class Cta>
SPECMETA_HD void stage(Cta& cta, const StageParams& p) {
  const int64_t live = live_rows(p.rows);
  TokenRanges ranges(p.rows, live);
  LayoutWriter layout(p.rows, p.pages, p.layout);
  const bool by_token = p.position_ids || p.input_ids || p.layout.slot_mapping;

  for (int64_t first = 0; first < p.rows.batch; first += cta.size()) {
    const int64_t b = first + cta.rank();
    RowCheck check = check_slot(p.rows, b, live);
    LayoutRow row;
    StagePlan plan;
    if (check.alive) plan = stage_row(p, b, check, row);
    ranges.assign(cta, first, plan.q, row);
    if (row.q() < plan.q) check.faults |= kOverflow;
    row.seq_len = row.q() > 0 ? static_cast<int32_t>(plan.cached + row.q()) : 0;
    row.slot = saturate32(check.slot);
    layout.place(cta, first, b, check, row);
    if (b < p.rows.batch) {
      if (p.cu_seqlens_q) p.cu_seqlens_q[b + 1] = row.token_end;
      if (p.num_draft_tokens) {
        p.num_draft_tokens[b] = row.seq_len > 0 ? static_cast<int32_t>(max64(row.q() - plan.certain, 0)) : 0;
      }
    }
    if (by_token) {
      ranges.for_tokens(cta, [&](int64_t t, const LayoutRow& r) {
        const bool empty = r.seq_len == 0;
        const int64_t index = r.cache_index(t);
        if (p.position_ids) p.position_ids.set(t, empty ? 0 : index);
        if (p.input_ids) p.input_ids.set(t, empty ? p.pad_token : p.tokens.get(r.slot, index));
        layout.write_slot(cta, t, r);
      });
    }
    layout.write_pages(cta, first);
    cta.sync();  // the tile is read until here
  }
  if (p.cu_seqlens_q && cta.rank() == 0) p.cu_seqlens_q[0] = 0;
  if (by_token) {
    ranges.for_padding(cta, [&](int64_t t) {
      if (p.position_ids) p.position_ids.set(t, 0);
      if (p.input_ids) p.input_ids.set(t, p.pad_token);
      layout.pad_slot(t);
    });
  }
  layout.finish(cta);
}

}  // namespace specmeta
