// keep_last: each row keeps the last of its query tokens, and is a row of one token from then on.
//
//   input_ids[b] = input_ids[cu_seqlens_q[b + 1] - 1];  position_ids[b] = cached_lens[b] = seq_lens[b] - 1
//   cu_seqlens_q[b] = min(b, live rows);  query_lens[b] = 1
//
// All of it in place, and so by one Cta: a token is read before another row's takes its place.
#pragma once

#include "specmeta/walk.h"

namespace specmeta {

struct KeptRow {
  int32_t from = -1;  // its last token; -1: the row is empty
  int32_t length = 0;
  int32_t faults = 0;
};

// `trusted`: rows before the first bad pair of cu_seqlens_q.
SPECMETA_HD KeptRow read_row(const KeepLastParams& p, int32_t b, int32_t trusted, int32_t live) {
  KeptRow row;
  if (b >= live) return row;
  if (b >= trusted) {
    row.faults = kBadIndptr;
    return row;
  }
  const TokenSpan span{load(p.cu_seqlens_q + b), load(p.cu_seqlens_q + b + 1)};
  const int64_t length = p.seq_lens.get_count(b);
  if (length < 0) {
    row.faults = kBadCount;
  } else if (length > kInt32Max) {
    row.faults = kOverflow;
  } else if (length > 0 && length < span.q()) {
    row.faults = kUnderflow;
  } else if (length > 0 && span.q() > 0) {
    row.from = span.end - 1;
    row.length = static_cast<int32_t>(length);
  }
  return row;
}

// For each tile's rows for which wanted(row, b) holds: their token, to its place. Called by every thread.
template <class Cta, class Wanted>
SPECMETA_HD void move_tokens(Cta& cta, const KeepLastParams& p, int32_t trusted, int32_t live, bool backwards,
                             Wanted wanted) {
  const int32_t size = cta.size();
  SPECMETA_NO_UNROLL
  for (int64_t done = 0; done < trusted; done += size) {
    const int64_t b = (backwards ? trusted - size - done : done) + cta.rank();
    int64_t id = 0;
    bool is_wanted = false;
    if (b >= 0 && b < trusted) {
      const KeptRow row = read_row(p, static_cast<int32_t>(b), trusted, live);
      is_wanted = row.from >= 0 && wanted(row, b);
      if (is_wanted) id = p.input_ids.get(row.from);
    }
    cta.sync();
    if (is_wanted) p.input_ids.set(b, id);
  }
}

template <class Cta>
SPECMETA_HD void keep_last(Cta& cta, const KeepLastParams& p) {
  const int32_t live = live_rows(p.rows);
  int32_t first_bad = live;
  SPECMETA_NO_UNROLL
  for (int32_t b = cta.rank(); b < live; b += cta.size()) {
    if (is_bad({load(p.cu_seqlens_q + b), load(p.cu_seqlens_q + b + 1)}, p.rows.tokens))
      first_bad = min32(first_bad, b);
  }
  const int32_t trusted = cta.min(first_bad);

  // Last tokens stand in the order of their rows. So where each moves to the left, or not at all, no row overwrites
  // what one behind it still has to read. Rows that move to the right, since empty ones stand before them, go the other
  // way.
  // The passes share no element, and have read everything when they return.
  if (p.input_ids) {
    move_tokens(cta, p, trusted, live, /*backwards=*/false,
                [](const KeptRow& row, int64_t b) { return row.from >= b; });
    move_tokens(cta, p, trusted, live, /*backwards=*/true, [](const KeptRow& row, int64_t b) { return row.from < b; });
  }

  for_all(cta, 0, p.rows.batch, [&](int32_t b) {
    const KeptRow row = read_row(p, b, trusted, live);
    const int32_t cached = max32(row.length - 1, 0);
    if (p.rows.status && row.faults) cta.atomic_or(p.rows.status + b, row.faults);
    if (p.input_ids && row.from < 0) p.input_ids.set(b, p.pad_token);
    if (p.position_ids) p.position_ids.set(b, cached);
    if (p.query_lens) store(p.query_lens + b, int32_t{b < live});
    if (p.cached_lens) store(p.cached_lens + b, cached);
    if (p.use_initial_states) store(p.use_initial_states + b, static_cast<uint8_t>(cached > 0));
    p.seq_lens.set(b, row.length);
  });
  if (p.input_ids || p.position_ids) {
    for_all(cta, p.rows.batch, p.rows.tokens, [&](int32_t t) {
      if (p.input_ids) p.input_ids.set(t, p.pad_token);
      if (p.position_ids) p.position_ids.set(t, 0);
    });
  }
  cta.sync();
  for_all(cta, 0, p.rows.batch + 1, [&](int32_t b) { store(p.cu_seqlens_q + b, min32(b, live)); });
}

}  // namespace specmeta
