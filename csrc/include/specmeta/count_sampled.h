// count_sampled: what accept_sampled does first, for engines that learn a row's query tokens later.
//
//   v = leading ids of sampled_tokens[b, :] inside the vocabulary;  0 where discarded[b]
//   num_sampled = v;  next_tokens = the last of them, or backup_tokens[b]
#pragma once

#include "specmeta/rows.h"
#include "specmeta/sampled.h"
#include "specmeta/walk.h"

namespace specmeta {

template <class Cta>
SPECMETA_HD void count_sampled(Cta& cta, const CountSampledParams& p) {
  const int32_t live = live_rows(p.rows);
  for_all(cta, 0, p.rows.batch, [&](int32_t b) {
    RowCheck check = check_slot(p.rows, b, live);
    int32_t sampled = 0;
    int64_t next = p.pad_token;
    if (check.alive) {
      const bool is_discarded = p.discarded && load(p.discarded + b) != 0;
      if (!is_discarded) sampled = count_ids(p.sampled_tokens, p.vocab_size, b, p.sampled_tokens.width, next);
      if (sampled == 0) {
        const int64_t backup = p.backup_tokens ? p.backup_tokens.get(b) : -1;
        if (is_id(backup, p.vocab_size)) {
          next = backup;
        } else if (!is_discarded) {
          check.faults |= kBadCount;
        }
      }
    }
    report(cta, p.rows, check);
    if (p.num_sampled) p.num_sampled.set(b, sampled);
    if (p.next_tokens) p.next_tokens.set(b, next);
  });
}

}  // namespace specmeta
