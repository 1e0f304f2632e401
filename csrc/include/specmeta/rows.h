// Rows, their slots and their query tokens: the first two checks of rule 5, shared by every operation.
#pragma once

#include "specmeta/params.h"

namespace specmeta {

// What only the thread of a row needs of it.
struct RowCheck {
  int64_t slot = -1;
  int64_t status_at = 0;
  int32_t faults = 0;
  bool alive = false;  // nothing has emptied the row yet
};

// The part of a tile's row that finds the owner of a token.
struct TokenSpan {
  int32_t token_begin = 0;
  int32_t token_end = 0;

  SPECMETA_HD int32_t q() const { return token_end - token_begin; }
};

SPECMETA_HD int64_t live_rows(const Rows& rows) {
  return clamp64(rows.num_rows ? rows.num_rows[0] : rows.num_rows_int, 0, rows.batch);
}

// The slot of row b. Rows past the last live one, and those with slot -1, are empty without a fault.
SPECMETA_HD RowCheck check_slot(const Rows& rows, int64_t b, int64_t live) {
  RowCheck check;
  if (b >= live) return check;
  check.slot = rows.row_to_slot ? rows.row_to_slot.get(b) : b;
  check.alive = check.slot >= 0 && (check.slot < rows.slots || rows.slots == kUnknownSize);
  check.status_at = check.alive ? check.slot : rows.slots;
  if (!check.alive && check.slot != -1) check.faults |= kBadSlot;
  return check;
}

template <class Cta>
SPECMETA_HD void report(Cta& cta, const Rows& rows, const RowCheck& check) {
  if (rows.status && check.faults) cta.atomic_or(rows.status + check.status_at, check.faults);
}

// The last i < n with begin(i) <= x, where begin is nondecreasing and begin(0) <= x.
template <class Begin>
SPECMETA_HD int64_t find_owner(int64_t n, int64_t x, Begin begin) {
  int64_t lo = 0;
  while (n > 1) {
    const int64_t half = n / 2;
    if (begin(lo + half) <= x) lo += half;
    n -= half;
  }
  return lo;
}

// Which tokens belong to which row, walked tile by tile. Rows with tokens are a prefix of the batch: it ends at the
// last live row or at the first bad pair of cu_seqlens_q. For each tile locate() or assign() is called and then, once
// the tile is filled, for_tokens(); for_padding() comes after the last tile.
class TokenRanges {
 public:
  SPECMETA_HD TokenRanges(const Rows& rows, int64_t live) : rows_(rows), live_(live) {}

  // Reads the tokens of row b from cu_seqlens_q. Called by every thread.
  template <class Cta>
  SPECMETA_HD void locate(Cta& cta, int64_t first, int64_t b, RowCheck& check, TokenSpan& span) {
    owners_ = clamp64(live_ - first, 0, cta.size());
    if (!rows_.cu_seqlens_q) {
      span.token_begin = saturate32(b);
      span.token_end = saturate32(b + (b < live_));
    } else {
      bool bad = broken_;
      if (b < live_) {
        span.token_begin = rows_.cu_seqlens_q[b];
        span.token_end = rows_.cu_seqlens_q[b + 1];
        bad |= span.token_begin < 0 || span.token_end < span.token_begin || span.token_end > rows_.tokens;
      }
      int64_t num_bad;
      const int64_t bad_before = cta.exclusive_sum(bad, num_bad);
      if (num_bad > 0) {  // the same in every thread
        broken_ = true;
        bad |= bad_before > 0;
        cta.exclusive_sum(b < live_ && !bad, owners_);
        if (bad) {
          span.token_begin = span.token_end = 0;
          check.alive = false;
          if (b < live_) check.faults |= kBadIndptr;
        }
      }
    }
  }

  // Gives row b its q tokens behind those of the rows before it, as far as the token buffer goes. Called by every
  // thread.
  template <class Cta>
  SPECMETA_HD void assign(Cta& cta, int64_t first, int64_t q, TokenSpan& span) {
    owners_ = clamp64(rows_.batch - first, 0, cta.size());
    int64_t total;
    const int64_t begin = assigned_ + cta.exclusive_sum(q, total);
    assigned_ += total;
    span.token_begin = saturate32(min64(begin, rows_.tokens));
    span.token_end = saturate32(min64(begin + q, rows_.tokens));
  }

  // fn(t, row) for every token of the tile's rows, shared among the threads.
  template <class Cta, class Fn>
  SPECMETA_HD void for_tokens(Cta& cta, Fn fn) {
    if (owners_ == 0) return;
    const typename Cta::Row* tile = cta.tile();
    const int64_t begin = tile[0].token_begin;
    const int64_t end = tile[owners_ - 1].token_end;
    for (int64_t t = begin + cta.rank(); t < end; t += cta.size()) {
      const int64_t r = find_owner(owners_, t, [&](int64_t i) { return tile[i].token_begin; });
      fn(t, tile[r]);
    }
    if (!any_) begin_ = begin;
    any_ = true;
    end_ = end;
  }

  // fn(t) for every token that no tile had, once all tiles are done.
  template <class Cta, class Fn>
  SPECMETA_HD void for_padding(Cta& cta, Fn fn) const {
    for (int64_t t = cta.rank(); t < begin_; t += cta.size()) fn(t);
    for (int64_t t = end_ + cta.rank(); t < rows_.tokens; t += cta.size()) fn(t);
  }

 private:
  const Rows& rows_;
  int64_t live_;
  int64_t owners_ = 0;    // rows of this tile that have tokens
  int64_t assigned_ = 0;  // tokens that assign() has given out
  int64_t begin_ = 0;     // what for_tokens() has covered so far
  int64_t end_ = 0;
  bool any_ = false;
  bool broken_ = false;  // a bad pair was met
};

}  // namespace specmeta
