// What the tests share: random numbers that are the same everywhere, memory without slack, and the comparison of serial
// and threaded runs.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "specmeta/params.h"
#include "thread_cta.h"

namespace specmeta::testing {

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // In [low, high]; low where the interval is empty.
  int64_t between(int64_t low, int64_t high) {
    return high <= low ? low : low + static_cast<int64_t>(next() % (static_cast<uint64_t>(high - low) + 1));
  }
  bool chance(double probability) { return static_cast<double>(next() >> 11) < probability * 9007199254740992.0; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  uint64_t state_;
};

// The tensors of one call, each in a heap block of exactly its size (AddressSanitizer sees an access past either end),
// none of them null.
class Buffers {
 public:
  // Of every `stride` elements the first `width` are the tensor's own; the others must keep their values.
  template <class T>
  T* add(const char* name, const std::vector<T>& values, int64_t stride = 1, int64_t width = 1) {
    Block block;
    block.name = name;
    block.element = sizeof(T);
    block.stride = static_cast<size_t>(stride);
    block.width = static_cast<size_t>(width);
    block.size = values.size() * sizeof(T);
    block.data.reset(new char[block.size]);
    if (block.size) std::memcpy(block.data.get(), values.data(), block.size);
    block.initial.assign(block.data.get(), block.data.get() + block.size);
    blocks_.push_back(std::move(block));
    return reinterpret_cast<T*>(blocks_.back().data.get());
  }

  // What is in the blocks now is what difference() compares with; between the rows of a slice, what was there first.
  void expect_this() {
    for (Block& block : blocks_) {
      block.expected.assign(block.data.get(), block.data.get() + block.size);
      for (size_t at = 0; at < block.size; at += block.element) {
        if (at / block.element % block.stride >= block.width) {
          std::memcpy(block.expected.data() + at, block.initial.data() + at, block.element);
        }
      }
    }
  }

  // Puts the initial values back.
  void restore() {
    for (Block& block : blocks_) {
      if (block.size) std::memcpy(block.data.get(), block.initial.data(), block.size);
    }
  }

  // Names the first element that differs, or returns "".
  std::string difference() const {
    for (const Block& block : blocks_) {
      for (size_t at = 0; at < block.size; at += block.element) {
        if (std::memcmp(block.data.get() + at, block.expected.data() + at, block.element) != 0) {
          return std::string(block.name) + "[" + std::to_string(at / block.element) +
                 "]: " + std::to_string(read(block.expected.data() + at, block.element)) + " expected, " +
                 std::to_string(read(block.data.get() + at, block.element)) + " found";
        }
      }
    }
    return "";
  }

 private:
  struct Block {
    const char* name;
    size_t element;
    size_t size;
    size_t stride;
    size_t width;
    std::unique_ptr<char[]> data;
    std::vector<char> initial;
    std::vector<char> expected;
  };

  static int64_t read(const char* from, size_t element) {
    int32_t narrow;
    int64_t wide;
    if (element == 1) return static_cast<unsigned char>(*from);
    std::memcpy(element == 4 ? static_cast<void*>(&narrow) : &wide, from, element);
    return element == 4 ? narrow : wide;
  }

  std::vector<Block> blocks_;
};

// Ends the program where the condition does not hold.
#define SPECMETA_CHECK(condition, ...)                            \
  do {                                                            \
    if (!(condition)) {                                           \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
      std::exit(1);                                               \
    }                                                             \
  } while (false)

inline int64_t option(int argc, char** argv, const char* name, int64_t otherwise) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], name) == 0) return std::atoll(argv[i + 1]);
  }
  return otherwise;
}

// A way to run an operation: by so many Ctas of so many threads.
struct Grid {
  int32_t blocks;
  int32_t threads;
};
constexpr int32_t kMostRows = 512;
constexpr int32_t kMostSteps = 3;

