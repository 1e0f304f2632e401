// draft_lists: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/draft_lists.h"

namespace specmeta::testing {
namespace {

DraftListsParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  DraftListsParams p;
  p.pages = make.make_pages();
  p.rows = make.make_rows(/*repeated_slots=*/true, make.pages_by_slot());
  const int64_t rows = make.rows;
  p.num_steps = static_cast<int32_t>(random.between(1, kMostSteps));
  p.seq_lens = make.ints("seq_lens", rows, [&](int64_t) {
    const int64_t ahead = random.between(0, p.num_steps);  // often one of the steps is the first without room
    return clamp64(make.length(ahead), -kCountLimit, kCountLimit) - ahead;
  });
  p.pad_seq_len = random.pick({0, 1});
  p.pad_page = random.pick<int32_t>({0, 99, -1, INT32_MAX});
  p.pad_slot = random.pick<int64_t>({-1, 7, INT64_MIN});
  if (make.given()) p.position_ids = make.ints_out("position_ids", rows);
  if (make.given()) p.last_page_len = make.table_out("last_page_len", p.num_steps, rows);
  if (make.given()) p.kv_indptr = make.table_out("kv_indptr", p.num_steps, rows + 1);
  if (!make.pages_by_slot()) return p;
  if (make.given()) {
    const int64_t width = p.pages.page_table ? p.pages.page_table.width : 5;
    const int64_t enough = rows * max64(width, p.pad_seq_len);
    const int64_t capacity = random.chance(0.7) ? enough : random.between(p.pad_seq_len * rows, enough);
    p.kv_indices = make.table_out("kv_indices", p.num_steps, capacity);
  }
  if (make.given()) p.slot_mapping = make.int64_out("slot_mapping", rows * p.num_steps);
  return p;
}

template <class Cta>
void run(Cta& cta, const DraftListsParams& p) {
  if constexpr (Cta::kIsSerial) {
    for (int32_t step = 0; step < p.num_steps; ++step) {
      Cta own;
      draft_lists(own, p, step);
    }
  } else {
    draft_lists(cta, p, cta.step());
  }
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<LayoutRow>(argc, argv, kOverflow | kBadCount | kBadSlot | kBadPage | kBadIndptr,
                                                 testing::make,
                                                 [](auto& cta, const DraftListsParams& p) { testing::run(cta, p); });
}
