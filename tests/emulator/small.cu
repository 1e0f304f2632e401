// Small kernels for tests/test_emulator.py: what they compute is known, or what is wrong with them.
// All have the same parameters.
#include <cstdint>
#include <cuda/atomic>

struct Params {
  const int64_t* x;
  const int64_t* y;
  int64_t* out;
  int64_t n;
};
#define KERNEL(name) extern "C" __global__ void name##_kernel(const __grid_constant__ Params p)
#define EACH                                           \
  const int i = blockIdx.x * blockDim.x + threadIdx.x; \
  const int64_t x = p.x[i], y = p.y[i];

KERNEL(add) {
  EACH p.out[i] = x + y;
}
KERNEL(sub) {
  EACH p.out[i] = x - y;
}
KERNEL(add3) {
  EACH p.out[i] = x + y + (y - 1) - (x >> 3);
}
KERNEL(mul) {
  EACH p.out[i] = x * y;
}
KERNEL(wide) {
  EACH p.out[i] = int64_t(int32_t(x)) * int32_t(y) + x;
}
KERNEL(uwide) {
  EACH p.out[i] = uint64_t(uint32_t(x)) * uint32_t(y) + y;
}
KERNEL(mulhi) {
  EACH p.out[i] = __umulhi(uint32_t(x), uint32_t(y));
}
KERNEL(shl) {
  EACH p.out[i] = x << (y & 63);
}
KERNEL(sar) {
  EACH p.out[i] = x >> (y & 63);
}
KERNEL(shr) {
  EACH p.out[i] = uint64_t(x) >> (y & 63);
}
KERNEL(shl_all) {
  EACH asm("shl.b64 %0, %1, %2;" : "=l"(p.out[i]) : "l"(x), "r"(int(y & 255)));
}
KERNEL(sar_all) {
  EACH asm("shr.s64 %0, %1, %2;" : "=l"(p.out[i]) : "l"(x), "r"(int(y & 255)));
}
KERNEL(shr_all) {
  EACH asm("shr.u64 %0, %1, %2;" : "=l"(p.out[i]) : "l"(x), "r"(int(y & 255)));
}
KERNEL(shl32) {
  EACH int r;
  asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(int(x)), "r"(int(y & 255)));
  p.out[i] = r;
}
KERNEL(sar32) {
  EACH int r;
  asm("shr.s32 %0, %1, %2;" : "=r"(r) : "r"(int(x)), "r"(int(y & 255)));
  p.out[i] = r;
}
KERNEL(shift3) {
  EACH p.out[i] = (x << 3) + y - (y << 35);
}
KERNEL(logic) {
  EACH p.out[i] = ((x & y) ^ (~x | 0xff00ff)) + ((x | y) & ~y);
}
KERNEL(select) {
  EACH p.out[i] = x < y ? x - 1 : y == 7 ? 3 : y;
}
KERNEL(compare) {
  EACH p.out[i] = (x < y) | (x <= y) << 1 | (x == y) << 2 | (uint64_t(x) < uint64_t(y)) << 3 |
                  (uint64_t(x) >= uint64_t(y)) << 4 | (int32_t(x) > int32_t(y)) << 5 |
                  (uint32_t(x) <= uint32_t(y)) << 6 | (x > 0 && y > 0) << 7 | (x != y || int32_t(y) < 5) << 8 |
                  (x < 256) << 9 | (y > -2) << 10;
}
KERNEL(minmax) {
  EACH p.out[i] = min(x, y) ^ max(x, int64_t{-5}) ^ min(int32_t(x), int32_t(y) + 3) ^ max(uint32_t(x), 9u) ^
                  (int64_t(max(int32_t(y), int32_t(x))) << 20);
}
KERNEL(narrow) {
  EACH p.out[i] = int8_t(x + y) + uint16_t(y + x) + (uint8_t(y ^ x) << 9);
}
KERNEL(bits) {
  EACH p.out[i] = 31 - __clz(int(x)) + (__popc(unsigned(y)) << 8);
}
KERNEL(divide) {
  EACH p.out[i] = uint32_t(x) / 7u + (int32_t(y) / 48) * 3;
}
KERNEL(grid) {
  EACH p.out[i] = blockIdx.x + gridDim.x * 100 + blockDim.x * 10000 + threadIdx.x % 32 + 0 * (x + y);
}
KERNEL(bytes) {
  EACH auto* out = reinterpret_cast<uint8_t*>(p.out + i);
  for (int k = 0; k < 8; ++k) out[k] = uint8_t(x >> (8 * (7 - k))) + reinterpret_cast<const uint8_t*>(p.y + i)[k];
}
KERNEL(vector) {
  EACH if (i % 2) return;
  auto v = reinterpret_cast<const longlong2*>(p.x)[i / 2];
  v.x += y;
  reinterpret_cast<longlong2*>(p.out)[i / 2] = make_longlong2(v.y, v.x);
}
KERNEL(sectors) {
  EACH if (i % 4) return;
  int64_t a, b, c, d;
#if __CUDA_ARCH__ >= 1000
  asm volatile("ld.global.v4.b64 {%0, %1, %2, %3}, [%4];" : "=l"(a), "=l"(b), "=l"(c), "=l"(d) : "l"(p.x + i));
#else
  a = x, b = p.x[i + 1], c = p.x[i + 2], d = p.x[i + 3];
#endif
  p.out[i] = a - y, p.out[i + 1] = c, p.out[i + 2] = d, p.out[i + 3] = b - x;
}
KERNEL(shuffle) {
  EACH int64_t v = __shfl_up_sync(~0u, x, 3) + __shfl_down_sync(~0u, y, 5);
  v ^= __shfl_xor_sync(~0u, x, 9);
  p.out[i] = v + __shfl_sync(~0u, int32_t(y), int(x & 31)) + __shfl_sync(~0u, i, 2, 8);
}
KERNEL(vote) {
  EACH p.out[i] =
      __ballot_sync(~0u, x < y) + (int64_t(__any_sync(~0u, x == y)) << 32) + (int64_t(__all_sync(~0u, i < 40)) << 33);
}
KERNEL(barrier) {
  EACH const int64_t any = __syncthreads_or(x == y), all = __syncthreads_and(i < 64),
                     count = __syncthreads_count(x < y);
  p.out[i] = any + 2 * all + 4 * count;
}
KERNEL(diverge) {
  EACH int64_t sum = 0;
  for (int k = 0; k < (x & 15); ++k) {
    if (k == (y & 7)) continue;
    if (k > 9 && (y & 8)) break;
    sum += k % 3 == 0 ? k * x : y - k;
    if (sum == 12345) return;
  }
  __syncwarp();
  p.out[i] = __shfl_xor_sync(~0u, sum, 1);
}
KERNEL(warp_sum) {
  EACH p.out[i] = __reduce_add_sync(~0u, int(x)) + __reduce_add_sync(~0u, i % 32 < (i / 32 + 1) * 7 ? int(y) : 0);
}
KERNEL(shared_sum) {
  EACH __shared__ int64_t v[64];
  __shared__ unsigned long long total;
  __shared__ int least;
  if (threadIdx.x == 0) total = 0, least = 1 << 30;
  v[threadIdx.x] = x;
  __syncthreads();
  atomicAdd(&total, static_cast<unsigned long long>(y));
  atomicMin(&least, int(x & 0xffff) - 100);
  __syncthreads();
  p.out[i] = v[63 - threadIdx.x] + total + least;
}
KERNEL(atomics) {
  EACH atomicOr(reinterpret_cast<int*>(p.out), int(x));
  atomicAdd(reinterpret_cast<unsigned long long*>(p.out) + 1, static_cast<unsigned long long>(y));
  const auto ticket = atomicAdd(reinterpret_cast<unsigned long long*>(p.out) + 2, 1ull + i % 2);
  p.out[3 + ticket] = 5;
}
// A block tells the one behind it.
KERNEL(chain) {
  EACH using Word = cuda::atomic_ref<int64_t, cuda::thread_scope_device>;
  __shared__ int64_t before;
  if (threadIdx.x == 0) {
    before = 0;
    if (blockIdx.x > 0) {
      while (Word(p.out[blockIdx.x]).load(cuda::memory_order_acquire) == 0) __nanosleep(20);
      before = p.out[64 + blockIdx.x - 1];
    }
    p.out[64 + blockIdx.x] = before + x + 1;
    Word(p.out[blockIdx.x + 1]).store(1, cuda::memory_order_release);
  }
  __syncthreads();
  p.out[100 + i] = before + y;
}

