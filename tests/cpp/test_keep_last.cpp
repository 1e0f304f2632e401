// keep_last: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/keep_last.h"

namespace specmeta::testing {
namespace {

KeepLastParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  make.by_slot = false;
  make.slots = make.rows;
  const int64_t rows = make.rows;
  KeepLastParams p;
  p.rows = make.make_rows(/*repeated_slots=*/false, /*slots_known=*/true);
  const bool few = random.chance(0.4);  // so few tokens that they move to the right
  std::vector<int64_t> cu = {random.chance(0.2) ? random.between(0, 3) : 0};
  for (int64_t b = 0; b < rows; ++b) {
    make.query.push_back(few ? random.pick({0, 0, 1, 1, 2}) : random.between(0, 6));
    cu.push_back(cu.back() + make.query.back());
  }
  const int64_t tokens = max64(rows, cu.back() + random.between(0, 3));
  if (random.chance(0.2)) cu[random.between(0, rows)] = make.wild();
  p.cu_seqlens_q = make.int32("cu_seqlens_q", rows + 1, [&](int64_t b) { return cu[b]; });
  p.rows.cu_seqlens_q = p.cu_seqlens_q;
  p.seq_lens = make.ints("seq_lens", rows, [&](int64_t b) {
    return random.chance(0.1) ? 0 : make.value(make.query[b], make.query[b] + 20);
  });
  if (make.given()) p.input_ids = make.ints("input_ids", tokens, [&](int64_t t) { return 10 + t; });
  if (make.given()) p.position_ids = make.ints_out("position_ids", tokens);
  if (make.given()) p.query_lens = make.int32_out("query_lens", rows);
  if (make.given()) p.cached_lens = make.int32_out("cached_lens", rows);
  if (make.given()) p.use_initial_states = make.flags_out("use_initial_states", rows);
  if (p.input_ids || p.position_ids) p.rows.tokens = static_cast<int32_t>(tokens);
  p.pad_token = random.pick({0, 1, -1});
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<BareRow>(
      argc, argv, kUnderflow | kBadCount | kBadIndptr, testing::make,
      [](auto& cta, const KeepLastParams& p) { keep_last(cta, p); }, /*most_blocks=*/1);
}
