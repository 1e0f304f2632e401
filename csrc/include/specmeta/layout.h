// The layout of a step: from each row's length, everything that attention and the cache writers read. Shared by
// advance, stage and draft_step, so that a length and what follows from it cannot part (rule 7).
#pragma once

#include "specmeta/slots.h"

namespace specmeta {

class LayoutWriter {
 public:
  // `lens_read`: the lengths that the operation reads, which those of the layout may replace.
  SPECMETA_HD LayoutWriter(const Rows& rows, const Pages& pages, const Layout& out, const Ints& lens_read)
      : rows_(rows), pages_(pages), out_(out), in_place_(out.seq_lens && out.seq_lens.data == lens_read.data) {}

  // Gives row b its place in kv_indices, empties it where that is too small, and writes what is by row. `length` is 0
  // for an empty row, `range` what was read of its slot's pages. Called by every thread of a tile.
  template <class Cta>
  SPECMETA_HD LayoutRow place(Cta& cta, int32_t first, int32_t b, RowCheck& check, const TokenSpan& span,
                              int32_t length, const PageRange& range) const {
    const bool inside = b < rows_.batch;
    const int64_t pad = out_.pad_seq_len;
    int32_t n = inside ? count_pages(length) : 0;
    int64_t begin = 0;
    if (out_.kv_indptr || out_.kv_indices) {
      int64_t total;
      begin = cta.exclusive_sum(n, total);
      const int64_t before = cta.sum_before(kPages, total);
      begin += before;
      // What would have to fit up to a row's end, with a place for each row behind it if need be, grows with b: the cut
      // is at the first row where it doesn't.
      const int64_t end = min64(int64_t{first} + cta.size(), rows_.batch);
      if (out_.kv_indices && before + total + pad * (rows_.batch - end) > out_.kv_capacity) {
        int32_t cut = first;
        int64_t from = 0;  // where row b stands behind the cut, less pad * b
        if (first > 0 && before + pad * (rows_.batch - first) > out_.kv_capacity) {
          from = cta.heed(kPagesEnd);  // it was before this tile
        } else {
          const bool fits = begin + n + pad * (rows_.batch - 1 - b) <= out_.kv_capacity;
          cut = cta.min(inside && !fits ? b : INT32_MAX);
          from = cta.sum(b == cut ? begin - pad * b : 0);
          cta.announce(kPagesEnd, from);
        }
        if (inside && b >= cut) {
          if (length > 0) check.faults |= kOverflow;
          length = 0;
          n = out_.pad_seq_len;
          begin = from + pad * b;
        }
      }
    }
    const bool is_late = in_place_ && cta.is_replicated();  // other Ctas may read the old lengths yet
    if (cta.writes_rows()) {
      if (inside) write_row(b, span, length, n, begin + n);
      if (inside && out_.seq_lens && !is_late) out_.seq_lens.set(b, length);
      report(cta, rows_, check);
    }
    LayoutRow row;
    row.token_begin = span.begin;
    row.origin = length - span.end;
    row.seq_len = length;
    if (out_.kv_indices) {
      row.page_begin = static_cast<int32_t>(begin);
      row.page_end = static_cast<int32_t>(begin + n);
    }
    row.ids = first_page(pages_, length > 0 ? range : PageRange(), length > 0 ? check.slot : 0) - row.page_begin;
    return row;
  }

  // All lengths have been read, once the rows are placed.
  template <class Cta>
  SPECMETA_HD void arrive(Cta& cta) {
    if (in_place_) arrival_ = cta.arrive();
  }

  // The page lists of a window's rows.
  template <class Cta>
  SPECMETA_HD void write_pages(Cta& cta, const Window& window) const {
    if (!out_.kv_indices) return;
    const typename Cta::Row* tile = cta.tile();
    if constexpr (Cta::kIsSerial) {
      write_pages_of(cta, tile[0], window.first, out_.kv_indices + window.page, window.page_end - window.page);
    } else {
      write_runs(cta, window);
    }
  }

