// A Cta is a group of threads that runs one algorithm: a CUDA block, one CPU thread, or (in the C++ tests) real threads
// with a barrier. Every algorithm is written once against this interface:
//
//   kIsSerial                            whether it's one thread, whose tiles have one row
//   Row                                  what there is to know of a row (trivially copyable); kIsRepeatable: whether
//                                        a row may be placed by several Ctas
//   int32_t rank(), size()               this thread, and how many there are
//   int32_t lanes()                      unless kIsSerial: so many neighbouring threads go on together, as a warp does
//   int32_t find_owner(n, x, begin)      unless kIsSerial: as in rows.h; called by all of them, with the same arguments
//   void sync()                          a barrier that also orders memory; nothing else here does
//   bool any(x), int32_t count(x)        whether x holds for some thread, for how many; called by every thread
//   int64_t exclusive_sum(x, total&)     the sum over lower ranks, and over all; called by every thread
//   int64_t sum(x), int32_t min(x)       over all, where speed doesn't matter; called by every thread
//   Row* tile(), WalkState& walk_state() size() rows, and where the walk is; all threads share them
//   void atomic_or(int32_t*, int32_t)
//
// A batch is cut into tiles of size() rows: each thread reads the scalars of one row once, scans give every row its
// place, and then tokens and pages are shared out in equal parts (walk.h). Sizes alone decide who does it:
//
//   alone       one Cta, a tile at a time
//   replicated  many, where the batch is one tile and rows may be placed by several: each places all rows for itself,
//               and has a part of the tokens and of the pages; one writes what is by row; none waits for another
//   tiled       many, else: they agree through a workspace, and each takes a tile as long as there are any. So a tile
//               that isn't done is held by a Cta that runs, and that waits for earlier tiles only: all get on, however
//               few run at a time
//
//   int32_t block(), num_blocks()        this Cta's number, and how many there are
//   bool places_all()                    whether this Cta places all rows: not where the batch is tiled
//   bool is_replicated()
//   bool writes_rows()                   whether what is by row is this Cta's to write
//   uint64_t arrive()                    where replicated: nothing that others may replace is read any more; called by
//                                        every thread, behind a sync()
//   bool is_last(arrival)                whether all others had arrived before, so that this Cta may replace it; called
//                                        by every thread, with what arrive() has returned to it
//   int32_t tile_index()                 its tile, past the last where there is none left
//   void next_tile()                     gives it back, whose rows are placed, for another one; called by every thread
//   int64_t least_share()                less of the work isn't worth a Cta
//   int64_t sum_before(chain, x)         the sum over earlier tiles, each of which gives its x; called by every thread
//   void announce(news, x)               one tile tells all later ones
//   int64_t heed(news)                   what an earlier tile has announced, or will; called by every thread
//   void finish_tiles()                  waits until all rows are placed: the first thread may read their records then,
//                                        the others behind the next sync()
//   Row* records()                       [B], in the workspace
#pragma once

#include "specmeta/common.h"

namespace specmeta {

// The rows of a tile on a GPU: the threads of a block.
inline constexpr int32_t kTileRows = 1024;
// Less of the work isn't worth a block of a GPU.
inline constexpr int64_t kLeastShare = 4 * kTileRows;

// What sum_before() runs over, and what is announced: by the tile in which something ends.
enum Chain { kTokens, kPages, kNumChains };
enum News { kTokensEnd, kPagesEnd, kNumNews };

// What the rows of the whole batch cover.
struct Covered {
  int32_t token = 0, token_end = 0;
  int32_t page_end = 0;  // in kv_indices
};

// A run of rows in the tile, and those of their tokens and pages that this Cta writes.
struct Window {
  int32_t first = 0;      // the batch's row that stands first in the tile
  int32_t num_rows = 0;   // in the tile
  int32_t first_own = 0;  // from here on in the tile, what is by row is written here as well
  int32_t token = 0, token_end = 0;
  int32_t page = 0, page_end = 0;  // places in kv_indices
};

// NOTE: it may be read in words of any width. So what is written while others read `end` and `next` stands apart, and
// no part of it remains unwritten.
struct WalkState {
  int64_t begin = 0, end = 0;  // this Cta's share of all that the rows have, where the batch is tiled; until then empty
  int32_t next = 0;            // the first row that is still to come: of all, or of this Cta's share
  Window window;
  Covered all;
  int32_t padding = 0;
};
static_assert(sizeof(WalkState) == 2 * sizeof(int64_t) + 12 * sizeof(int32_t));

// What the threads of a Cta that isn't serial know of it.
struct GridState {
  int64_t sums[kNumChains] = {}, news[kNumNews] = {};  // where it is alone
  int32_t block = 0, tile = 0;
  bool is_last = false;
};

// A row of which nothing has to be known once it is placed.
struct alignas(32) BareRow {
  static constexpr bool kIsRepeatable = false;
  static constexpr int32_t token_begin = 0, page_begin = 0, page_end = 0;
  SPECMETA_HD static constexpr int32_t token_end() { return 0; }
};

// What a Cta without others remembers from tile to tile.
class Alone {
 public:
  SPECMETA_HD int64_t sum_before(Chain chain, int64_t x) {
    const int64_t before = sums_[chain];
    sums_[chain] += x;
    return before;
  }
  SPECMETA_HD void announce(News news, int64_t x) { news_[news] = x; }
  SPECMETA_HD int64_t heed(News news) const { return news_[news]; }

 private:
  int64_t sums_[kNumChains] = {};
  int64_t news_[kNumNews] = {};
};

// A Cta of one thread: the CPU operators.
template <class RowType>
class SerialCta {
 public:
  static constexpr bool kIsSerial = true;
  using Row = RowType;

  int32_t rank() const { return 0; }
  int32_t size() const { return 1; }
  void sync() const {}
  bool any(bool x) const { return x; }
  int32_t count(bool x) const { return x; }
  int64_t exclusive_sum(int64_t x, int64_t& total) const {
    total = x;
    return 0;
  }
  int64_t sum(int64_t x) const { return x; }
  int32_t min(int32_t x) const { return x; }
  Row* tile() { return &row_; }
  WalkState& walk_state() { return walk_; }
  void atomic_or(int32_t* at, int32_t bits) const { *at |= bits; }

  int32_t block() const { return 0; }
  int32_t num_blocks() const { return 1; }
  bool places_all() const { return true; }
  bool is_replicated() const { return false; }
  bool writes_rows() const { return true; }
  uint64_t arrive() const { return 0; }
  bool is_last(uint64_t) const { return false; }
  int64_t sum_before(Chain chain, int64_t x) { return alone_.sum_before(chain, x); }
  void announce(News news, int64_t x) { alone_.announce(news, x); }
  int64_t heed(News news) const { return alone_.heed(news); }
  int64_t least_share() const { return kLeastShare; }
  int32_t tile_index() const { return 0; }
  void next_tile() const {}
  void finish_tiles() const {}
  Row* records() const { return nullptr; }

 private:
  Row row_;
  WalkState walk_;
  Alone alone_;
};

}  // namespace specmeta