// How many walks a launch has, each with Ctas of its own.
template <class Params>
int32_t count_steps(const Params&) {
  return 1;
}
inline int32_t count_steps(const DraftListsParams& params) {
  return params.num_steps;
}

// A workspace of kMostSteps parts for launches on a grid, and where it begins.
inline int64_t part_words(const Grid& grid) {
  const int64_t words = WorkspaceLayout(kMostRows, grid.threads).size();
  return (words + kSectorWords - 1) / kSectorWords * kSectorWords;
}
inline uint64_t* first_word(std::vector<uint64_t>& words) {
  return words.data() + kSectorWords - reinterpret_cast<uintptr_t>(words.data()) % 32 / 8;
}

// Runs an operation once; `words` is a workspace for it. Where `pool` has the threads of one Cta, the Ctas run in turn.
// A thread that is done with its part of a step goes on to the next, so that steps run beside each other.
template <class Row, class Params, class Operation>
void run_threads(ThreadPool& pool, const Grid& grid, const Params& params, std::vector<uint64_t>& words,
                 Operation operation, SyncSites& sites, uint64_t skipped) {
  using Shared = typename ThreadCta<Row>::Shared;
  const int32_t num_steps = count_steps(params);
  std::vector<std::unique_ptr<Shared>> shared;
  for (int32_t i = 0; i < num_steps * grid.blocks; ++i) {
    shared.push_back(std::make_unique<Shared>(grid.threads, sites, skipped));
  }
  Params with_workspace = params;
  with_workspace.rows.workspace = first_word(words);
  with_workspace.rows.workspace_words = part_words(grid);
  int32_t begun = 0;
  const auto run = [&](int64_t i) {
    const auto block = begun + static_cast<int32_t>(i / grid.threads);
    for (int32_t step = 0; step < num_steps; ++step) {
      ThreadCta<Row> cta(*shared[step * grid.blocks + block], static_cast<int32_t>(i % grid.threads),
                         with_workspace.rows, block, grid.blocks, /*least_share=*/3, step);
      cta.enter();
      operation(cta, with_workspace);
      cta.leave();
    }
  };
  for (; begun < grid.blocks; begun += static_cast<int32_t>(pool.size() / grid.threads)) pool.run(run);
}

