// The memory that a launch touches, in sectors of 32 bytes, on the work that the engines' own kernels were counted on:
// distinct sectors, and sectors that warps ask for (each access of a warp asks for the distinct sectors of its lanes).
//
//   work  rows  tokens a row  context                     page size
//   W1    256   5             500 to 1,000                32
//   W2    256   5             4k to 8k                    64
//   W3    8     5             100k to 128k                64
//   W4    256   5             one of 128k, 255 of 1k      64
//
// The least that any kernel touches follows from the tensors: each element that is read or written, once.
#include <cstddef>
#include <cstdint>

namespace specmeta::testing {
void note_access(const void* at, size_t size, int line, bool is_store);
}
#define SPECMETA_ON_LOAD(at, line) ::specmeta::testing::note_access(at, sizeof(*(at)), line, false)
#define SPECMETA_ON_STORE(at, line) ::specmeta::testing::note_access(at, sizeof(*(at)), line, true)

#include <map>
#include <set>
#include <tuple>

#include "specmeta/advance.h"
#include "specmeta/draft_step.h"
#include "specmeta/map_slots.h"
#include "specmeta/stage.h"
#include "specmeta/work.h"
#include "testing.h"

namespace specmeta::testing {
namespace {

constexpr int64_t kSector = 32;
constexpr int32_t kWarp = 32;

struct Access {
  int line;
  int64_t turn;  // how often this thread has been at the line before
  bool is_store;
  int64_t sector;
};

thread_local std::vector<Access>* accesses = nullptr;
thread_local std::map<std::pair<int, bool>, int64_t> turns;

}  // namespace

void note_access(const void* at, size_t size, int line, bool is_store) {
  if (!accesses) return;
  const auto address = reinterpret_cast<int64_t>(at);
  const int64_t turn = turns[{line, is_store}]++;
  for (int64_t sector = address / kSector; sector <= (address + static_cast<int64_t>(size) - 1) / kSector; ++sector) {
    accesses->push_back({line, turn, is_store, sector});
  }
}

namespace {

struct Count {
  int64_t distinct_read = 0, distinct_written = 0;
  int64_t issued_read = 0, issued_written = 0;
};

// Runs an operation by blocks, one after the other: a block waits for earlier ones only.
template <class Row, class Params, class Operation>
Count count(ThreadPool& pool, const Params& params, int32_t blocks, Operation operation) {
  SyncSites sites;
  const int32_t threads = count_threads(params.rows.batch);
  std::vector<uint64_t> words(static_cast<size_t>(workspace_words(params.rows.batch)) + 4);
  Params with_workspace = params;
  // On a sector's edge, as a tensor of torch is.
  const auto address = reinterpret_cast<uintptr_t>(words.data());
  with_workspace.rows.workspace = words.data() + (kSector - address % kSector) % kSector / sizeof(uint64_t);
  with_workspace.rows.workspace_words = static_cast<int64_t>(words.size()) - 4;

  std::set<int64_t> read, written;
  Count result;
  for (int32_t block = 0; block < blocks; ++block) {
    typename ThreadCta<Row>::Shared shared(threads, sites, 0);
    std::vector<std::vector<Access>> by_thread(threads);
    pool.run([&](int64_t rank) {
      if (rank >= threads) return;
      accesses = &by_thread[static_cast<size_t>(rank)];
      turns.clear();
      ThreadCta<Row> cta(shared, static_cast<int32_t>(rank), with_workspace.rows, block, blocks, kLeastShare);
      cta.enter();
      operation(cta, with_workspace);
      cta.leave();
      accesses = nullptr;
    });
    for (int32_t warp = 0; warp < threads / kWarp; ++warp) {
      std::set<std::tuple<int, int64_t, bool, int64_t>> issued;
      for (int32_t lane = 0; lane < kWarp; ++lane) {
        for (const Access& access : by_thread[static_cast<size_t>(warp * kWarp + lane)]) {
          issued.insert({access.line, access.turn, access.is_store, access.sector});
          (access.is_store ? written : read).insert(access.sector);
        }
      }
      for (const auto& [line, turn, is_store, sector] : issued)
        ++(is_store ? result.issued_written : result.issued_read);
    }
  }
  result.distinct_read = static_cast<int64_t>(read.size());
  result.distinct_written = static_cast<int64_t>(written.size());
  return result;
}

// Tensors, each on a sector's edge; `sectors` is what they have.
class Tensors {
 public:
  template <class T>
  T* add(const std::vector<T>& values) {
    memory_.emplace_back(values.size() * sizeof(T) + kSector);
    const auto address = reinterpret_cast<uintptr_t>(memory_.back().data());
    char* data = memory_.back().data() + (kSector - address % kSector) % kSector;
    std::memcpy(data, values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(data);
  }

 private:
  std::vector<std::vector<char>> memory_;
};

int64_t sectors(int64_t elements, int64_t size) {
  return (elements * size + kSector - 1) / kSector;
}

struct Work {
  const char* name;
  int32_t rows;
  int64_t low, high;  // context
  int64_t page_size;
  int64_t published_read, published_written;  // of an engine's own kernels: the least for the same work
};

void check(const char* what, const Work& work, int32_t blocks, const Count& got, int64_t least_read,
           int64_t least_written) {
  std::printf("%s %s, %d blocks: least %" PRId64 " + %" PRId64 ", distinct %" PRId64 " + %" PRId64 ", issued %" PRId64
              " + %" PRId64 "\n",
              what, work.name, blocks, least_read, least_written, got.distinct_read, got.distinct_written,
              got.issued_read, got.issued_written);
  const int64_t distinct = got.distinct_read + got.distinct_written;
  SPECMETA_CHECK(10 * distinct <= 11 * (least_read + least_written), "%" PRId64 " distinct sectors", distinct);
  SPECMETA_CHECK(got.issued_read <= 2 * least_read, "%" PRId64 " sectors asked for", got.issued_read);
}

void run(ThreadPool& pool, const Work& work) {
  constexpr int32_t kTokens = 5;
  const int32_t rows = work.rows, tokens = rows * kTokens;
  Random random(1);
  std::vector<int32_t> lens, num_pages, cu{0};
  std::vector<int64_t> positions;
  int64_t used = 0, page_sectors = 0;  // of the used pages
  int64_t token_page_sectors = 0;      // of the pages that query tokens stand in
  const bool is_skewed = work.low < 0;
  for (int32_t b = 0; b < rows; ++b) {
    const int64_t length = !is_skewed ? random.between(work.low, work.high) : b == rows / 3 ? work.high : 1000;
    lens.push_back(static_cast<int32_t>(length));
    cu.push_back(cu.back() + kTokens);
    for (int32_t j = 0; j < kTokens; ++j) positions.push_back(length - kTokens + j);
    const int64_t pages = (length + work.page_size - 1) / work.page_size;
    num_pages.push_back(static_cast<int32_t>(pages));
    used += pages;
    page_sectors += sectors(pages, 4);
    token_page_sectors += sectors(pages, 4) - (length - kTokens) / work.page_size * 4 / kSector;
  }
  int32_t width = 8;
  while (width * work.page_size < work.high) width *= 2;
  Tensors tensors;
  Pages pages;
  pages.page_size = Divider(work.page_size);
  std::vector<int32_t> ids(static_cast<size_t>(rows) * width);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.between(1, 1 << 20));
  pages.page_table = {tensors.add(ids), width, width};
  pages.num_pages = tensors.add(num_pages);

