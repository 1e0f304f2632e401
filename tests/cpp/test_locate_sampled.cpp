// locate_sampled: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/locate_sampled.h"

namespace specmeta::testing {
namespace {

LocateSampledParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  LocateSampledParams p;
  p.rows = make.make_rows(/*repeated_slots=*/true, /*slots_known=*/false);
  const int64_t rows = make.rows;
  while (!p.rows.cu_seqlens_q) p.rows.cu_seqlens_q = make.make_query(5);
  std::vector<int64_t> drafts, ends;
  for (int64_t b = 0; b < rows; ++b) {
    drafts.push_back(random.between(0, make.query[b] - 1));
    ends.push_back((b > 0 ? ends[b - 1] : 0) + drafts[b]);
  }
  p.cu_num_draft_tokens =
      make.int32("cu_num_draft_tokens", rows, [&](int64_t b) { return make.value(ends[b], ends[b]); });
  p.num_sampled = make.ints("num_sampled", rows, [&](int64_t b) { return make.value(0, drafts[b] + 1); });
  if (make.given()) p.num_rejected = make.int32_out("num_rejected", rows);
  if (make.given()) p.token_indices = make.int32_out("token_indices", rows);
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<BareRow>(argc, argv, kBadCount | kBadSlot | kBadIndptr, testing::make,
                                               [](auto& cta, const LocateSampledParams& p) { locate_sampled(cta, p); });
}
