// map_slots: serial and threaded runs give the same.
#include "generate.h"
#include "specmeta/map_slots.h"

namespace specmeta::testing {
namespace {

MapSlotsParams make(Random& random, Buffers& buffers, bool many_rows) {
  Generator make(random, buffers, many_rows);
  MapSlotsParams p;
  do {
    p.pages = make.make_pages();
  } while (!make.pages_by_slot());
  p.rows = make.make_rows(/*repeated_slots=*/true, /*slots_known=*/true);
  p.rows.cu_seqlens_q = make.make_query(5);
  p.rows.tokens = make.tokens;
  std::vector<int64_t> positions;
  for (const int64_t q : make.query) {
    const int64_t first = clamp64(make.length(q), 0, kInt32Max) - q;
    for (int64_t j = 0; j < q; ++j) positions.push_back(make.value(first + j, first + j));
  }
  positions.resize(static_cast<size_t>(make.tokens));
  p.position_ids = make.ints("position_ids", make.tokens, [&](int64_t t) { return positions[t]; });
  p.slot_mapping = make.make_slot_mapping(p.num_slots);
  p.pad_slot = random.pick<int64_t>({-1, 7, INT64_MIN});
  return p;
}

}  // namespace
}  // namespace specmeta::testing

int main(int argc, char** argv) {
  using namespace specmeta;
  return testing::compare_with_serial<SlotsRow>(argc, argv, kOverflow | kBadCount | kBadSlot | kBadPage | kBadIndptr,
                                                testing::make,
                                                [](auto& cta, const MapSlotsParams& p) { map_slots(cta, p); });
}
