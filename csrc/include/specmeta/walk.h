// The walk over a batch: every row is placed, then what the rows have, tokens and pages, is shared out in equal parts.
#pragma once

#include "specmeta/rows.h"

namespace specmeta {

// The number of i in [0, n) with item(i) <= x, where item is increasing. Called by every thread of several: each round
// divides the range by size(), so that a tile takes one.
template <class Cta, class Item>
SPECMETA_HD int32_t count_items(Cta& cta, int32_t n, int64_t x, Item item) {
  int32_t lo = 0;
  while (lo < n) {
    int log2 = 0;
    while (static_cast<uint32_t>(cta.size()) << log2 < static_cast<uint32_t>(n - lo)) ++log2;
    const uint32_t last = lo + (static_cast<uint32_t>(cta.rank() + 1) << log2) - 1;  // of this thread's part
    const bool is_counted = last < static_cast<uint32_t>(n) && item(static_cast<int32_t>(last)) <= x;
    lo += cta.count(is_counted) << log2;
    n = static_cast<int32_t>(min64(n, lo + (int64_t{1} << log2) - 1));
  }
  return lo;
}

// The window of all rows of a tile that this Cta has placed.
template <class Row>
SPECMETA_HD Window whole_window(const Row* tile, int32_t first, int32_t num_rows) {
  Window window;
  window.first = first;
  window.num_rows = num_rows;
  window.token = tile[0].token_begin;
  window.token_end = tile[num_rows - 1].token_end();
  window.page = tile[0].page_begin;
  window.page_end = tile[num_rows - 1].page_end;
  return window;
}

// Everything that rows have stands in one order: a row itself, then its tokens, then its pages; so that neither a long
// row nor many empty ones fall to one Cta. The place of row b there.
template <class Row>
SPECMETA_HD int64_t item_of(const Row& row, int32_t b, const Covered& all) {
  return int64_t{b} + (row.token_begin - all.token) + row.page_begin;
}

// A Cta's share of that order, and its first row, kept in cta.walk_state(). Called by every thread, once all rows are
// placed.
template <class Cta>
SPECMETA_HD void find_share(Cta& cta, int32_t batch) {
  using Row = typename Cta::Row;
  const Row* records = cta.records();
  WalkState& state = cta.walk_state();
  if (cta.rank() == 0) {
    const Row back = load(records + batch - 1);
    state.all = {load(records).token_begin, back.token_end(), back.page_end};
  }
  cta.sync();
  const Covered all = state.all;
  const int64_t num_items = int64_t{batch} + (all.token_end - all.token) + all.page_end;
  const int64_t size = max64(((num_items - 1) >> floor_log2(cta.num_blocks())) + 1, cta.least_share());
  const int64_t begin = cta.block() * size;
  int32_t next = batch;
  if (begin < num_items) {
    next = count_items(cta, batch, begin, [&](int32_t b) { return item_of(load(records + b), b, all); }) - 1;
  }
  if (cta.rank() == 0) {
    state.begin = begin;
    state.end = begin + size;
    state.next = next;
  }
  cta.sync();
}

// Puts the share's next rows into the tile; false: there are none. The first thread finds the window.
template <class Cta>
SPECMETA_HD bool next_window(Cta& cta, int32_t batch) {
  WalkState& state = cta.walk_state();
  const int32_t next = state.next;
  const int64_t end = state.end;
  typename Cta::Row* tile = cta.tile();
  bool is_own = false;
  if (cta.rank() < batch - next) {
    const int32_t b = next + cta.rank();
    tile[cta.rank()] = load(cta.records() + b);
    is_own = item_of(tile[cta.rank()], b, state.all) < end;
  }
  const int32_t num_rows = cta.count(is_own);
  if (num_rows == 0) return false;
  cta.sync();
  if (cta.rank() > 0) return true;

  // What is left out of the first row, and what is taken of the last one, beside the row itself.
  const auto& front = tile[0];
  const auto& back = tile[num_rows - 1];
  const int64_t before = state.begin - item_of(front, next, state.all);
  const int64_t left_out = max64(before - 1, 0);
  const int64_t taken = end - item_of(back, next + num_rows - 1, state.all) - 1;
  Window window = whole_window(tile, next, num_rows);
  window.first_own = before > 0;
  const int64_t tokens_out = min64(left_out, front.token_end() - front.token_begin);
  const int64_t tokens_in = min64(taken, back.token_end() - back.token_begin);
  window.token += static_cast<int32_t>(tokens_out);
  window.page += static_cast<int32_t>(left_out - tokens_out);
  window.token_end = back.token_begin + static_cast<int32_t>(tokens_in);
  window.page_end = static_cast<int32_t>(min64(window.page_end, back.page_begin + (taken - tokens_in)));
  state.window = window;
  state.next = next + num_rows;
  return true;
}

// The k-th of at most n parts of [begin, end), of whole sectors; an empty one inside where there are fewer.
struct Part {
  uint32_t begin = 0;
  uint32_t end = 0;
};
SPECMETA_HD Part cut(int32_t begin, int32_t end, uint32_t k, uint32_t n) {
  constexpr uint32_t kAlign = 32;  // elements
  const auto first = static_cast<uint32_t>(begin), last = static_cast<uint32_t>(end);
  if (begin >= end) return {first, first};
  const uint32_t front = first & ~(kAlign - 1);
  const uint32_t size = (((last - front - 1) >> floor_log2(n)) & ~(kAlign - 1)) + kAlign;
  const uint32_t from = front + k * size;  // n is at most kMaxBlocks: no sum here wraps
  if (from >= last) return {first, first};
  return {from > first ? from : first, from + size < last ? from + size : last};
}

// Leaves the k-th of at most n parts of a window's tokens, and of its pages.
SPECMETA_HD void take_part(Window& window, uint32_t k, uint32_t n) {
  const Part tokens = cut(window.token, window.token_end, k, n);
  const Part pages = cut(window.page, window.page_end, k, n);
  window.token = static_cast<int32_t>(tokens.begin);
  window.token_end = static_cast<int32_t>(tokens.end);
  window.page = static_cast<int32_t>(pages.begin);
  window.page_end = static_cast<int32_t>(pages.end);
}

// place(first, b)  what there is to know of row b; writes what is by row. Called by every thread, tile after tile, of
//                  which `first` is the first row.
// fill(window)     writes a window's tokens and pages; called by every thread, which share them.
// arrive()         where the batch is replicated: called by every thread, behind a sync(), once all rows are placed.
// Returns what the rows cover. `has_more`: whether there is anything to fill.
template <class Cta, class Place, class Fill, class Arrive>
SPECMETA_HD Covered walk(Cta& cta, int32_t batch, bool has_more, Place place, Fill fill, Arrive arrive) {
  auto* tile = cta.tile();
  if constexpr (Cta::kIsSerial) {  // a row, then what it has
    Covered all;
    for (int32_t b = 0; b < batch; ++b) {
      const auto row = place(b, b);
      if (b == 0) all.token = row.token_begin;
      all.token_end = row.token_end();
      all.page_end = row.page_end;
      if (!has_more) continue;
      tile[0] = row;
      fill(whole_window(&row, b, 1));
    }
    return all;
  }
  const bool places_all = cta.places_all();
  WalkState& state = cta.walk_state();
  // A turn a tile; where the batch is tiled, a turn for each tile that the Cta takes, and then one for each window of
  // its share. NOTE: one loop for both, since place() and fill() are large, and compiled where they are called. What it
  // remembers from turn to turn is in cta.walk_state(), for the same reason: registers are few.
  SPECMETA_NO_UNROLL
  while (true) {
    if (state.end == 0) {
      // NOTE: it doesn't wrap past the last tile either.
      const uint32_t at = places_all ? state.next : static_cast<uint32_t>(cta.tile_index()) * cta.size();
      if (at < static_cast<uint32_t>(batch)) {
        const auto first = static_cast<int32_t>(at);
        const uint32_t row_number = at + cta.rank();
        const auto b = static_cast<int32_t>(row_number < INT32_MAX - 1 ? row_number : INT32_MAX - 1);
        const auto row = place(first, b);
        if (!places_all) {
          if (has_more && b < batch) store(cta.records() + b, row);
          cta.next_tile();
          continue;
        }
        tile[cta.rank()] = row;
        cta.sync();
        if (cta.rank() == 0) {
          const int32_t num_rows = min32(cta.size(), batch - first);
          state.window = whole_window(tile, first, num_rows);
          if (first == 0) state.all.token = state.window.token;
          state.all.token_end = state.window.token_end;
          state.all.page_end = state.window.page_end;
          state.next = first + num_rows;
          if (cta.is_replicated()) take_part(state.window, cta.block(), cta.num_blocks());
        }
      } else {
        if (places_all || !has_more || batch == 0) break;
        cta.finish_tiles();
        find_share(cta, batch);
        continue;
      }
    } else if (!next_window(cta, batch)) {
      break;
    }
    cta.sync();
    if (cta.is_replicated()) arrive();
    if (has_more) fill(state.window);
    if (cta.is_replicated()) break;
    cta.sync();  // the tile is read until here
  }
  return state.all;
}

template <class Cta, class Place, class Fill>
SPECMETA_HD Covered walk(Cta& cta, int32_t batch, bool has_more, Place place, Fill fill) {
  return walk(cta, batch, has_more, place, fill, [] {});
}

// fn(i) for begin <= i < end, shared among all threads of all Ctas.
template <class Cta, class Fn>
SPECMETA_HD void for_all(Cta& cta, int32_t begin, int32_t end, Fn fn) {
  if (begin >= end) return;
  const uint32_t step = cta.num_blocks() * cta.size();  // far below 2^31, so that no sum here wraps
  const auto stop = static_cast<uint32_t>(end);
  SPECMETA_NO_UNROLL
  for (uint32_t i = static_cast<uint32_t>(begin) + cta.block() * cta.size() + cta.rank(); i < stop; i += step) {
    fn(static_cast<int32_t>(i));
  }
}

// What is done for each token t of a row b: store(t, row, b, load(t, row)).
template <class Load, class Store>
struct TokenCopy {
  Load load;
  Store store;
};
template <class Load, class Store>
TokenCopy(Load, Store) -> TokenCopy<Load, Store>;

// Every load is under way before the first store, since a compiler keeps the order of those that may overlap.
template <class Row>
SPECMETA_HD void copy_token(int32_t, const Row&, int32_t) {}
template <class Row, class Copy, class... Copies>
SPECMETA_HD void copy_token(int32_t t, const Row& row, int32_t b, const Copy& copy, const Copies&... others) {
  const auto value = copy.load(t, row);
  copy_token(t, row, b, others...);
  copy.store(t, row, b, value);
}

// Each copy for a window's tokens, shared among the threads.
template <class Cta, class... Copies>
SPECMETA_HD void for_tokens(Cta& cta, const Window& window, Copies... copies) {
  const typename Cta::Row* tile = cta.tile();
  if constexpr (Cta::kIsSerial) {  // a loop for each: a CPU has few registers
    const auto& row = tile[0];
    const int32_t begin = window.token, end = window.token_end;
    const auto loop = [&](auto copy) {
      for (int32_t t = begin; t < end; ++t) copy.store(t, row, window.first, copy.load(t, row));
    };
    (loop(copies), ...);
    return;
  }
  SPECMETA_NO_UNROLL
  for (uint32_t i = static_cast<uint32_t>(window.token) + cta.rank(); i < static_cast<uint32_t>(window.token_end);
       i += cta.size()) {
    const auto t = static_cast<int32_t>(i);
    const int32_t r = find_owner(window.num_rows, t, [&](int32_t k) { return tile[k].token_begin; });
    copy_token(t, tile[r], window.first + r, copies...);
  }
}

// For every token that no row has.
template <class Cta, class Fn>
SPECMETA_HD void for_padding(Cta& cta, const Rows& rows, const Covered& all, Fn fn) {
  for_all(cta, 0, all.token, fn);
  for_all(cta, all.token_end, rows.tokens, fn);
}

// For i = begin, begin + step, ...: store(i, load(i)). Several loads are in flight before the first store, since a
// compiler keeps the order of loads and stores that may overlap.
template <class Load, class Store>
SPECMETA_HD void copy_batched(uint32_t begin, uint32_t end, uint32_t step, Load load_one, Store store_one) {
  constexpr int kInFlight = 4;
  SPECMETA_NO_UNROLL
  for (uint32_t i = begin; i < end; i += kInFlight * step) {
    int32_t values[kInFlight];
    SPECMETA_UNROLL
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * step < end) values[j] = load_one(i + j * step);
    }
    SPECMETA_UNROLL
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * step < end) store_one(i + j * step, values[j]);
    }
  }
}

}  // namespace specmeta