  // In runs, each for threads that go on together, strip after strip: a page for each of them. Rows touch: where one's
  // pages end, the next one's begin.
  template <class Cta>
  SPECMETA_HD void write_runs(Cta& cta, const Window& window) const {
    const LayoutRow* tile = cta.tile();
    const auto lanes = static_cast<uint32_t>(cta.lanes());
    const Part run = cut(window.page, window.page_end, cta.rank() / lanes, cta.size() / lanes);
    const auto page_begin = [&](int32_t k) { return tile[k].page_begin; };
    const int32_t many = 2 * cta.lanes();  // rows that begin in kInFlight strips
    int32_t r = cta.find_owner(window.num_rows, static_cast<int32_t>(run.begin), page_begin);
    uint32_t i = run.begin;
    SPECMETA_NO_UNROLL
    while (i < run.end) {
      const uint32_t at = i + cta.rank() % lanes;
      uint32_t stop = min32(i + kInFlight * lanes, run.end);
      RowPages row = tile[r];
      if (stop <= static_cast<uint32_t>(row.page_end) && row.seq_len > 0) {
        move_pages(cta, window, at, stop, [&](uint32_t k) { return load(to_tensor(row.ids + k)); });
      } else {
        if (r + many < window.num_rows && static_cast<uint32_t>(tile[r + many].page_begin) < stop) {
          // So many rows that each thread had better search for its own: one strip.
          stop = min32(i + lanes, stop);
          if (at < stop) r = find_owner(window.num_rows, static_cast<int32_t>(at), page_begin);
          row = tile[r];
        }
        move_pages(cta, window, at, stop, [&](uint32_t k) {  // each thread passes from row to row
          SPECMETA_NO_UNROLL
          while (k >= static_cast<uint32_t>(row.page_end)) row = tile[++r];
          return row.seq_len > 0 ? load(to_tensor(row.ids + k)) : out_.pad_page;
        });
        r = cta.find_owner(window.num_rows, static_cast<int32_t>(min32(stop, run.end - 1)), page_begin);
      }
      i = stop;
    }
  }

