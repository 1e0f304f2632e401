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

// What is read of a row; all of it is under way before any is looked at.
struct StageInputs {
  int32_t committed = 0;
  int32_t limit = INT32_MAX;
  int32_t asked = INT32_MAX;
  int32_t known = 0;
  int32_t drafts = 0;
  PageRange pages;
};

SPECMETA_HD StageInputs read_row(const StageParams& p, int32_t b, const RowCheck& check) {
  StageInputs in;
  if (p.query_lens && b < p.rows.batch) in.asked = load(p.query_lens + b);
  if (!check.alive) return in;
  const int32_t s = check.slot;
  in.committed = load(p.committed_lens + s);
  if (p.limit_lens) in.limit = load(p.limit_lens + s);
  if (p.known_lens) in.known = load(p.known_lens + s);
  if (p.num_drafts) in.drafts = load(p.num_drafts + s);
  in.pages = read_pages(p.pages, s);
  return in;
}

SPECMETA_HD StagePlan stage_row(const StageParams& p, const StageInputs& in, RowCheck& check) {
  StagePlan plan;
  const int64_t cached = min32(in.committed, in.limit);
  if (cached < 0 || in.asked < 0 || in.drafts < 0) {
    check.faults |= kBadCount;
    return plan;
  }
  const int32_t allocated = count_allocated(p.pages, in.pages, check.faults);

  int64_t q = p.query_lens ? in.asked : kCountLimit;
  if (p.known_lens) {
    plan.certain = static_cast<int32_t>(max64(in.known - cached, 0));
    q = min64(q, max64(in.known - cached + in.drafts, 0));
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
  const LayoutWriter layout(p.rows, p.pages, p.layout, Ints());
  const SlotWriter slots(p.rows, p.pages, p.layout.slot_mapping, p.layout.pad_slot);
  const bool by_token = p.position_ids || p.input_ids || p.layout.slot_mapping;

  const Covered all = walk(
      cta, p.rows.batch, by_token || p.layout.has_lists(),
      [&](int32_t first, int32_t b) {
        RowCheck check = check_slot(p.rows, b, live);
        const StageInputs in = read_row(p, b, check);
        StagePlan plan;
        if (check.alive) plan = stage_row(p, in, check);
        const TokenSpan span = assign(cta, p.rows, plan.q);
        if (span.q() < plan.q) check.faults |= kOverflow;
        LayoutRow row = layout.place(cta, first, b, check, span, span.q() > 0 ? plan.cached + span.q() : 0, in.pages);
        row.own = check.slot;
        if (b < p.rows.batch && cta.writes_rows()) {
          if (p.cu_seqlens_q) store(p.cu_seqlens_q + b + 1, span.end);
          if (p.num_draft_tokens) {
            store(p.num_draft_tokens + b, row.seq_len > 0 ? max32(span.q() - plan.certain, 0) : 0);
          }
        }
        return row;
      },
      [&](const Window& window) {
        if (by_token) {
          for_tokens(cta, window, SlotCopy<Cta>{cta, slots},
                     TokenCopy{[](int32_t t, const LayoutRow& row) { return row.seq_len > 0 ? t + row.origin : 0; },
                               [positions = p.position_ids](int32_t t, const LayoutRow&, int32_t, int32_t position) {
                                 if (positions) positions.set(t, position);
                               }},
                     TokenCopy{[has_ids = static_cast<bool>(p.input_ids), tokens = p.tokens, pad_token = p.pad_token](
                                   int32_t t, const LayoutRow& row) {
                                 return has_ids && row.seq_len > 0 ? tokens.get(row.own, t + row.origin) : pad_token;
                               },
                               [ids = p.input_ids](int32_t t, const LayoutRow&, int32_t, int64_t id) {
                                 if (ids) ids.set(t, id);
                               }});
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
