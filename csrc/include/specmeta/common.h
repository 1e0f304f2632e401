// What every operation's algorithm uses: host/device markers, integers of either width, division without a divide.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SPECMETA_HD __host__ __device__ __forceinline__
#else
#define SPECMETA_HD inline
#endif

namespace specmeta {

inline constexpr int64_t kInt32Max = 2147483647;
inline constexpr int64_t kUnknownSize = INT64_MAX;
inline constexpr int64_t kCountLimit = int64_t{1} << 40;     // counts and lengths are read clamped to this
inline constexpr int64_t kPositionLimit = int64_t{1} << 61;  // positions too: a sum of two cannot overflow

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
SPECMETA_HD int64_t clamp64(int64_t x, int64_t lo, int64_t hi) {
  return x < lo ? lo : (x > hi ? hi : x);
}
SPECMETA_HD int32_t saturate32(int64_t x) {
  return static_cast<int32_t>(clamp64(x, -kInt32Max - 1, kInt32Max));
}

// A tensor of int32 or int64. A store into int32 saturates.
struct Ints {
  void* data = nullptr;
  bool wide = false;

  SPECMETA_HD explicit operator bool() const { return data != nullptr; }
  SPECMETA_HD int64_t get(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  SPECMETA_HD int64_t get_count(int64_t i) const { return clamp64(get(i), -kCountLimit, kCountLimit); }
  SPECMETA_HD void set(int64_t i, int64_t x) const {
    if (wide) {
      static_cast<int64_t*>(data)[i] = x;
    } else {
      static_cast<int32_t*>(data)[i] = saturate32(x);
    }
  }
};

// Two-dimensional tensors: the last dimension is contiguous, the row stride is anything.
struct Table {
  int32_t* data = nullptr;
  int64_t stride = 0;
  int64_t width = 0;

  SPECMETA_HD explicit operator bool() const { return data != nullptr; }
  SPECMETA_HD int32_t* row(int64_t i) const { return data + i * stride; }
};

struct IntsTable {
  Ints ints;
  int64_t stride = 0;
  int64_t width = 0;

  SPECMETA_HD explicit operator bool() const { return static_cast<bool>(ints); }
  SPECMETA_HD int64_t get(int64_t i, int64_t j) const { return ints.get(i * stride + j); }
  SPECMETA_HD void set(int64_t i, int64_t j, int64_t x) const { ints.set(i * stride + j, x); }
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
