// Random arguments that pass every check made on the host: right values, values a little off, values from nowhere.
#pragma once

#include <algorithm>

#include "testing.h"

namespace specmeta::testing {

inline constexpr int64_t kInt32Min = -kInt32Max - 1;
inline constexpr int32_t kSticky = 1 << 20;  // a bit that stands in `status` before

class Generator {
 public:
  int64_t rows = 0;              // B
  int64_t slots = 0;             // S
  int64_t tokens = 0;            // T
  bool by_slot = false;          // row_to_slot is given
  std::vector<int64_t> slot_of;  // by row; -1 where it has no valid one
  std::vector<int64_t> query;    // query tokens by row, before anything was corrupted
  int64_t page_size = 1;
  int64_t capacity = 0;  // about the longest that a row may become

  Generator(Random& random, Buffers& buffers, bool many_rows) : random_(random), buffers_(buffers) {
    noise_ = random.pick({0.0, 0.0, 0.01, 0.05, 0.2});
    all_given_ = random.chance(0.3);
    rows = many_rows ? random.between(0, 150) : random.chance(0.3) ? random.between(0, 5) : random.between(6, 40);
    by_slot = random.chance(0.6);
    slots = rows;
    if (by_slot) slots = random.chance(0.1) ? random.between(0, rows) : rows + random.between(0, 3);
    page_size = random.chance(0.05) ? random.pick({int64_t{1} << 30, kInt32Max})
                                    : random.pick<int64_t>({1, 2, 3, 4, 7, 16, 64});
  }

  // Is the next optional argument given?
  bool given() { return all_given_ || random_.chance(0.6); }

  // Something in [low, high], or just outside, or from nowhere.
  int64_t value(int64_t low, int64_t high) {
    if (random_.chance(noise_)) return wild();
    if (random_.chance(noise_)) return random_.pick({low - 1, low, high, high + 1});
    return random_.between(low, high);
  }

  int64_t wild() {
    if (random_.chance(0.5)) {
      return random_.pick<int64_t>({-1, -2, kInt32Min, kInt32Min + 1, kInt32Max - 1, kInt32Max, 1 << 16, 1 << 30});
    }
    const int64_t power = int64_t{1} << random_.pick({31, 32, 40, 61, 62});
    return random_.pick({power, -power, power - 1, 1 - power, INT64_MAX, INT64_MIN});
  }

  // A length of at least `low`, often at the capacity or at the end of a page.
  int64_t length(int64_t low) {
    if (random_.chance(noise_)) return wild();
    if (random_.chance(0.1)) return 0;
    if (random_.chance(0.3)) return max64(low, capacity + random_.between(-6, noise_ > 0 ? 1 : 0));
    if (random_.chance(0.3)) {
      const int64_t end = random_.between(1, 3) * page_size;
      return max64(low, min64(end + random_.between(-1, 1), capacity));
    }
    return random_.between(low, min64(capacity, 4 * min64(page_size, 8) + low));
  }

  // An id of so small a vocabulary that chance confirms drafts.
  int64_t token() { return random_.chance(noise_) ? wild() : random_.between(0, 2); }

  // What is added to every count.
  int64_t bias() {
    return random_.chance(noise_) ? random_.pick({kCountLimit, -kCountLimit}) : random_.pick({0, 0, 1, -1, -4});
  }

  // --- Tensors of n values, each from value(i)

  template <class Value>
  int32_t* int32(const char* name, int64_t n, Value value, int64_t stride = 1, int64_t width = 1) {
    std::vector<int32_t> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = saturate32(value(i));
    return buffers_.add(name, values, stride, width);
  }
  template <class Value>
  int64_t* int64(const char* name, int64_t n, Value value, int64_t stride = 1, int64_t width = 1) {
    std::vector<int64_t> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = value(i);
    return buffers_.add(name, values, stride, width);
  }
  uint8_t* flags(const char* name, int64_t n, double probability) {
    std::vector<uint8_t> values(static_cast<size_t>(n));
    for (uint8_t& value : values) value = random_.chance(probability);
    return buffers_.add(name, values);
  }
  template <class Value>
  Ints ints(const char* name, int64_t n, Value value, int64_t stride = 1, int64_t width = 1) {
    const bool wide = random_.chance(0.5);
    if (wide) return {int64(name, n, value, stride, width), wide};
    return {int32(name, n, value, stride, width), wide};
  }
  // value(row, column). Mostly a slice of something wider; what is between the rows is poison.
  template <class Value>
  Table table(const char* name, int64_t n, int64_t width, Value value) {
    const int64_t stride = width + random_.pick({0, 1, 3});
    const auto element = [&](int64_t i) { return i % stride < width ? value(i / stride, i % stride) : wild(); };
    return {int32(name, extent(n, width, stride), element, stride, width), stride, static_cast<int32_t>(width)};
  }
  template <class Value>
  IntsTable ints_table(const char* name, int64_t n, int64_t width, Value value) {
    const int64_t stride = width + random_.pick({0, 1, 3});
    const auto element = [&](int64_t i) { return i % stride < width ? value(i / stride, i % stride) : wild(); };
    return {ints(name, extent(n, width, stride), element, stride, width), stride, static_cast<int32_t>(width)};
  }

