// A Cta of real threads: ThreadSanitizer sees a missing sync() and an element that two threads write, with no GPU
// present.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "specmeta/grid.h"
#include "specmeta/rows.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);
#else
inline void AnnotateIgnoreSyncBegin(const char*, int) {}
inline void AnnotateIgnoreSyncEnd(const char*, int) {}
#endif

namespace specmeta::testing {

// The places in an algorithm that call sync(). Any thread adds to it; an order of memory that would hide a race does
// not come of that.
class SyncSites {
 public:
  void add(const char* file, int line) {
    for (std::atomic<uint64_t>& entry : entries_) {
      uint64_t known = entry.load(std::memory_order_relaxed);
      const uint64_t site = key(file, line);
      if (known == 0 && entry.compare_exchange_strong(known, site, std::memory_order_relaxed)) return;
      if (known == site) return;
    }
    std::abort();  // more than there is room for
  }
  // In an order that is the same in every run.
  std::vector<uint64_t> list() const {
    std::vector<uint64_t> sites;
    for (const std::atomic<uint64_t>& entry : entries_) {
      if (const uint64_t site = entry.load(std::memory_order_relaxed)) sites.push_back(site);
    }
    std::sort(sites.begin(), sites.end());
    return sites;
  }
  // Of the name, no more than tells the files apart.
  static uint64_t key(const char* file, int line) {
    uint64_t hash = 0;
    for (; *file; ++file) hash = hash * 31 + static_cast<unsigned char>(*file);
    return hash << 16 | static_cast<uint64_t>(line);
  }

 private:
  std::array<std::atomic<uint64_t>, 32> entries_{};
};

class Barrier {
 public:
  explicit Barrier(int64_t size) { pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(size)); }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  ~Barrier() { pthread_barrier_destroy(&barrier_); }

  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

template <class RowType>
class ThreadCta : public GridCta<ThreadCta<RowType>> {
 public:
  using Row = RowType;

  // What the threads of one Cta share, made for each run. `skipped` is a place whose sync() does nothing; 0: none.
  struct Shared {
    Shared(int32_t size, SyncSites& sites, uint64_t skipped)
        : barriers{Barrier(size), Barrier(size)},
          sum_barrier(size),
          tile(size),
          addends(size),
          sites(sites),
          skipped(skipped) {}

    // NOTE: two in turn. ThreadSanitizer takes a thread that is slow to leave a barrier to come after everything that
    // the others did before they entered the same barrier once more, and so would overlook races.
    Barrier barriers[2];
    Barrier sum_barrier;
    std::vector<Row> tile;
    std::vector<std::atomic<int64_t>> addends;
    GridState grid;
    WalkState walk;
    SyncSites& sites;
    uint64_t skipped;
  };

  ThreadCta(Shared& shared, int32_t rank, const Rows& rows, int32_t index, int32_t num_blocks, int64_t least_share = 3,
            int32_t step = 0)
      : GridCta<ThreadCta>(rows),
        shared_(shared),
        rank_(rank),
        index_(index),
        num_blocks_(num_blocks),
        least_share_(least_share),
        step_(step) {}

  int32_t rank() const { return rank_; }
  int32_t size() const { return static_cast<int32_t>(shared_.tile.size()); }
  int32_t lanes() const { return size() < 256 ? 4 : 32; }  // few in small Ctas, which have few rows; else a GPU's
  template <class Begin>
  int32_t find_owner(int32_t n, int32_t x, Begin begin) const {
    return specmeta::find_owner(n, x, begin);
  }
  void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (rank_ == 0) shared_.sites.add(file, line);
    if (shared_.skipped == SyncSites::key(file, line)) return;
    shared_.barriers[turn_].wait();
    turn_ ^= 1;
  }
  bool any(bool x) const { return count(x) > 0; }
  int32_t count(bool x) const {
    int64_t total;
    exclusive_sum(x, total);
    return static_cast<int32_t>(total);
  }
  // NOTE: a sum promises no order of memory, only sync() does. So ThreadSanitizer does not get to see the barriers in
  // here: else they would stand in for a sync() that is missing.
  int64_t exclusive_sum(int64_t x, int64_t& total) const {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    shared_.addends[rank_].store(x, std::memory_order_relaxed);
    shared_.sum_barrier.wait();
    int64_t before = 0;
    total = 0;
    for (int32_t i = 0; i < size(); ++i) {
      if (i == rank_) before = total;
      total += shared_.addends[i].load(std::memory_order_relaxed);
    }
    shared_.sum_barrier.wait();  // the addends are read until here
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    return before;
  }
  int64_t sum(int64_t x) const {
    int64_t total;
    exclusive_sum(x, total);
    return total;
  }
  int32_t min(int32_t x) const {
    int64_t total;
    int32_t least = INT32_MAX;
    for (int32_t i = 0; i < size(); ++i) {  // each in turn
      exclusive_sum(i == rank_ ? x : 0, total);
      least = min32(least, static_cast<int32_t>(total));
    }
    return least;
  }
  Row* tile() const { return shared_.tile.data(); }
  WalkState& walk_state() const { return shared_.walk; }
  void atomic_or(int32_t* at, int32_t bits) const { __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }

  int32_t num_blocks() const { return num_blocks_; }
  int32_t index() const { return index_; }
  int32_t tile_rows() const { return size(); }
  int32_t step() const { return step_; }
  int64_t least_share() const { return least_share_; }
  Row* records() { return this->template records_as<Row>(); }
  GridState& grid_state() const { return shared_.grid; }
  uint64_t peek(const uint64_t* at) const { return __atomic_load_n(at, __ATOMIC_RELAXED); }
  void post(uint64_t* at, uint64_t x) const { __atomic_store_n(at, x, __ATOMIC_RELAXED); }
  uint64_t acquire(const uint64_t* at) const { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
  uint64_t add(uint64_t* at, uint64_t x) const { return __atomic_fetch_add(at, x, __ATOMIC_ACQ_REL); }
  uint64_t release(uint64_t* at, uint64_t x) const { return __atomic_fetch_add(at, x, __ATOMIC_RELEASE); }
  // NOTE: ThreadSanitizer knows nothing of fences.
  void fence(const uint64_t* at) const { acquire(at); }
  void pause() const { std::this_thread::yield(); }

 private:
  Shared& shared_;
  int32_t rank_;
  int32_t index_;
  int32_t num_blocks_;
  int64_t least_share_;
  int32_t step_;
  int turn_ = 0;
};

// The threads of a Cta, kept from run to run.
class ThreadPool {
 public:
  explicit ThreadPool(int64_t size) : start_(size + 1), finish_(size + 1) {
    for (int64_t rank = 0; rank < size; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    work_ = nullptr;
    start_.wait();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t size() const { return static_cast<int64_t>(threads_.size()); }

  // work(rank) in every thread; returns when all are done.
  void run(std::function<void(int64_t)> work) {
    work_ = std::move(work);
    start_.wait();
    finish_.wait();
  }

 private:
  void serve(int64_t rank) {
    for (start_.wait(); work_; start_.wait()) {
      work_(rank);
      finish_.wait();
    }
  }

  Barrier start_;
  Barrier finish_;
  std::function<void(int64_t)> work_;
  std::vector<std::thread> threads_;
};

}  // namespace specmeta::testing
