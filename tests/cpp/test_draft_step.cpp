// draft_step: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/draft_step.h"

namespace specmeta::testing {
namespace {

DraftStepParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  const bool ledger = make.given();
  const bool written = make.given();
  DraftStepParams p;
  p.pages = make.make_pages();
  p.rows = make.make_rows(/*repeated_slots=*/false, make.pages_by_slot() || ledger || written);
  const int64_t rows = make.rows;
  const int64_t slots = make.slots;
  make.tokens = rows + random.between(0, 3);
  p.layout = make.make_layout(p.pages);

  std::vector<int64_t> lengths;
  std::vector<int64_t> rejected;
  for (int64_t b = 0; b < rows; ++b) {
    lengths.push_back(make.length(1));
    rejected.push_back(make.value(0, clamp64(lengths[b], 1, 4) - 1));
  }
  p.seq_lens = make.ints("seq_lens", rows, [&](int64_t b) { return lengths[b]; });
  p.layout.seq_lens = make.given() ? make.ints_out("seq_lens_out", rows) : p.seq_lens;
  const bool reject = make.given();
  if (reject) {
    p.num_rejected = make.int32("num_rejected", rows, [&](int64_t b) { return rejected[b]; });
    if (random.chance(0.5)) p.max_rejected = random.between(0, 4);
  }

  p.draft_index = random.chance(0.05) ? kInt32Max - 1 : random.between(0, 4);
  p.shift = random.between(0, 1);
  p.last = random.chance(0.1);
  if (ledger || make.given()) p.draft_tokens = make.ints("draft_tokens", rows, [&](int64_t) { return make.token(); });
  if (ledger) {
    std::vector<int64_t> known(static_cast<size_t>(slots));
    for (int64_t s = 0; s < slots; ++s) known[s] = make.length(0);
    for (int64_t b = 0; b < rows; ++b) {  // mostly one at which the draft is recorded
      const int64_t kept = clamp64(lengths[b], 0, 1000) - (reject ? clamp64(rejected[b], 0, 4) : 0);
      if (make.slot_of[b] >= 0 && random.chance(0.8)) known[make.slot_of[b]] = kept + p.shift - p.draft_index;
    }
    p.known_lens = make.int32("known_lens", slots, [&](int64_t s) { return known[s]; });
    p.num_drafts = make.int32("num_drafts", slots, [&](int64_t) { return make.value(0, 4); });
    int64_t width = random.chance(0.7) ? min64(make.capacity, 400) + 3 : random.between(0, 40);
    if (rows > 0 && random.chance(0.3))
      width = clamp64(lengths[random.between(0, rows - 1)], 0, 400);  // full for that row
    p.tokens = make.ints_table("tokens", slots, width, [&](int64_t, int64_t) { return make.token(); });
  }
  if (written) p.written_lens = make.int32_out("written_lens", slots);
  if (make.given()) {
    p.position_ids = make.ints("position_ids", make.tokens, [&](int64_t) { return make.value(0, 100); });
    if (make.given()) p.position_ids_out = make.ints_out("position_ids_out", make.tokens);
  }
  if (p.draft_tokens && make.given()) p.input_ids = make.ints_out("input_ids", make.tokens);
  if (p.position_ids || p.input_ids || p.layout.slot_mapping) p.rows.tokens = make.tokens;
  p.pad_token = random.pick({0, 1, -1});
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<LayoutRow>(argc, argv, kOverflow | kBadCount | kBadSlot | kBadPage | kBadIndptr,
                                                 testing::make,
                                                 [](auto& cta, const DraftStepParams& p) { draft_step(cta, p); });
}