  // Outputs: full of poison.
  int32_t* int32_out(const char* name, int64_t n) {
    return int32(name, n, [this](int64_t) { return wild(); });
  }
  int64_t* int64_out(const char* name, int64_t n) {
    return int64(name, n, [this](int64_t) { return wild(); });
  }
  uint8_t* flags_out(const char* name, int64_t n) {
    return buffers_.add(name, std::vector<uint8_t>(static_cast<size_t>(n), 0x7b));
  }
  Ints ints_out(const char* name, int64_t n) {
    return ints(name, n, [this](int64_t) { return wild(); });
  }
  Table table_out(const char* name, int64_t n, int64_t width) {
    return table(name, n, width, [this](int64_t, int64_t) { return wild(); });
  }
  IntsTable ints_table_out(const char* name, int64_t n, int64_t width) {
    return ints_table(name, n, width, [this](int64_t, int64_t) { return wild(); });
  }

  // --- The parts that operations share

  // Everything of `Rows` but cu_seqlens_q and tokens. `slots_known`: some other tensor tells S.
  Rows make_rows(bool repeated_slots, bool slots_known) {
    Rows result;
    result.batch = rows;
    slot_of.resize(static_cast<size_t>(rows));
    for (int64_t b = 0; b < rows; ++b) slot_of[b] = b;
    if (by_slot) {
      std::vector<int64_t> free(static_cast<size_t>(slots));
      for (int64_t s = 0; s < slots; ++s) free[s] = s;
      for (int64_t i = slots - 1; i > 0; --i) std::swap(free[i], free[random_.between(0, i)]);
      for (int64_t b = 0; b < rows; ++b) {
        slot_of[b] = b < slots && !random_.chance(0.1) ? free[b] : -1;
        if (repeated_slots && slots > 0 && random_.chance(0.2)) slot_of[b] = random_.between(0, slots - 1);
      }
      result.row_to_slot = ints("row_to_slot", rows, [&](int64_t b) {
        if (!random_.chance(noise_)) return slot_of[b];
        slot_of[b] = -1;
        return random_.pick({slots, slots + 1, int64_t{-2}, kInt32Min, kInt32Max, INT64_MIN, INT64_MAX});
      });
    }
    if (random_.chance(0.3)) {
      result.num_rows = int32("num_rows", 1, [&](int64_t) { return value(0, rows); });
    } else if (random_.chance(0.3)) {
      result.num_rows_int = clamp64(value(0, rows), -kCountLimit, kCountLimit);
    }
    if (given()) {
      const int32_t before = random_.pick({0, kSticky});
      result.status = int32("status", by_slot ? slots + 1 : rows, [&](int64_t) { return before; });
    }
    if (!by_slot || slots_known || result.status) result.slots = slots;
    return result;
  }

  // cu_seqlens_q, or null: one token a row. Chooses `query` and T.
  const int32_t* make_query(int64_t most) {
    query.assign(static_cast<size_t>(rows), 1);
    if (random_.chance(0.2)) {
      tokens = rows + random_.between(0, 3);
      return nullptr;
    }
    int64_t at = random_.chance(0.2) ? random_.between(0, 3) : 0;
    std::vector<int64_t> cu = {at};
    for (int64_t b = 0; b < rows; ++b) {
      query[b] = random_.between(random_.chance(0.2) ? 0 : 1, most);
      cu.push_back(at += query[b]);
    }
    tokens = random_.chance(noise_) ? random_.between(0, at) : at + random_.between(0, 3);
    // One bad pair ends the rest of the batch, so there are few.
    const bool corrupt = noise_ > 0 && random_.chance(0.3);
    const int64_t bad = random_.between(0, rows);
    if (corrupt) cu[bad] = random_.chance(0.5) ? wild() : cu[bad] + random_.pick({-2, -1, 1, 2});
    return int32("cu_seqlens_q", rows + 1, [&](int64_t b) { return cu[b]; });
  }

