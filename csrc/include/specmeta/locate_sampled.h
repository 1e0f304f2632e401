// locate_sampled: what accept_sampled does next, from the counts of count_sampled.
//
//   nd = cu_num_draft_tokens[b] - cu_num_draft_tokens[b - 1];  a = max(num_sampled[b] - 1, 0)
//   num_rejected = nd - a;  token_indices = the row's last token, less num_rejected
#pragma once

#include "specmeta/walk.h"

namespace specmeta {

// The drafts of row b, which has q tokens.
SPECMETA_HD int32_t count_drafts(const LocateSampledParams& p, int32_t b, int32_t q, RowCheck& check) {
  const int64_t end = load(p.cu_num_draft_tokens + b);
  const int64_t drafts = b > 0 ? end - load(p.cu_num_draft_tokens + b - 1) : end;
  if (drafts < 0 || drafts > q - 1) check.faults |= kBadCount;
  return static_cast<int32_t>(clamp64(drafts, 0, q - 1));
}

template <class Cta>
SPECMETA_HD void locate_sampled(Cta& cta, const LocateSampledParams& p) {
  const int32_t live = live_rows(p.rows);
  walk(
      cta, p.rows.batch, /*has_more=*/false,
      [&](int32_t, int32_t b) {
        RowCheck check = check_slot(p.rows, b, live);
        const TokenSpan span = locate(cta, p.rows, b, live, read_span(p.rows, b, live), check);
        int32_t rejected = 0;
        int64_t index = span.end - 1;
        if (check.alive && span.q() > 0) {
          const int32_t nd = count_drafts(p, b, span.q(), check);
          const int64_t sampled = p.num_sampled.get_count(b);
          if (sampled < 0 || sampled > nd + 1) check.faults |= kBadCount;
          rejected = nd - static_cast<int32_t>(clamp64(sampled - 1, 0, nd));
          index -= rejected;
        } else if (b < p.rows.batch) {
          index = padding_index(p.rows, b);
        }
        report(cta, p.rows, check);
        if (b < p.rows.batch) {
          if (p.token_indices) store(p.token_indices + b, saturate32(index));
          if (p.num_rejected) store(p.num_rejected + b, rejected);
        }
        return BareRow();
      },
      [](const Window&) {});
}

}  // namespace specmeta
