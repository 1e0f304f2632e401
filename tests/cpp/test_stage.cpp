// stage: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/stage.h"

namespace specmeta::testing {
namespace {

StageParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  StageParams p;
  p.pages = make.make_pages();
  p.rows = make.make_rows(/*repeated_slots=*/true, /*slots_known=*/true);
  const int64_t rows = make.rows;
  const int64_t slots = make.slots;
  make.tokens = random.chance(0.6) ? 5 * rows : random.between(0, 4 * rows);
  p.layout = make.make_layout(p.pages);

  std::vector<int64_t> committed;
  for (int64_t s = 0; s < slots; ++s) committed.push_back(make.length(0));
  p.committed_lens = make.int32("committed_lens", slots, [&](int64_t s) { return committed[s]; });
  if (make.given()) p.limit_lens = make.int32("limit_lens", slots, [&](int64_t) { return make.length(0); });
  if (make.given()) {
    p.known_lens = make.int32("known_lens", slots, [&](int64_t s) {
      const int64_t more = clamp64(make.value(0, 4), -kCountLimit, kCountLimit);
      return clamp64(committed[s], -1, kInt32Max) + more;
    });
    if (make.given()) p.num_drafts = make.int32("num_drafts", slots, [&](int64_t) { return make.value(0, 4); });
    if (make.given()) p.num_draft_tokens = make.int32_out("num_draft_tokens", rows);
  }
  if (!p.known_lens || make.given())
    p.query_lens = make.int32("query_lens", rows, [&](int64_t) { return make.value(0, 5); });
  if (make.given()) {
    const int64_t width = random.chance(0.7) ? min64(make.capacity, 400) + 3 : random.between(0, 40);
    p.tokens = make.ints_table("tokens", slots, width, [&](int64_t, int64_t) { return make.token(); });
    if (make.given()) p.input_ids = make.ints_out("input_ids", make.tokens);
  }
  if (make.given()) p.cu_seqlens_q = make.int32_out("cu_seqlens_q", rows + 1);
  if (make.given()) p.layout.seq_lens = make.ints_out("seq_lens", rows);
  if (make.given()) p.position_ids = make.ints_out("position_ids", make.tokens);
  if (p.position_ids || p.input_ids || p.layout.slot_mapping) p.rows.tokens = make.tokens;
  p.pad_token = random.pick({0, 1, -1});
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<LayoutRow>(argc, argv, kOverflow | kBadCount | kBadSlot | kBadPage | kBadIndptr,
                                                 testing::make, [](auto& cta, const StageParams& p) { stage(cta, p); });
}