  Pages make_pages() {
    Pages pages;
    pages.page_size = Divider(page_size);
    const int64_t form = form_ = random_.between(0, 5);
    const int64_t width = random_.chance(0.1) ? 0 : random_.between(1, page_size < 4 ? 12 : 5);
    const auto page = [this](int64_t) {
      if (random_.chance(noise_)) return random_.pick({int64_t{-1}, int64_t{-5}, kInt32Min, kInt32Max});
      return random_.between(0, 1000);
    };
    capacity = width * page_size;
    if (form <= 1) {  // up to the first negative id, which stale ids may follow
      std::vector<int64_t> counts;
      for (int64_t s = 0; s < slots; ++s) counts.push_back(random_.chance(0.7) ? width : random_.between(0, width));
      pages.page_table =
          table("page_table", slots, width, [&](int64_t s, int64_t i) { return i == counts[s] ? -1 : page(i); });
    } else if (form <= 3) {
      pages.page_table = table("page_table", slots, width, [&](int64_t, int64_t i) { return page(i); });
      pages.num_pages =
          int32("num_pages", slots, [&](int64_t) { return random_.chance(0.7) ? width : value(0, width); });
    } else if (form == 4) {
      std::vector<int64_t> indptr = {random_.between(0, 2)};
      for (int64_t s = 0; s < slots; ++s) {
        indptr.push_back(indptr.back() + (random_.chance(0.7) ? width : random_.between(0, width)));
      }
      pages.num_alloc = indptr.back() + (random_.chance(noise_) ? -1 : random_.between(0, 2));
      pages.num_alloc = max64(pages.num_alloc, 0);
      pages.alloc_pages = int32("alloc_pages", pages.num_alloc, page);
      pages.alloc_indptr = int32("alloc_indptr", slots + 1, [&](int64_t s) { return value(indptr[s], indptr[s]); });
    } else {
      capacity = kInt32Max;
    }
    if (random_.chance(0.5)) {
      pages.max_seq_len =
          random_.chance(0.5) ? random_.between(1, 64) : clamp64(capacity + random_.between(-8, 8), 1, kInt32Max);
    }
    capacity = min64(capacity, pages.max_seq_len);
    return pages;
  }
  // Do the page tables tell S?
  bool pages_by_slot() const { return form_ <= 4; }

  // Everything but seq_lens.
  Layout make_layout(const Pages& pages) {
    Layout layout;
    layout.pad_seq_len = random_.pick({0, 1});
    layout.pad_page = random_.pick<int32_t>({0, 99, -1, INT32_MAX});
    layout.pad_slot = random_.pick<int64_t>({-1, 7, INT64_MIN});
    if (given()) layout.cached_lens = int32_out("cached_lens", rows);
    if (given()) layout.use_initial_states = flags_out("use_initial_states", rows);
    if (given()) layout.padded_seq_lens = ints_out("padded_seq_lens", rows);
    if (given()) layout.pages_per_seq = int32_out("pages_per_seq", rows);
    if (given()) layout.last_page_len = int32_out("last_page_len", rows);
    if (given()) layout.kv_indptr = int32_out("kv_indptr", rows + 1);
    if (!pages_by_slot()) return layout;
    const int64_t width = pages.page_table ? pages.page_table.width : 5;
    if (given()) {
      layout.kv_capacity =
          random_.chance(0.7) ? rows * max64(width, layout.pad_seq_len) : random_.between(0, rows * width);
      if (layout.pad_seq_len) layout.kv_capacity = max64(layout.kv_capacity, rows);
      layout.kv_indices = int32_out("kv_indices", layout.kv_capacity);
    }
    if (given()) {
      layout.block_table = table_out("block_table", rows, random_.chance(0.6) ? width : random_.between(0, width + 2));
      layout.table_parts = Divider(max64((layout.block_table.width + kTablePart - 1) / kTablePart, 1));
    }
    if (given()) layout.slot_mapping = make_slot_mapping(layout.num_slots);
    return layout;
  }

  // As long as there are tokens, or longer.
  int64_t* make_slot_mapping(int32_t& num_slots) {
    num_slots = static_cast<int32_t>(tokens + random_.pick({0, 0, 1, 9}));
    return int64_out("slot_mapping", num_slots);
  }

 private:
  // Elements from the first of the first row to the last of the last: nothing follows that.
  static int64_t extent(int64_t n, int64_t width, int64_t stride) {
    return n == 0 || width == 0 ? 0 : (n - 1) * stride + width;
  }

  Random& random_;
  Buffers& buffers_;
  double noise_ = 0;
  bool all_given_ = false;
  int64_t form_ = 0;
};

}  // namespace specmeta::testing
