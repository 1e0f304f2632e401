// A row of the layout, and where the KV of tokens goes.
#pragma once

#include "specmeta/pages.h"
#include "specmeta/walk.h"

namespace specmeta {

// What there is to know of a row: one sector of memory.
struct alignas(32) LayoutRow {
  int32_t token_begin = 0;
  int32_t origin = 0;   // token t stands at cache index t + origin
  int32_t seq_len = 0;  // 0: empty
  int32_t slot = 0;
  int32_t page_begin = 0;  // its places in kv_indices, where that is written; a padded row has one
  int32_t page_end = 0;
  int64_t shift = 0;  // in advance: what the row's positions move by

  SPECMETA_HD int32_t token_end() const { return seq_len - origin; }
};

// NOTE: it holds copies, and so do the loops over tokens that use it: for all that a CPU's compiler knows, a store of a
// slot may change the parameters, and it would read them anew for every token.
class SlotWriter {
 public:
  SPECMETA_HD SlotWriter(const Rows& rows, const Pages& pages, int64_t* slot_mapping, int64_t pad_slot)
      : page_table_(pages.page_table),
        alloc_pages_(pages.alloc_pages),
        alloc_indptr_(pages.alloc_indptr),
        page_size_(pages.page_size),
        slot_mapping_(slot_mapping),
        pad_slot_(pad_slot),
        status_(rows.status) {}

  // Token t of the slot s, which stands at a cache index inside the slot's pages.
  template <class Cta>
  SPECMETA_HD void write(Cta& cta, int32_t t, int32_t s, uint32_t index) const {
    if (!slot_mapping_) return;
    const uint32_t k = page_size_.div(index);
    const int64_t page = load(page_ids(page_table_, alloc_pages_, alloc_indptr_, s) + k);
    if (page < 0) {
      if (status_) cta.atomic_or(status_ + s, kBadPage);
      return pad(t);
    }
    store(slot_mapping_ + t, (page - k) * page_size_.divisor + index);  // k pages stand before it in the row
  }

  // Token t of a row of the layout.
  template <class Cta>
  SPECMETA_HD void write(Cta& cta, int32_t t, const LayoutRow& row) const {
    if (row.seq_len > 0) {
      write(cta, t, row.slot, static_cast<uint32_t>(t + row.origin));
    } else {
      pad(t);
    }
  }

  SPECMETA_HD void pad(int32_t t) const {
    if (slot_mapping_) store(slot_mapping_ + t, pad_slot_);
  }

 private:
  Table page_table_;
  const int32_t* alloc_pages_;
  const int32_t* alloc_indptr_;
  Divider page_size_;
  int64_t* slot_mapping_;
  int64_t pad_slot_;
  int32_t* status_;
};

}  // namespace specmeta
