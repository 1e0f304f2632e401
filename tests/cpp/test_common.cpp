// Divider, find_owner, and stores that saturate.
#include "specmeta/common.h"
#include "specmeta/rows.h"
#include "specmeta/work.h"
#include "testing.h"

namespace specmeta::testing {
namespace {

void test_division(const Divider& divider, int64_t n) {
  const int64_t d = divider.divisor;
  if (n < 0 || n > kInt32Max) return;
  const auto dividend = static_cast<uint32_t>(n);
  SPECMETA_CHECK(divider.div(dividend) == n / d, "%" PRId64 " / %" PRId64 " gives %u", n, d, divider.div(dividend));
  SPECMETA_CHECK(divider.mod(dividend) == n % d, "%" PRId64 " %% %" PRId64 " gives %u", n, d, divider.mod(dividend));
}

// The dividends around multiples are those at which a quotient that is a little off shows.
void test_divisor(Random& random, int64_t d) {
  const Divider divider(d);
  const int64_t most = kInt32Max / d;
  for (const int64_t multiple :
       {int64_t{0}, int64_t{1}, int64_t{2}, most - 1, most, random.between(0, most), random.between(0, most)}) {
    for (int64_t offset = -2; offset <= 2; ++offset) test_division(divider, multiple * d + offset);
  }
  for (const int64_t n : {kInt32Max, kInt32Max - 1, int64_t{1} << 30, random.between(0, kInt32Max)})
    test_division(divider, n);
}

void test_divider(Random& random) {
  test_division(Divider(), 0);
  test_division(Divider(), kInt32Max);
  for (int64_t d = 1; d <= 4096; ++d) test_divisor(random, d);
  for (int power = 0; power <= 31; ++power) {
    for (int64_t offset = -3; offset <= 3; ++offset) {
      const int64_t d = (int64_t{1} << power) + offset;
      if (d >= 1 && d <= kInt32Max) test_divisor(random, d);
    }
  }
  for (int64_t i = 0; i < 64; ++i) test_divisor(random, kInt32Max - i);
  for (int i = 0; i < 50000; ++i) test_divisor(random, random.between(1, kInt32Max >> random.between(0, 30)));
  for (const int64_t d : {1, 2, 3, 7, 64}) {  // every dividend of a range
    const Divider divider(d);
    for (int64_t n = 0; n < 100000; ++n) test_division(divider, n);
  }
}

void test_find_owner(Random& random) {
  for (int i = 0; i < 3000; ++i) {
    // Few distinct values: rows without anything repeat their neighbour's.
    std::vector<int64_t> begins = {random.pick<int64_t>({0, 0, -5, 1000})};
    const int64_t n = i < 300 ? i % 70 + 1 : random.between(1, 70);
    while (static_cast<int64_t>(begins.size()) < n)
      begins.push_back(begins.back() + (random.chance(0.5) ? 0 : random.between(0, 3)));
    const std::vector<int64_t> exact = begins;  // AddressSanitizer sees an index outside
    for (int64_t x = begins.front(); x <= begins.back() + 2; ++x) {
      int64_t expected = 0;
      for (int64_t r = 0; r < n; ++r) {
        if (exact[r] <= x) expected = r;
      }
      const int64_t found =
          find_owner(static_cast<int32_t>(n), static_cast<int32_t>(x), [&](int32_t r) { return exact.data()[r]; });
      SPECMETA_CHECK(found == expected, "n %" PRId64 ", x %" PRId64 ": %" PRId64 ", not %" PRId64, n, x, found,
                     expected);
    }
    const int64_t last = find_owner(static_cast<int32_t>(n), INT32_MAX, [&](int32_t r) { return exact.data()[r]; });
    SPECMETA_CHECK(last == n - 1, "n %" PRId64 ": %" PRId64, n, last);
  }
}

void test_stores() {
  int32_t narrow[1] = {};
  int64_t wide[1] = {};
  for (const int64_t x :
       {int64_t{0}, int64_t{-1}, kInt32Max, kInt32Max + 1, -kInt32Max - 1, -kInt32Max - 2, INT64_MIN, INT64_MAX}) {
    const Ints to_narrow{narrow, false};
    const Ints to_wide{wide, true};
    to_narrow.set(0, x);
    to_wide.set(0, x);
    SPECMETA_CHECK(to_narrow.get(0) == clamp64(x, INT32_MIN, INT32_MAX), "%" PRId64 " gives %" PRId64, x,
                   to_narrow.get(0));
    SPECMETA_CHECK(to_wide.get(0) == x, "%" PRId64 " gives %" PRId64, x, to_wide.get(0));
    const int64_t limit = int64_t{1} << 40;
    SPECMETA_CHECK(to_wide.get_count(0) == clamp64(x, -limit, limit), "%" PRId64 " gives %" PRId64, x,
                   to_wide.get_count(0));
  }
}

void test_grid() {
  for (const int32_t rows : {0, 1, 256, 257, 512, 513, 1024, 1025, 65536}) {
    const int32_t threads = count_threads(rows);
    SPECMETA_CHECK(threads >= min32(rows, kTileRows) && threads <= kTileRows, "%d rows: %d threads", rows, threads);
    for (const bool is_repeatable : {false, true}) {
      for (int64_t work = rows; work < int64_t{1} << 32; work = 3 * work + 1000) {
        const int32_t blocks = count_blocks(rows, work, is_repeatable);
        SPECMETA_CHECK(blocks >= 1 && blocks <= kMaxBlocks && (blocks & (blocks - 1)) == 0, "%d rows: %d blocks", rows,
                       blocks);
        SPECMETA_CHECK(rows <= kTileRows || blocks > 1, "%d rows: %d blocks", rows, blocks);
      }
    }
  }
}

}  // namespace
}  // namespace specmeta::testing

int main() {
  using namespace specmeta::testing;
  Random random(1);
  test_divider(random);
  test_find_owner(random);
  test_stores();
  test_grid();
  return 0;
}
