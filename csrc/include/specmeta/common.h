// What every operation's algorithm uses: host/device markers, integers of either width, division without a divide.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SPECMETA_HD __host__ __device__ __forceinline__
#else
#define SPECMETA_HD inline
#endif
#if defined(__CUDA_ARCH__)
#define SPECMETA_UNROLL _Pragma("unroll")
#define SPECMETA_NO_UNROLL _Pragma("unroll 1")
#else
#define SPECMETA_UNROLL
#define SPECMETA_NO_UNROLL
#endif

// Every access to a tensor goes through load() and store(). A test may count them: it defines these two beforehand.
#ifndef SPECMETA_ON_LOAD
#define SPECMETA_ON_LOAD(at, line)
#define SPECMETA_ON_STORE(at, line)
#endif

namespace specmeta {

inline constexpr int64_t kInt32Max = 2147483647;
inline constexpr int32_t kUnknownSize = INT32_MAX;
inline constexpr int64_t kMaxSteps = 65535;               // of draft_lists: a GPU's limit for a grid's y
inline constexpr int64_t kCountLimit = int64_t{1} << 40;  // counts and lengths are read clamped to this

// Bits of `status` (rule 5 of the contract).
enum Status : int32_t {
  kOverflow = 1,
  kUnderflow = 2,
  kBadCount = 4,
  kBadSlot = 8,
  kBadPage = 16,
  kBadIndptr = 32,
};

SPECMETA_HD int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
SPECMETA_HD int64_t max64(int64_t a, int64_t b) {
  return a > b ? a : b;
}
SPECMETA_HD int32_t min32(int32_t a, int32_t b) {
  return a < b ? a : b;
}
SPECMETA_HD uint32_t min32(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
SPECMETA_HD int32_t max32(int32_t a, int32_t b) {
  return a > b ? a : b;
}
SPECMETA_HD int64_t clamp64(int64_t x, int64_t lo, int64_t hi) {
  return x < lo ? lo : (x > hi ? hi : x);
}
SPECMETA_HD int32_t saturate32(int64_t x) {
  return static_cast<int32_t>(clamp64(x, INT32_MIN, INT32_MAX));
}

// Of x > 0, rounded down.
SPECMETA_HD int32_t floor_log2(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(x));
#else
  return 31 - __builtin_clz(x);
#endif
}

template <class T>
SPECMETA_HD T load(const T* at, [[maybe_unused]] int line = __builtin_LINE()) {
  SPECMETA_ON_LOAD(at, line);
  return *at;
}
template <class T>
SPECMETA_HD void store(T* at, const T& x, [[maybe_unused]] int line = __builtin_LINE()) {
  SPECMETA_ON_STORE(at, line);
  *at = x;
}

// An address in a tensor, where what it was made of was kept in a Cta's own memory: for all that a compiler knows, it
// might lead there, too.
template <class T>
SPECMETA_HD const T* to_tensor(const T* at) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(at));
#endif
  return at;
}

// What was read of a number of either width.
struct Fetched {
  uint32_t low = 0, high = 0;
};

// A tensor of int32 or int64. A store into int32 saturates.
struct Ints {
  void* data = nullptr;
  bool wide = false;

  SPECMETA_HD explicit operator bool() const { return data != nullptr; }
  SPECMETA_HD int64_t get(int64_t i, int line = __builtin_LINE()) const {
    return wide ? load(static_cast<const int64_t*>(data) + i, line) : load(static_cast<const int32_t*>(data) + i, line);
  }
  // get() in two parts: reads that are fetched one after the other are all under way before the first is waited for.
  // NOTE: by halves, which are put together later: a load of either width would go into a register of its own, and the
  // choice between them would wait.
  SPECMETA_HD Fetched fetch(int64_t i, int line = __builtin_LINE()) const {
#if defined(__CUDA_ARCH__)
    const auto* at = static_cast<const uint32_t*>(data) + (i << (wide ? 1 : 0));
    return {load(at, line), wide ? load(at + 1, line) : 0};
#else
    const uint64_t x =
        wide ? load(static_cast<const uint64_t*>(data) + i, line) : load(static_cast<const uint32_t*>(data) + i, line);
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
#endif
  }
  SPECMETA_HD int64_t value(Fetched x) const {
    return wide ? static_cast<int64_t>(uint64_t{x.high} << 32 | x.low) : static_cast<int32_t>(x.low);
  }
  // Of counts and lengths.
  SPECMETA_HD int64_t count(Fetched x) const {
    if (!wide) return value(x);
    return clamp64(value(x), -kCountLimit, kCountLimit);
  }
  SPECMETA_HD int64_t get_count(int64_t i, int line = __builtin_LINE()) const { return count(fetch(i, line)); }
  SPECMETA_HD void set(int64_t i, int64_t x, int line = __builtin_LINE()) const {
    if (wide) {
      store(static_cast<int64_t*>(data) + i, x, line);
    } else {
      store(static_cast<int32_t*>(data) + i, saturate32(x), line);
    }
  }
};

// Two-dimensional tensors: the last dimension is contiguous, the row stride is anything.
struct Table {
  int32_t* data = nullptr;
  int64_t stride = 0;
  int32_t width = 0;

  SPECMETA_HD explicit operator bool() const { return data != nullptr; }
  SPECMETA_HD int32_t* row(int64_t i) const { return data + i * stride; }
};

struct IntsTable {
  Ints ints;
  int64_t stride = 0;
  int32_t width = 0;

  SPECMETA_HD explicit operator bool() const { return static_cast<bool>(ints); }
  SPECMETA_HD int64_t get(int64_t i, int64_t j, int line = __builtin_LINE()) const {
    return ints.get(i * stride + j, line);
  }
  SPECMETA_HD void set(int64_t i, int64_t j, int64_t x, int line = __builtin_LINE()) const {
    ints.set(i * stride + j, x, line);
  }
};

// n / d for 0 <= n < 2^31 and 1 <= d < 2^31: with shift = 31 + ceil(log2 d) and magic = ceil(2^shift / d) the product's
// error stays below one part in d (Granlund and Montgomery, "Division by invariant integers using multiplication").
struct Divider {
  uint32_t divisor = 1;
  uint32_t magic = uint32_t{1} << 31;
  uint32_t shift = 31;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << (shift - 31)) < divisor) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  SPECMETA_HD uint32_t div(uint32_t n) const { return static_cast<uint32_t>((uint64_t{n} * magic) >> shift); }
  SPECMETA_HD uint32_t mod(uint32_t n) const { return n - div(n) * divisor; }
};

}  // namespace specmeta
