// Allocated pages: how many a slot has, and how long its row may become.
#pragma once

#include "specmeta/rows.h"

namespace specmeta {

// What is read of a slot's pages: its part of the ragged list, or of the table how many there are.
struct PageRange {
  int32_t begin = 0;
  int32_t end = 0;
};

SPECMETA_HD PageRange read_pages(const Pages& pages, int32_t slot) {
  if (pages.page_table) return {0, pages.num_pages ? load(pages.num_pages + slot) : pages.page_table.width};
  if (pages.alloc_indptr) return {load(pages.alloc_indptr + slot), load(pages.alloc_indptr + slot + 1)};
  return {};
}

// How many pages the slot may have; without num_pages, its list may also end before, at its first negative id.
SPECMETA_HD int32_t count_allocated(const Pages& pages, const PageRange& range, int32_t& faults) {
  if (pages.page_table) {
    const int32_t width = pages.page_table.width;
    if (range.end < 0 || range.end > width) faults |= kBadCount;
    return min32(max32(range.end, 0), width);
  }
  if (pages.alloc_indptr) {
    if (range.begin >= 0 && range.end >= range.begin && range.end <= pages.num_alloc) return range.end - range.begin;
    faults |= kBadIndptr;
  }
  return 0;
}

// Where the ids of a slot begin that count_allocated() has found no fault with.
SPECMETA_HD const int32_t* first_page(const Pages& pages, const PageRange& range, int32_t slot) {
  return pages.page_table ? pages.page_table.row(slot) : pages.alloc_pages + range.begin;
}

// Pages that a length needs.
SPECMETA_HD int32_t pages_for(const Pages& pages, int32_t length) {
  return length > 0 ? static_cast<int32_t>(pages.page_size.div(static_cast<uint32_t>(length - 1))) + 1 : 0;
}

// How many ids stand before the first negative one, of n. Several loads are in flight at a time.
SPECMETA_HD int32_t count_valid(const int32_t* ids, int32_t n) {
  constexpr int kInFlight = 8;
  for (int32_t i = 0; i < n; i += kInFlight) {
    int32_t found = 0;
    SPECMETA_UNROLL
    for (int j = kInFlight - 1; j >= 0; --j) {
      if (i + j < n) found = load(ids + i + j) < 0 ? 0 : found + 1;
    }
    if (found < kInFlight) return min32(i + found, n);
  }
  return n;
}

// The longest that the row of a slot may become, which may have `count` pages. Where their list has to be searched for
// its end, only the pages that `wanted` needs are looked at: a result of `wanted` or more then means "enough".
SPECMETA_HD int64_t find_capacity(const Pages& pages, const Layout& layout, int32_t slot, int32_t count,
                                  int64_t wanted) {
  const int64_t page_size = pages.page_size.divisor;
  int64_t capacity = pages.max_seq_len;
  if (layout.block_table) capacity = min64(capacity, layout.block_table.width * page_size);
  if (pages.page_table && !pages.num_pages) {
    const int32_t needed = pages_for(pages, static_cast<int32_t>(min64(wanted, capacity)));
    const int32_t found = count_valid(pages.page_table.row(slot), min32(count, needed));
    if (found < needed) count = found;
  }
  if (pages.page_table || pages.alloc_indptr) capacity = min64(capacity, count * page_size);
  return capacity;
}

}  // namespace specmeta
