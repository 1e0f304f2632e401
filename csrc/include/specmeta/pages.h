// Allocated pages: how many a slot has, and how long its row may become.
#pragma once

#include "specmeta/rows.h"

namespace specmeta {

struct Allocation {
  const int32_t* ids = nullptr;
  int64_t count = 0;    // pages that may be used
  bool search = false;  // the allocation also ends at its first negative id
};

SPECMETA_HD Allocation find_allocation(const Pages& pages, RowCheck& check) {
  Allocation found;
  const int64_t s = check.slot;
  if (pages.page_table) {
    found.ids = pages.page_table.row(s);
    found.count = pages.page_table.width;
    found.search = pages.num_pages == nullptr;
    if (pages.num_pages) {
      const int64_t n = pages.num_pages[s];
      if (n < 0 || n > found.count) check.faults |= kBadCount;
      found.count = clamp64(n, 0, found.count);
    }
  } else if (pages.alloc_indptr) {
    const int64_t begin = pages.alloc_indptr[s];
    const int64_t end = pages.alloc_indptr[s + 1];
    if (begin < 0 || end < begin || end > pages.num_alloc) {
      check.faults |= kBadIndptr;
    } else {
      found.ids = pages.alloc_pages + begin;
      found.count = end - begin;
    }
  }
  return found;
}

// Pages that a length needs.
SPECMETA_HD int64_t pages_for(const Pages& pages, int64_t length) {
  return length > 0 ? int64_t{pages.page_size.div(static_cast<uint32_t>(length - 1))} + 1 : 0;
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
      const int64_t needed = min64(count, pages_for(pages, min64(wanted, capacity)));
      int64_t i = 0;
      while (i < needed && allocation.ids[i] >= 0) ++i;
      if (i < needed) count = i;
    }
    capacity = min64(capacity, count * page_size);
  }
  return capacity;
}

}  // namespace specmeta
