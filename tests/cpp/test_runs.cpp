// Runs of pages whose places in kv_indices are near the largest, as no test with real lists could have them.
#include <vector>

#include "specmeta/layout.h"
#include "testing.h"

namespace specmeta::testing {
namespace {

// One of the threads of a Cta, which run in turn.
struct TurnCta {
  static constexpr bool kIsSerial = false;
  using Row = LayoutRow;

  int32_t rank() const { return thread; }
  int32_t size() const { return 256; }
  int32_t lanes() const { return 32; }
  template <class Begin>
  int32_t find_owner(int32_t n, int32_t x, Begin begin) const {
    SPECMETA_CHECK(begin(0) <= x, "%d comes before the first row", x);
    return specmeta::find_owner(n, x, begin);
  }
  const Row* tile() const { return rows; }
  void atomic_or(int32_t* at, int32_t bits) const { *at |= bits; }

  const Row* rows;
  int32_t thread;
};

// What `list` would begin with, if it stood `places` further on.
template <class T>
T* back(T* list, int64_t places) {
  return reinterpret_cast<T*>(reinterpret_cast<intptr_t>(list) - places * static_cast<int64_t>(sizeof(T)));
}

// `num_rows` rows of `pages` each, whose places end at `end`.
void test_runs(int64_t end, int32_t num_rows, int32_t pages) {
  const int64_t n = int64_t{num_rows} * pages;
  const int64_t begin = end - n;
  std::vector<int32_t> ids(n), got(n + 1, -9);
  for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(i);
  std::vector<LayoutRow> tile(num_rows);
  for (int32_t r = 0; r < num_rows; ++r) {
    tile[r].page_begin = static_cast<int32_t>(begin + int64_t{r} * pages);
    tile[r].page_end = tile[r].page_begin + pages;
    tile[r].seq_len = 1;
    tile[r].ids = back(ids.data(), begin);
  }
  Rows rows;
  rows.batch = num_rows;
  Layout out;
  out.kv_indices = back(got.data(), begin);
  out.kv_capacity = static_cast<int32_t>(end);
  const Pages pages_of_slots;
  const LayoutWriter layout(rows, pages_of_slots, out, Ints());
  Window window;
  window.num_rows = num_rows;
  window.page = static_cast<int32_t>(begin);
  window.page_end = static_cast<int32_t>(end);
  for (int32_t thread = 0; thread < 256; ++thread) {
    TurnCta cta{tile.data(), thread};
    layout.write_runs(cta, window);
  }
  for (int64_t i = 0; i < n; ++i) {
    SPECMETA_CHECK(got[i] == i, "%d rows of %d up to %" PRId64 ": place %" PRId64 " has %d", num_rows, pages, end, i,
                   got[i]);
  }
  SPECMETA_CHECK(got[n] == -9, "%d rows of %d up to %" PRId64 ": one more", num_rows, pages, end);
}

}  // namespace
}  // namespace specmeta::testing

int main() {
  using specmeta::testing::test_runs;
  for (const int64_t end : {int64_t{1} << 20, specmeta::kInt32Max - 300, specmeta::kInt32Max}) {
    test_runs(end, 1, 5000);
    test_runs(end, 5, 1000);
    test_runs(end, 200, 37);
    test_runs(end, 900, 1);
  }
  return 0;
}
