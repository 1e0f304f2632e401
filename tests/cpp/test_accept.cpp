// accept_greedy and accept_sampled: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/accept.h"

namespace specmeta::testing {
namespace {

AcceptParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  make.capacity = 40;
  const bool state = make.given();
  AcceptParams p;
  p.rows = make.make_rows(/*repeated_slots=*/false, state);
  p.rows.cu_seqlens_q = make.make_query(5);
  const int64_t rows = make.rows;
  const int64_t slots = make.slots;
  const int64_t tokens = make.tokens;
  const int64_t width = random.between(1, 6);  // K + 1

  std::vector<int64_t> ids;
  for (int64_t t = 0; t < tokens; ++t) ids.push_back(make.token());
  const bool greedy = random.chance(0.5);
  if (greedy || make.given()) p.input_ids = make.ints("input_ids", tokens, [&](int64_t t) { return ids[t]; });
  if (greedy) {
    p.target_tokens = make.ints("target_tokens", tokens, [&](int64_t t) {
      return t + 1 < tokens && random.chance(0.7) ? ids[t + 1] : make.token();
    });
  } else {
    p.vocab_size = random.pick<int64_t>({1, 3, 3, 3, kInt32Max});
    p.sampled_tokens = make.ints_table("sampled_tokens", rows, width, [&](int64_t, int64_t) {
      return random.chance(0.1) ? random.pick({int64_t{-1}, p.vocab_size}) : make.token();
    });
  }
  if (make.given()) p.accepted_tokens = make.ints_table_out("accepted_tokens", rows, width);
  if (p.accepted_tokens) p.emitted_width = Divider(width);
  if (!greedy || p.accepted_tokens) p.max_draft_len = static_cast<int32_t>(width - 1);
  if (make.given()) {
    p.num_draft_tokens =
        make.int32("num_draft_tokens", rows, [&](int64_t b) { return make.value(0, min64(make.query[b], width) - 1); });
  }
  if (make.given()) {
    p.position_ids = make.ints("position_ids", tokens, [&](int64_t) { return make.value(0, 100); });
    if (make.given()) p.last_position_ids = make.ints_out("last_position_ids", rows);
  }
  if (p.input_ids && make.given()) p.draft_input_ids = make.ints_out("draft_input_ids", tokens);
  if (p.input_ids || p.position_ids) p.rows.tokens = tokens;

  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < rows; ++b) lengths.push_back(make.length(make.query[b]));
  if (state || make.given()) {
    p.seq_lens = make.ints("seq_lens", rows, [&](int64_t b) { return lengths[b]; });
    if (make.given()) p.seq_lens_out = make.ints_out("seq_lens_out", rows);
  }
  if (state) {
    std::vector<int64_t> known(static_cast<size_t>(slots));
    for (int64_t s = 0; s < slots; ++s) known[s] = make.length(0);
    for (int64_t b = 0; b < rows; ++b) {  // mostly one that the row's tokens fit
      if (make.slot_of[b] >= 0 && random.chance(0.7))
        known[make.slot_of[b]] = clamp64(lengths[b], 0, 100) - random.between(0, 4);
    }
    p.known_lens = make.int32("known_lens", slots, [&](int64_t s) { return known[s]; });
    p.committed_lens = make.int32("committed_lens", slots, [&](int64_t) { return make.length(0); });
    p.tokens =
        make.ints_table("tokens", slots, random.pick({0, 20, 40, 48}), [&](int64_t, int64_t) { return make.token(); });
    if (make.given()) p.num_drafts = make.int32("num_drafts", slots, [&](int64_t) { return make.value(0, 4); });
  }
  if (make.given()) p.num_accepted = make.ints_out("num_accepted", rows);
  if (make.given()) p.num_rejected = make.int32_out("num_rejected", rows);
  if (make.given()) p.num_sampled = make.ints_out("num_sampled", rows);
  if (make.given()) p.next_tokens = make.ints_out("next_tokens", rows);
  if (make.given()) p.token_indices = make.ints_out("token_indices", rows);
  p.pad_token = random.pick({0, 1, -1});
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<AcceptRow>(argc, argv, kOverflow | kUnderflow | kBadCount | kBadSlot | kBadIndptr,
                                                 testing::make,
                                                 [](auto& cta, const AcceptParams& p) { accept(cta, p); });
}