// Runs an operation on random arguments with one thread, with one Cta of several, and with several Ctas, and compares
// every tensor. Options:
//   --cases N      how many
//   --case I       only this one
//   --syncs N      fail unless the algorithm calls sync() in N places
//   --skip-sync I  the I-th of these places does nothing, and nothing is compared
//
// `make(random, buffers, many_rows)` returns the parameters. Bits of `status` that no case raised, of those in
// `faults`, are an error: the cases would be too tame. `most_blocks`: 1 for an operation that one Cta does alone.
template <class Row, class Make, class Operation>
int compare_with_serial(int argc, char** argv, int32_t faults, Make make, Operation operation,
                        int32_t most_blocks = INT32_MAX) {
  const int64_t cases = option(argc, argv, "--cases", 600);
  const int64_t only = option(argc, argv, "--case", -1);
  const int64_t num_syncs = option(argc, argv, "--syncs", -1);
  const int64_t skip = option(argc, argv, "--skip-sync", -1);

  static constexpr Grid kGrids[] = {{1, 4}, {1, 5}, {1, 16}, {1, 40}, {2, 4}, {4, 5}, {8, 4}, {16, 4}, {4, 64}};
  static constexpr size_t kNumGrids = sizeof(kGrids) / sizeof(kGrids[0]);
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const Grid& grid : kGrids) pools.push_back(std::make_unique<ThreadPool>(grid.blocks * grid.threads));
  // Each grid has one workspace for all its launches, of whatever numbers of rows.
  std::vector<std::vector<uint64_t>> workspaces;
  for (const Grid& grid : kGrids) {
    workspaces.emplace_back(static_cast<size_t>(kMostSteps * part_words(grid) + kSectorWords));
  }
  int64_t runs[kNumGrids] = {};
  SyncSites sites;
  uint64_t skipped = 0;
  int32_t raised = 0;
  for (int64_t i = 0; i < cases; ++i) {
    if (only >= 0 && i != only) continue;
    Random random(static_cast<uint64_t>(i));
    Buffers buffers;
    // Up to several tiles of the largest Cta, which is slow and runs these cases only.
    const bool many_rows = i % 8 == 0;
    const auto params = make(random, buffers, many_rows);

    SerialCta<Row> serial;
    operation(serial, params);
    buffers.expect_this();
    if (params.rows.status) {
      const int64_t length = params.rows.row_to_slot ? params.rows.slots + 1 : params.rows.batch;
      for (int64_t s = 0; s < length; ++s) raised |= params.rows.status[s];
    }
    // The first cases meet every place.
    if (skip >= 0 && skipped == 0 && i == 16) {
      const std::vector<uint64_t> list = sites.list();
      SPECMETA_CHECK(skip < static_cast<int64_t>(list.size()), "there are %zu places", list.size());
      skipped = list[skip];
    }

    for (size_t k = 0; k < kNumGrids; ++k) {
      const Grid& grid = kGrids[k];
      if (grid.blocks > most_blocks) continue;
      if (grid.threads == 64 && (!many_rows || (grid.blocks > 1 && i % 32))) continue;
      SPECMETA_CHECK(params.rows.batch <= kMostRows, "%d rows", params.rows.batch);
      SPECMETA_CHECK(count_steps(params) <= kMostSteps, "%d steps", count_steps(params));
      if (grid.blocks == 16 && i % 4) continue;
      buffers.restore();
      std::vector<uint64_t>& words = workspaces[k];
      if (skipped) std::fill(words.begin(), words.end(), 0);
      // Ctas in turn: none may wait for one that hasn't begun.
      ThreadPool& pool = grid.blocks == 4 && grid.threads == 5 && i % 2 ? *pools[1] : *pools[k];
      run_threads<Row>(pool, grid, params, words, operation, sites, skipped);
      ++runs[k];
      if (skipped) continue;  // what comes out then is anyone's guess: ThreadSanitizer has the word
      const std::string difference = buffers.difference();
      if (!difference.empty()) {
        std::printf("case %" PRId64 ", %d x %d threads: %s\n", i, grid.blocks, grid.threads, difference.c_str());
        return 1;
      }
      const int64_t size = part_words(grid);
      const int64_t num_tail = WorkspaceLayout(kMostRows, grid.threads).num_chain_words();
      for (int32_t step = 0; step < kMostSteps; ++step) {
        const uint64_t* first = first_word(words) + step * size;
        for (int64_t word = 0; word < size; word += word == WorkspaceLayout::kHeader - 1 ? size - num_tail - word : 1) {
          SPECMETA_CHECK(first[word] == 0, "case %" PRId64 ": word %" PRId64 " of the workspace", i, word);
        }
      }
    }
  }

  for (size_t k = 0; k < kNumGrids; ++k) {
    std::printf("%" PRId64 " runs of %d x %d threads\n", runs[k], kGrids[k].blocks, kGrids[k].threads);
  }
  const std::vector<uint64_t> list = sites.list();
  for (const uint64_t site : list) std::printf("sync in line %d\n", static_cast<int>(site & 0xffff));
  std::printf("status bits raised: %d\n", static_cast<int>(raised & 63));
  if (num_syncs >= 0 && num_syncs != static_cast<int64_t>(list.size())) {
    std::printf("sync() is called in %zu places, and tests without each exist for %" PRId64 "\n", list.size(),
                num_syncs);
    return 1;
  }
  if (only < 0 && (raised & faults) != faults) {
    std::printf("no case raises %d\n", static_cast<int>(faults & ~raised));
    return 1;
  }
  return 0;
}

}  // namespace specmeta::testing
