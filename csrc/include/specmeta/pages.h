// Allocated pages: how many a slot has, and how long its row may become.
#pragma once

#include "specmeta/rows.h"

namespace specmeta {

struct Allocation {
  const int32_t* ids = nullptr;
  int32_t count = 0;    // pages that may be used
  bool search = false;  // the allocation also ends at its first negative id
};

SPECMETA_HD Allocation find_allocation(const Pages& pages, RowCheck& check) {
  Allocation found;
  const int32_t s = check.slot;
  if (pages.page_table) {
    found.ids = pages.page_table.row(s);
    found.count = pages.page_table.width;
    found.search = pages.num_pages == nullptr;
    if (pages.num_pages) {
      const int32_t n = load(pages.num_pages + s);
      if (n < 0 || n > found.count) check.faults |= kBadCount;
      found.count = min32(max32(n, 0), found.count);
    }
  } else if (pages.alloc_indptr) {
    const int32_t begin = load(pages.alloc_indptr + s);
    const int32_t end = load(pages.alloc_indptr + s + 1);
    if (begin < 0 || end < begin || end > pages.num_alloc) {
      check.faults |= kBadIndptr;
    } else {
      found.ids = pages.alloc_pages + begin;
      found.count = end - begin;
    }
  }
  return found;
}

// The pages of a slot that find_allocation() has found no fault with.
SPECMETA_HD const int32_t* page_ids(const Pages& pages, int32_t slot) {
  if (pages.alloc_indptr) return pages.alloc_pages + load(pages.alloc_indptr + slot);
  return pages.page_table.row(slot);
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

// The longest that the row may become. Where the allocation has to be searched, only the pages that `wanted` needs are
// looked at: a result of `wanted` or more then means "enough".
SPECMETA_HD int64_t find_capacity(const Pages& pages, const Layout& layout, const Allocation& allocation,
                                  int64_t wanted) {
  const int64_t page_size = pages.page_size.divisor;
  int64_t capacity = pages.max_seq_len;
  if (layout.block_table) capacity = min64(capacity, layout.block_table.width * page_size);
  if (pages.page_table || pages.alloc_indptr) {
    int64_t count = allocation.count;
    if (allocation.search) {
      const int32_t needed = pages_for(pages, static_cast<int32_t>(min64(wanted, capacity)));
      const int32_t found = count_valid(allocation.ids, min32(allocation.count, needed));
      if (found < needed) count = found;
    }
    capacity = min64(capacity, count * page_size);
  }
  return capacity;
}

}  // namespace specmeta
