// The layout of a step: from each row's length, everything that attention and the cache writers read. Shared by
// advance, stage and draft_step, so that a length and what follows from it cannot part (rule 7).
#pragma once

#include "specmeta/pages.h"

namespace specmeta {

// A tile's row.
struct LayoutRow : TokenSpan {
  int32_t seq_len = 0;             // 0: empty
  int32_t num_pages = 0;           // places in kv_indices, a padded row's one included
  int64_t kv_begin = 0;            // the first of them
  const int32_t* pages = nullptr;  // the allocation
  int32_t status_at = 0;
  int32_t slot = 0;   // in stage
  int64_t shift = 0;  // in advance: what the row's positions move by

  SPECMETA_HD int64_t cache_index(int64_t t) const { return int64_t{seq_len} - token_end + t; }
};

class LayoutWriter {
 public:
  SPECMETA_HD LayoutWriter(const Rows& rows, const Pages& pages, const Layout& out)
      : rows_(rows), pages_(pages), out_(out) {}

  // Gives row b its place in kv_indices, empties it where that is too small, writes what is by row, and puts the row
  // into the tile. Called by every thread; the tile may be read when it returns.
  template <class Cta>
  SPECMETA_HD void place(Cta& cta, int64_t first, int64_t b, RowCheck& check, LayoutRow& row) {
    const bool inside = b < rows_.batch;
    int64_t n = inside ? count_pages(row) : 0;
    if (out_.kv_indptr || out_.kv_indices) {
      int64_t total;
      row.kv_begin = kv_end_ + cta.exclusive_sum(n, total);
      if (out_.kv_indices) {
        // Every row takes at least pad_seq_len places, so that a row that does not fit means that none behind it does.
        const int64_t rows_behind = rows_.batch - min64(first + cta.size(), rows_.batch);
        if (cut_ || kv_end_ + total + out_.pad_seq_len * rows_behind > out_.kv_capacity) {  // the same in every thread
          if (inside && (cut_ || row.kv_begin + n + out_.pad_seq_len * (rows_.batch - 1 - b) > out_.kv_capacity)) {
            if (row.seq_len > 0) check.faults |= kOverflow;
            row.seq_len = 0;
            n = out_.pad_seq_len;
          }
          cut_ = true;
          row.kv_begin = kv_end_ + cta.exclusive_sum(n, total);
        }
      }
      kv_end_ += total;
    }
    row.num_pages = saturate32(n);
    row.status_at = saturate32(check.status_at);
    if (inside) write_row(b, row);
    report(cta, rows_, check);
    cta.tile()[cta.rank()] = row;
    cta.sync();
  }

  // The page lists of the tile's rows, shared among the threads.
  template <class Cta>
  SPECMETA_HD void write_pages(Cta& cta, int64_t first) const {
    const typename Cta::Row* tile = cta.tile();
    const int64_t num_rows = min64(cta.size(), rows_.batch - first);
    if (out_.kv_indices) {
      for (int64_t i = tile[0].kv_begin + cta.rank(); i < kv_end_; i += cta.size()) {
        const LayoutRow& row = tile[find_owner(num_rows, i, [&](int64_t r) { return tile[r].kv_begin; })];
        out_.kv_indices[i] = page_id(cta, row, i - row.kv_begin);
      }
    }
    if (out_.block_table) {
      // Threads in groups of a power of two, no wider than the table needs: a group takes a row.
      int log2 = 0;
      while ((int64_t{1} << log2) < out_.block_table.width && (cta.size() >> log2) > 1) ++log2;
      const int64_t group = int64_t{1} << log2;
      const int64_t num_groups = cta.size() >> log2;
      const int64_t lane = cta.rank() & (group - 1);
      for (int64_t r = cta.rank() >> log2; r < num_rows && cta.rank() < group * num_groups; r += num_groups) {
        const LayoutRow row = tile[r];
        int32_t* to = out_.block_table.row(first + r);
        for (int64_t k = lane; k < out_.block_table.width; k += group) {
          to[k] = k < row.num_pages ? page_id(cta, row, k) : out_.pad_page;
        }
      }
    }
  }

  // The slot of token t.
  template <class Cta>
  SPECMETA_HD void write_slot(Cta& cta, int64_t t, const LayoutRow& row) const {
    if (!out_.slot_mapping) return;
    int64_t slot = out_.pad_slot;
    if (row.seq_len > 0) {
      const auto index = static_cast<uint32_t>(row.cache_index(t));
      const int64_t page = row.pages[pages_.page_size.div(index)];
      if (page >= 0) {
        slot = page * pages_.page_size.divisor + pages_.page_size.mod(index);
      } else {
        bad_page(cta, row);
      }
    }
    out_.slot_mapping[t] = slot;
  }

  SPECMETA_HD void pad_slot(int64_t t) const {
    if (out_.slot_mapping) out_.slot_mapping[t] = out_.pad_slot;
  }

  // What is behind the last row, once all tiles are done.
  template <class Cta>
  SPECMETA_HD void finish(Cta& cta) const {
    if (out_.kv_indptr && cta.rank() == 0) out_.kv_indptr[0] = 0;
    if (out_.kv_indices) {
      for (int64_t i = kv_end_ + cta.rank(); i < out_.kv_capacity; i += cta.size()) out_.kv_indices[i] = out_.pad_page;
    }
  }

 private:
  SPECMETA_HD int64_t count_pages(const LayoutRow& row) const {
    return row.seq_len > 0 ? pages_for(pages_, row.seq_len) : out_.pad_seq_len;
  }

  SPECMETA_HD void write_row(int64_t b, const LayoutRow& row) const {
    const int32_t n = row.seq_len;
    if (out_.seq_lens) out_.seq_lens.set(b, n);
    if (out_.cached_lens) out_.cached_lens[b] = n > 0 ? n - row.q() : 0;
    if (out_.padded_seq_lens) out_.padded_seq_lens.set(b, max64(n, out_.pad_seq_len));
    if (out_.pages_per_seq) out_.pages_per_seq[b] = row.num_pages;
    if (out_.last_page_len) {
      out_.last_page_len[b] = n > 0 ? static_cast<int32_t>(pages_.page_size.mod(n - 1)) + 1 : out_.pad_seq_len;
    }
    if (out_.kv_indptr) out_.kv_indptr[b + 1] = saturate32(row.kv_begin + row.num_pages);
  }

  template <class Cta>
  SPECMETA_HD int32_t page_id(Cta& cta, const LayoutRow& row, int64_t k) const {
    if (row.seq_len == 0) return out_.pad_page;
    const int32_t id = row.pages[k];
    if (id >= 0) return id;
    bad_page(cta, row);
    return out_.pad_page;
  }

  template <class Cta>
  SPECMETA_HD void bad_page(Cta& cta, const LayoutRow& row) const {
    if (rows_.status) cta.atomic_or(rows_.status + row.status_at, kBadPage);
  }

  const Rows& rows_;
  const Pages& pages_;
  const Layout& out_;
  int64_t kv_end_ = 0;  // places given to the rows so far
  bool cut_ = false;    // kv_indices was too small
};

}  // namespace specmeta