KERNEL(chase) {
  EACH int64_t at = i;
  for (int k = 0; k < p.n; ++k) at = p.x[at];
  p.out[i] = at + y + x;
}
KERNEL(at_once) {
  EACH const int64_t a = p.x[63 - i], b = p.y[63 - i], c = p.x[i ^ 1];
  p.out[i] = x + y + a + b + c;
}

KERNEL(waits) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  EACH p.out[i] = x + y;
}
KERNEL(outside) {
  EACH p.out[i + (x == 1000 ? 1 : 0) * p.n] = y;
}
KERNEL(between) {
  EACH p.out[i] = p.x[i + p.n] + y;
}
KERNEL(misaligned) {
  EACH* reinterpret_cast<int64_t*>(reinterpret_cast<char*>(p.out + i) + (i == 5 ? 4 : 0)) = x + y;
}
KERNEL(unwritten) {
  EACH p.out[i] = x + y + (i == 9 ? p.out[i] : 0);
}
KERNEL(unwritten_shared) {
  EACH __shared__ int64_t v[64];
  if (i != 3) v[threadIdx.x] = x;
  __syncthreads();
  p.out[i] = v[63 - threadIdx.x] + y;
}
KERNEL(no_barrier) {
  EACH __shared__ int64_t v[64];
  v[threadIdx.x] = x;
  __syncwarp();
  p.out[i] = v[63 - threadIdx.x] + y;
}
KERNEL(no_second_barrier) {
  EACH __shared__ int64_t v[64];
  int64_t sum = y;
  for (int k = 0; k < p.n; ++k) {
    v[threadIdx.x] = x;
    __syncthreads();
    sum += v[63 - threadIdx.x];
  }
  p.out[i] = sum;
}
KERNEL(race_of_warps) {
  EACH p.out[threadIdx.x % 32] = x + y;
}
KERNEL(race_of_lanes) {
  EACH p.out[threadIdx.x / 2] = x + y + i;
}
KERNEL(race_of_blocks) {
  EACH p.out[threadIdx.x] = x + y;
}
KERNEL(race_with_a_reader) {
  EACH p.out[i] = x + y;
  if (blockIdx.x == 1) p.out[64 + i] = p.out[threadIdx.x];
}
KERNEL(no_release) {
  EACH using Word = cuda::atomic_ref<int64_t, cuda::thread_scope_device>;
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.out[8] = x + y;
    Word(p.out[0]).store(1, cuda::memory_order_relaxed);
  } else {
    while (Word(p.out[0]).load(cuda::memory_order_acquire) == 0) __nanosleep(20);
    p.out[9] = p.out[8];
  }
}
KERNEL(no_acquire) {
  EACH using Word = cuda::atomic_ref<int64_t, cuda::thread_scope_device>;
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    p.out[8] = x + y;
    Word(p.out[0]).store(1, cuda::memory_order_release);
  } else {
    while (Word(p.out[0]).load(cuda::memory_order_relaxed) == 0) __nanosleep(20);
    p.out[9] = p.out[8];
  }
}
KERNEL(deadlock) {
  EACH if (i < 16) __syncwarp();
  else __syncthreads();
  p.out[i] = x + y;
}
KERNEL(no_end) {
  EACH using Word = cuda::atomic_ref<int64_t, cuda::thread_scope_device>;
  while (Word(p.out[0]).load(cuda::memory_order_relaxed) == 0) __nanosleep(20);
  p.out[i] = x + y;
}
KERNEL(inactive_lane) {
  EACH if (i % 2) p.out[i] = __shfl_sync(0xaaaaaaaa, x, i - 1) + y;
}
KERNEL(unknown) {
  EACH p.out[i] = __float2int_rn(sqrtf(x)) + y;
}