  Layout layout;
  layout.kv_indptr = tensors.add(std::vector<int32_t>(rows + 1));
  layout.kv_capacity = static_cast<int32_t>(used);
  layout.kv_indices = tensors.add(std::vector<int32_t>(static_cast<size_t>(used)));
  layout.last_page_len = tensors.add(std::vector<int32_t>(rows));
  layout.slot_mapping = tensors.add(std::vector<int64_t>(tokens));
  const int64_t by_row = sectors(rows, 4), by_row_and_end = sectors(rows + 1, 4), by_token = sectors(tokens, 8);
  const int64_t least_written = 2 * by_row + by_row_and_end + 2 * by_token + sectors(used, 4);

  {
    StageParams p;
    p.rows.batch = p.rows.slots = rows;
    p.rows.tokens = tokens;
    p.pages = pages;
    p.layout = layout;
    std::vector<int32_t> committed;
    for (const int32_t length : lens) committed.push_back(length - kTokens);
    p.committed_lens = tensors.add(committed);
    p.query_lens = tensors.add(std::vector<int32_t>(rows, kTokens));
    p.layout.seq_lens = {tensors.add(std::vector<int32_t>(rows)), false};
    p.position_ids = {tensors.add(std::vector<int64_t>(tokens)), true};
    const int32_t blocks = count_blocks(rows, specmeta::work(p), /*is_repeatable=*/true);
    const Count got =
        count<LayoutRow>(pool, p, blocks, [](auto& cta, const StageParams& params) { stage(cta, params); });
    check("stage", work, blocks, got, page_sectors + 3 * by_row, least_written);
    // The page tables' order is drawn here, so the least differs a little from what was published.
    const int64_t published = work.published_read + work.published_written;
    const int64_t distinct = got.distinct_read + got.distinct_written;
    SPECMETA_CHECK(100 * distinct <= 112 * published, "%" PRId64 " distinct sectors, %" PRId64 " published", distinct,
                   published);
  }
  {
    AdvanceParams p;
    p.rows.batch = p.rows.slots = rows;
    p.rows.tokens = tokens;
    p.rows.cu_seqlens_q = tensors.add(cu);
    p.pages = pages;
    p.layout = layout;
    p.num_counts = rows;
    p.num_accepted = {tensors.add(std::vector<int32_t>(rows)), false};
    p.seq_lens = p.layout.seq_lens = {tensors.add(lens), false};
    p.position_ids = {tensors.add(positions), true};
    const int32_t blocks = count_blocks(rows, specmeta::work(p), /*is_repeatable=*/true);
    const Count got =
        count<LayoutRow>(pool, p, blocks, [](auto& cta, const AdvanceParams& params) { advance(cta, params); });
    check("advance", work, blocks, got, page_sectors + 3 * by_row + by_row_and_end + by_token, least_written);
  }
  {
    MapSlotsParams p;
    p.rows.batch = p.rows.slots = rows;
    p.rows.tokens = p.num_slots = tokens;
    p.rows.cu_seqlens_q = tensors.add(cu);
    p.pages = pages;
    p.position_ids = {tensors.add(positions), true};
    p.slot_mapping = layout.slot_mapping;
    const int32_t blocks = count_blocks(rows, specmeta::work(p), /*is_repeatable=*/true);
    const Count got =
        count<SlotsRow>(pool, p, blocks, [](auto& cta, const MapSlotsParams& params) { map_slots(cta, params); });
    check("map_slots", work, blocks, got, token_page_sectors + by_row + by_row_and_end + by_token, by_token);
  }
  {  // the first of a draft loop, without the ledger; it leaves the same lengths
    DraftStepParams p;
    p.rows.batch = p.rows.slots = p.rows.tokens = rows;
    p.pages = pages;
    p.layout = layout;
    std::vector<int32_t> rejected, verified;
    for (const int32_t length : lens) {
      rejected.push_back(static_cast<int32_t>(random.between(0, kTokens - 1)));
      verified.push_back(length - 1 + rejected.back());
    }
    p.num_rejected = tensors.add(rejected);
    p.seq_lens = p.layout.seq_lens = {tensors.add(verified), false};
    p.draft_tokens = {tensors.add(std::vector<int64_t>(rows)), true};
    p.position_ids = {tensors.add(std::vector<int64_t>(rows)), true};
    p.input_ids = {tensors.add(std::vector<int64_t>(rows)), true};
    const int64_t by_draft = sectors(rows, 8);
    const int32_t blocks = count_blocks(rows, specmeta::work(p), /*is_repeatable=*/true);
    const Count got =
        count<LayoutRow>(pool, p, blocks, [](auto& cta, const DraftStepParams& params) { draft_step(cta, params); });
    check("draft_step", work, blocks, got, page_sectors + 3 * by_row + 2 * by_draft,
          2 * by_row + by_row_and_end + 3 * by_draft + sectors(used, 4));
  }
}

}  // namespace
}  // namespace specmeta::testing

int main() {
  using namespace specmeta::testing;
  ThreadPool pool(specmeta::kTileRows);
  for (const Work& work : {
           Work{"W1", 256, 500, 1000, 32, 943, 1500},
           Work{"W2", 256, 4000, 8000, 64, 3261, 3828},
           Work{"W3", 8, 100000, 128000, 64, 1801, 1819},
           Work{"W4", 256, -1, 128000, 64, 1086, 1535},
       }) {
    run(pool, work);
  }
  return 0;
}