  // The places at, at + lanes(), ... before `stop`, of which load_one() gives the ids. NOTE: first all loads, then all
  // stores: a compiler keeps their order.
  template <class Cta, class Load>
  SPECMETA_HD void move_pages(Cta& cta, const Window& window, uint32_t at, uint32_t stop, Load load_one) const {
    const auto lanes = static_cast<uint32_t>(cta.lanes());
    int32_t page[kInFlight];
    int32_t all_bits = 0;  // negative where an id is
    SPECMETA_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j) {
      page[j] = 0;
      if (at + j * lanes < stop) page[j] = load_one(at + j * lanes);
    }
    SPECMETA_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (at + j * lanes < stop) store(out_.kv_indices + at + j * lanes, page[j]);
      all_bits |= page[j];
    }
    if (all_bits >= 0) return;
    SPECMETA_NO_UNROLL
    for (uint32_t k = at; k < stop; k += lanes) replace_page(cta, window, k);
  }

  // The rows of block_table in `rows` (at row b, rows[b - first]), in parts of a row, shared among the threads; of many
  // Ctas, among those of all.
  template <class Cta>
  SPECMETA_HD void write_table(Cta& cta, const LayoutRow* rows, int32_t first, int32_t num_rows) const {
    const Table& table = out_.block_table;
    if (!table || table.width == 0) return;
    // Threads in groups of a power of two, no wider than a row needs.
    int log2 = 0;
    while ((4 << log2) < table.width && (2 << log2) <= cta.size()) ++log2;
    const int32_t group = 1 << log2;
    const int32_t groups = cta.size() >> log2;
    const int32_t lane = cta.rank() & (group - 1);
    const uint32_t num_parts = static_cast<uint32_t>(num_rows) * out_.table_parts.divisor;
    if (cta.rank() >= groups << log2) return;  // left over where size() is no power of two
    const uint32_t step = static_cast<uint32_t>(cta.num_blocks()) * groups;
    SPECMETA_NO_UNROLL
    for (uint32_t i = cta.block() * groups + (cta.rank() >> log2); i < num_parts; i += step) {
      const auto r = static_cast<int32_t>(out_.table_parts.div(i));
      const uint32_t part = out_.table_parts.mod(i) * kTablePart;
      const uint32_t used = pages_for(pages_, load(&rows[r].seq_len));
      const int32_t* ids = load(&rows[r].ids);
      const auto page_begin = static_cast<uint32_t>(load(&rows[r].page_begin));
      int32_t* to = table.row(first + r);
      copy_batched(
          part + lane, part + min32(kTablePart, table.width - static_cast<int32_t>(part)), group,
          [&](uint32_t k) { return k < used ? load(to_tensor(ids + (page_begin + k))) : out_.pad_page; },
          [&](uint32_t k, int32_t id) {
            if (id < 0 && k < used) {
              report_page(cta, first + r);
              id = out_.pad_page;
            }
            store(to + k, id);
          });
    }
  }

  // What depends on all rows, once they are placed.
  template <class Cta>
  SPECMETA_HD void finish(Cta& cta, const Covered& all) const {
    if (out_.kv_indptr && cta.block() == 0 && cta.rank() == 0) store(out_.kv_indptr, 0);
    if (out_.kv_indices) {
      for_all(cta, all.page_end, out_.kv_capacity,
              [ids = out_.kv_indices, pad = out_.pad_page](int32_t i) { store(ids + i, pad); });
    }
    if (out_.slot_mapping) {
      const SlotWriter slots(rows_, pages_, out_.slot_mapping, out_.pad_slot);
      for_all(cta, rows_.tokens, out_.num_slots, [slots](int32_t t) { slots.pad(t); });
    }
    if (!cta.places_all()) write_table(cta, cta.records(), 0, rows_.batch);
    if (in_place_ && cta.is_replicated() && cta.is_last(arrival_) && cta.rank() < rows_.batch) {
      out_.seq_lens.set(cta.rank(), cta.tile()[cta.rank()].seq_len);
    }
  }

  // A window's pages; of the table, too, where the Cta has all rows or is the only one.
  template <class Cta>
  SPECMETA_HD void fill(Cta& cta, const Window& window) const {
    write_pages(cta, window);
    if (cta.places_all()) write_table(cta, cta.tile(), window.first, window.num_rows);
  }

 private:
  static constexpr int kInFlight = 8;  // strips

  SPECMETA_HD int32_t count_pages(int32_t length) const {
    return length > 0 ? pages_for(pages_, length) : out_.pad_seq_len;
  }

  SPECMETA_HD void write_row(int32_t b, const TokenSpan& span, int32_t length, int32_t num_pages,
                             int64_t page_end) const {
    if (out_.cached_lens) store(out_.cached_lens + b, length > 0 ? length - span.q() : 0);
    if (out_.use_initial_states) {
      store(out_.use_initial_states + b, static_cast<uint8_t>(length > span.q()));
    }
    if (out_.padded_seq_lens) out_.padded_seq_lens.set(b, max32(length, out_.pad_seq_len));
    if (out_.pages_per_seq) store(out_.pages_per_seq + b, num_pages);
    if (out_.last_page_len) {
      const auto last = static_cast<uint32_t>(length - 1);
      store(out_.last_page_len + b,
            length > 0 ? static_cast<int32_t>(pages_.page_size.mod(last)) + 1 : out_.pad_seq_len);
    }
    if (out_.kv_indptr) store(out_.kv_indptr + b + 1, saturate32(page_end));
  }

  // The first n pages of a row's list, by one thread: a plain copy, then the wrong ids in it, if there are any.
  template <class Cta>
  SPECMETA_HD void write_pages_of(Cta& cta, const LayoutRow& row, int32_t b, int32_t* to, int32_t n) const {
    const int32_t used = row.seq_len > 0 ? n : 0;
    const int32_t* ids = row.ids + row.page_begin;
    const int32_t pad = out_.pad_page;
    int32_t all_bits = 0;  // negative where an id is
    for (int32_t k = 0; k < used; ++k) {
      const int32_t id = load(ids + k);
      all_bits |= id;
      store(to + k, id);
    }
    if (all_bits < 0) {
      for (int32_t k = 0; k < used; ++k) {
        if (load(ids + k) < 0) store(to + k, pad);
      }
      report_page(cta, b);
    }
    for (int32_t k = used; k < n; ++k) store(to + k, pad);
  }

  // Of what a thread has written to kv_indices, a negative id; a negative pad_page is none that is wrong.
  template <class Cta>
  SPECMETA_HD void replace_page(Cta& cta, const Window& window, uint32_t at) const {
    if (load(out_.kv_indices + at) >= 0) return;
    const auto* tile = cta.tile();
    const int32_t r =
        find_owner(window.num_rows, static_cast<int32_t>(at), [&](int32_t k) { return tile[k].page_begin; });
    if (tile[r].seq_len == 0) return;
    report_page(cta, window.first + r);
    store(out_.kv_indices + at, out_.pad_page);
  }

  template <class Cta>
  SPECMETA_HD void report_page(Cta& cta, int32_t b) const {
    if (rows_.status) cta.atomic_or(rows_.status + slot_of(rows_.row_to_slot, b), kBadPage);
  }

  const Rows& rows_;
  const Pages& pages_;
  const Layout& out_;
  const bool in_place_;
  uint64_t arrival_ = 0;
};

}  // namespace specmeta
