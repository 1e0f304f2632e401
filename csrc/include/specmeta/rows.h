// Rows, their slots and their query tokens: the first two checks of rule 5, shared by every operation.
#pragma once

#include "specmeta/cta.h"
#include "specmeta/params.h"

namespace specmeta {

// What only the thread of a row needs of it.
struct RowCheck {
  int32_t slot = -1;
  int32_t faults = 0;
  bool alive = false;  // nothing has emptied the row yet
};

// The query tokens of a row.
struct TokenSpan {
  int32_t begin = 0;
  int32_t end = 0;

  SPECMETA_HD int32_t q() const { return end - begin; }
};

SPECMETA_HD int32_t live_rows(const Rows& rows) {
  return static_cast<int32_t>(clamp64(rows.num_rows ? load(rows.num_rows) : rows.num_rows_int, 0, rows.batch));
}

// The slot of row b as it stands there.
SPECMETA_HD int32_t slot_of(const Ints& row_to_slot, int32_t b) {
  return row_to_slot ? saturate32(row_to_slot.get(b)) : b;
}

// The slot of row b. Rows past the last live one, and those with slot -1, are empty without a fault. Faults of a row
// whose slot doesn't exist are reported behind the last slot.
SPECMETA_HD RowCheck check_slot(const Rows& rows, int32_t b, int32_t live) {
  RowCheck check;
  const int32_t slot = b < rows.batch ? slot_of(rows.row_to_slot, b) : -1;
  if (b >= live) return check;
  check.alive = slot >= 0 && (slot < rows.slots || rows.slots == kUnknownSize);
  check.slot = check.alive ? slot : rows.slots;
  if (!check.alive && slot != -1) check.faults |= kBadSlot;
  return check;
}

template <class Cta>
SPECMETA_HD void report(Cta& cta, const Rows& rows, const RowCheck& check) {
  if (rows.status && check.faults) cta.atomic_or(rows.status + check.slot, check.faults);
}

// The last i < n with begin(i) <= x, where begin is nondecreasing and begin(0) <= x.
template <class Begin>
SPECMETA_HD int32_t find_owner(int32_t n, int32_t x, Begin begin) {
  int32_t lo = 0;
  while (n > 1) {
    const int32_t half = n >> 1;
    if (begin(lo + half) <= x) lo += half;
    n -= half;
  }
  return lo;
}

// Whether a pair of cu_seqlens_q, of which there are `tokens`, cannot be.
SPECMETA_HD bool is_bad(const TokenSpan& span, int32_t tokens) {
  return span.begin < 0 || span.end < span.begin || span.end > tokens;
}

// The tokens of row b as they stand in cu_seqlens_q; rows past the last live one have none, where that one ends.
SPECMETA_HD TokenSpan read_span(const Rows& rows, int32_t b, int32_t live) {
  const int32_t* cu = rows.cu_seqlens_q;
  const int32_t begin = min32(b, live), end = min32(b + 1, live);
  if (!cu) return {begin, end};
  if (live == 0 || b >= rows.batch) return {};
  return {load(cu + begin), load(cu + end)};
}

// Finds the tokens of row b, of which `span` is what was read. Rows with tokens are a prefix of the batch, which ends
// at the last live row or at the first bad pair of cu_seqlens_q; those behind have none, where that prefix ends. Called
// by every thread of a tile.
template <class Cta>
SPECMETA_HD TokenSpan locate(Cta& cta, const Rows& rows, int32_t b, int32_t live, TokenSpan span, RowCheck& check) {
  const int32_t* cu = rows.cu_seqlens_q;
  if (!cu) return span;
  const bool bad = b < live && is_bad(span, rows.tokens);
  const bool is_broken_here = cta.any(bad);
  const bool is_broken_before = cta.sum_before(kTokens, is_broken_here) > 0;
  if (!is_broken_here && !is_broken_before) return span;

  int32_t first_bad = 0;
  int32_t end = 0;
  if (is_broken_before) {
    end = static_cast<int32_t>(cta.heed(kTokensEnd));
  } else {
    first_bad = cta.min(bad ? b : INT32_MAX);
    if (first_bad > 0) end = load(cu + first_bad);  // where the row before it ends, which is good
    cta.announce(kTokensEnd, end);
  }
  if (b >= first_bad) {
    check.alive = false;
    if (b < live) check.faults |= kBadIndptr;
    span = {end, end};
  }
  return span;
}

// The token_indices of a row without any: always those of a token, if there is one.
SPECMETA_HD int64_t padding_index(const Rows& rows, int32_t b) {
  const int32_t* cu = rows.cu_seqlens_q;
  const int32_t tokens = cu && rows.tokens == kInt32Max ? load(cu + rows.batch) : rows.tokens;
  return clamp64(cu ? load(cu + b) : b, 0, max32(tokens, 1) - 1);
}

// Gives row b its q tokens behind those of the rows before it, as far as the token buffer goes. Called by every thread
// of a tile.
template <class Cta>
SPECMETA_HD TokenSpan assign(Cta& cta, const Rows& rows, int64_t q) {
  int64_t total;
  int64_t begin = cta.exclusive_sum(q, total);
  begin += cta.sum_before(kTokens, total);
  return {static_cast<int32_t>(min64(begin, rows.tokens)), static_cast<int32_t>(min64(begin + q, rows.tokens))};
}

}  // namespace specmeta
