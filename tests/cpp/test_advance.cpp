// advance: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/advance.h"

namespace specmeta::testing {
namespace {

AdvanceParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  AdvanceParams p;
  p.pages = make.make_pages();
  p.rows = make.make_rows(/*repeated_slots=*/true, make.pages_by_slot());
  p.rows.cu_seqlens_q = make.make_query(5);
  p.layout = make.make_layout(p.pages);
  const int64_t rows = make.rows;

  p.seq_lens = make.ints("seq_lens", rows, [&](int64_t b) { return make.length(make.query[b]); });
  p.layout.seq_lens = make.given() ? make.ints_out("seq_lens_out", rows) : p.seq_lens;
  if (make.given()) {
    p.position_ids = make.ints("position_ids", make.tokens, [&](int64_t) { return make.value(0, 100); });
  }
  if (make.given()) p.position_ids_out = make.ints_out("position_ids_out", make.tokens);
  if (p.position_ids || p.position_ids_out || p.layout.slot_mapping) p.rows.tokens = make.tokens;

  p.num_counts = random.chance(0.8) ? make.slots : random.between(0, make.slots + 1);
  const int64_t low = random.pick({0, -3});
  p.num_accepted = make.ints("num_accepted", p.num_counts, [&](int64_t) { return make.value(low, 4); });
  if (make.given())
    p.count_index = make.ints("count_index", rows, [&](int64_t) { return make.value(-1, p.num_counts - 1); });
  if (random.chance(0.5)) p.max_accepted = random.between(0, 4);
  p.seq_len_bias = make.bias();
  p.position_bias = make.bias();
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<LayoutRow>(
      argc, argv, kOverflow | kUnderflow | kBadCount | kBadSlot | kBadPage | kBadIndptr, testing::make,
      [](auto& cta, const AdvanceParams& p) { advance(cta, p); });
}
