// count_sampled: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/count_sampled.h"

namespace specmeta::testing {
namespace {

CountSampledParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  CountSampledParams p;
  p.rows = make.make_rows(/*repeated_slots=*/true, /*slots_known=*/false);
  const int64_t rows = make.rows;
  p.vocab_size = random.pick<int64_t>({1, 3, 3, 3, kInt32Max});
  p.sampled_tokens = make.ints_table("sampled_tokens", rows, random.between(0, 6), [&](int64_t, int64_t) {
    return random.chance(0.2) ? random.pick({int64_t{-1}, p.vocab_size}) : make.token();
  });
  if (make.given()) p.discarded = make.flags("discarded", rows, 0.3);
  if (make.given()) p.backup_tokens = make.ints("backup_tokens", rows, [&](int64_t) { return make.token(); });
  if (make.given()) p.num_sampled = make.ints_out("num_sampled", rows);
  if (make.given()) p.next_tokens = make.ints_out("next_tokens", rows);
  p.pad_token = random.pick({0, 1, -1});
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<BareRow>(argc, argv, kBadCount | kBadSlot, testing::make,
                                               [](auto& cta, const CountSampledParams& p) { count_sampled(cta, p); });
}
