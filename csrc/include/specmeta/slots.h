// A row of the layout, and where the KV of tokens goes.
#pragma once

#include "specmeta/pages.h"
#include "specmeta/walk.h"

namespace specmeta {

// What whoever writes a row's pages reads of it, at once.
struct alignas(16) RowPages {
  int32_t page_end = 0;          // behind its places in kv_indices
  int32_t seq_len = 0;           // 0: empty
  const int32_t* ids = nullptr;  // kv_indices[i] is ids[i]
};

// What there is to know of a row: one sector of memory.
struct alignas(32) LayoutRow : RowPages {
  static constexpr bool kIsRepeatable = true;

  int32_t token_begin = 0;
  int32_t origin = 0;      // token t stands at cache index t + origin
  int32_t own = 0;         // the operation's: of advance, what positions move by; of stage, the slot
  int32_t page_begin = 0;  // its places in kv_indices, where that is written; a padded row has one

  SPECMETA_HD int32_t token_end() const { return seq_len - origin; }
};

// NOTE: it holds copies, and so do the loops over tokens that use it: for all that a CPU's compiler knows, a store of a
// slot may change the parameters, and it would read them anew for every token.
class SlotWriter {
 public:
  SPECMETA_HD SlotWriter(const Rows& rows, const Pages& pages, int64_t* slot_mapping, int64_t pad_slot)
      : page_size_(pages.page_size),
        slot_mapping_(slot_mapping),
        pad_slot_(pad_slot),
        row_to_slot_(rows.row_to_slot),
        status_(rows.status) {}

  // The page of a cache index inside the pages whose ids begin at `ids`.
  SPECMETA_HD int32_t load_page(const int32_t* ids, uint32_t index) const {
    return slot_mapping_ ? load(to_tensor(ids + page_size_.div(index))) : 0;
  }
  // Token t of row b, which stands at that index in that page.
  template <class Cta>
  SPECMETA_HD void write(Cta& cta, int32_t t, int32_t b, uint32_t index, int64_t page) const {
    if (!slot_mapping_) return;
    if (__builtin_expect(page < 0, false)) {
      if (status_) cta.atomic_or(status_ + slot_of(row_to_slot_, b), kBadPage);
      return pad(t);
    }
    // So many pages stand before it in the row.
    store(slot_mapping_ + t, (page - page_size_.div(index)) * page_size_.divisor + index);
  }

  // The same for a token of a row of the layout.
  SPECMETA_HD int32_t load_page(int32_t t, const LayoutRow& row) const {
    return row.seq_len > 0 ? load_page(row.ids + row.page_begin, static_cast<uint32_t>(t + row.origin)) : 0;
  }
  template <class Cta>
  SPECMETA_HD void write(Cta& cta, int32_t t, int32_t b, const LayoutRow& row, int32_t page) const {
    if (row.seq_len > 0) {
      write(cta, t, b, static_cast<uint32_t>(t + row.origin), page);
    } else {
      pad(t);
    }
  }

  SPECMETA_HD void pad(int32_t t) const {
    if (slot_mapping_) store(slot_mapping_ + t, pad_slot_);
  }

 private:
  Divider page_size_;
  int64_t* slot_mapping_;
  int64_t pad_slot_;
  Ints row_to_slot_;
  int32_t* status_;
};

// The slots of a layout's tokens, for for_tokens().
template <class Cta>
struct SlotCopy {
  Cta& cta;
  SlotWriter slots;

  SPECMETA_HD int32_t load(int32_t t, const LayoutRow& row) const { return slots.load_page(t, row); }
  SPECMETA_HD void store(int32_t t, const LayoutRow& row, int32_t b, int32_t page) const {
    slots.write(cta, t, b, row, page);
  }
};

}  // namespace specmeta
