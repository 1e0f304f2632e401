// A Cta of real threads: ThreadSanitizer sees a missing sync() and an element that two threads write, with no GPU
// present.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "specmeta/cta.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);
#else
inline void AnnotateIgnoreSyncBegin(const char*, int) {}
inline void AnnotateIgnoreSyncEnd(const char*, int) {}
#endif

namespace specmeta::testing {

// A place in an algorithm that calls sync().
struct SyncSite {
  const char* file;
  int line;

  bool operator==(const SyncSite& other) const { return line == other.line && std::strcmp(file, other.file) == 0; }
};

// The serial Cta; it notes the places that call sync(), in the order in which they are met.
template <class RowType>
class RecordingCta : public SerialCta<RowType> {
 public:
  explicit RecordingCta(std::vector<SyncSite>& sites) : sites_(sites) {}

  void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    const SyncSite site{file, line};
    for (const SyncSite& known : sites_) {
      if (known == site) return;
    }
    sites_.push_back(site);
  }

 private:
  std::vector<SyncSite>& sites_;
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
class ThreadCta {
 public:
  using Row = RowType;

  // What the threads of one Cta share, made for each run. `skipped` (or null) is a place whose sync() does nothing.
  struct Shared {
    Shared(int64_t size, const SyncSite* skipped)
        : barriers{Barrier(size), Barrier(size)}, sum_barrier(size), tile(size), addends(size), skipped(skipped) {}

    // NOTE: two in turn. ThreadSanitizer takes a thread that is slow to leave a barrier to come after everything that
    // the others did before they entered the same barrier once more, and so would overlook races.
    Barrier barriers[2];
    Barrier sum_barrier;
    std::vector<Row> tile;
    std::vector<std::atomic<int64_t>> addends;
    const SyncSite* skipped;
  };

  ThreadCta(Shared& shared, int64_t rank) : shared_(shared), rank_(rank) {}

  int64_t rank() const { return rank_; }
  int64_t size() const { return static_cast<int64_t>(shared_.tile.size()); }
  void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (shared_.skipped && *shared_.skipped == SyncSite{file, line}) return;
    shared_.barriers[turn_].wait();
    turn_ ^= 1;
  }
  // NOTE: a sum promises no order of memory, only sync() does. So ThreadSanitizer does not get to see the barriers in
  // here: else they would stand in for a sync() that is missing.
  int64_t exclusive_sum(int64_t x, int64_t& total) const {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    shared_.addends[rank_].store(x, std::memory_order_relaxed);
    shared_.sum_barrier.wait();
    int64_t before = 0;
    total = 0;
    for (int64_t i = 0; i < size(); ++i) {
      if (i == rank_) before = total;
      total += shared_.addends[i].load(std::memory_order_relaxed);
    }
    shared_.sum_barrier.wait();  // the addends are read until here
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    return before;
  }
  Row* tile() const { return shared_.tile.data(); }
  void atomic_or(int32_t* at, int32_t bits) const { __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }

 private:
  Shared& shared_;
  int64_t rank_;
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
