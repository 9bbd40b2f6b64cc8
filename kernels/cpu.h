// Vectors of floats, and work on XLA's own threads, for the kernels of a CPU. All are called by XLA's foreign function
// interface.
//
// Every sum has an order of its own, whatever the number of rows, slots or threads and wherever they lie: lane i of a
// vector takes every LANES-th term, and the lanes are added by halves.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(float))));

// Calls task(i) for every i below `count`, from this thread and those of the pool that come in time.
template <typename Task>
void Parallel(ffi::ThreadPool& pool, int64_t count, const Task& task) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  // A thread that comes after the last task was taken touches nothing but `state`.
  auto work = [state, count, &task] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count; state->done.fetch_add(1, std::memory_order_release)) {
      task(i);
    }
  };
  for (int64_t helper = 1; helper < std::min(pool.num_threads(), count); ++helper) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

inline Vector Load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// By hand, as compilers take the lanes one by one.
inline Vector Load(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Ints x;
  for (int i = 0; i < LANES; ++i) x[i] = from[i];
  return __builtin_convertvector(x, Vector);
#endif
}

// The first `count` lanes; the others are 0.
template <typename T>
inline Vector Load(const T* from, int64_t count) {
  if (count >= LANES) return Load(from);
  T some[LANES] = {};
  std::memcpy(some, from, count * sizeof(T));
  return Load(some);
}

inline void Store(float* to, Vector x, int64_t count = LANES) {
  std::memcpy(to, &x, std::min<int64_t>(count, LANES) * sizeof(float));
}

// The lanes added by halves, written out: not every compiler makes vectors of a loop over lanes.
template <int N = LANES>
inline float Sum(const float* lanes) {
  if constexpr (N == 1) return *lanes;
  if constexpr (N > 1) {
    typedef float Half __attribute__((vector_size(N / 2 * sizeof(float))));
    Half low, high;
    std::memcpy(&low, lanes, sizeof(low));
    std::memcpy(&high, lanes + N / 2, sizeof(high));
    low += high;
    float sums[N / 2];
    std::memcpy(sums, &low, sizeof(sums));
    return Sum<N / 2>(sums);
  }
}

inline float Sum(Vector x) {
  float lanes[LANES];
  std::memcpy(lanes, &x, sizeof(lanes));
  return Sum<>(lanes);
}

// x, in a register: a compiler may think that to load it again for each use costs nothing.
inline Vector Held(Vector x) {
#if defined(__SSE__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

inline Vector Choose(Ints where, Vector yes, Vector no) { return (Vector)((where & (Ints)yes) | (~where & (Ints)no)); }

// e^x to two units in the last place; x at most about 80, and e^-87 for all that is below.
inline Vector Exp(Vector x) {
  const Vector low = Vector{} - 87.0f;
  x = Choose(x < low, low, x);
  Vector n = x * 1.44269504f;
  n = (n + 12582912.0f) - 12582912.0f;  // to the nearest integer
  x = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = Vector{} + 1.9875691500e-4f;  // the polynomial of Cephes' expf
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = y * x + c;
  }
  y = (y * x) * x + x + 1.0f;
  return y * (Vector)((__builtin_convertvector(n, Ints) + 127) << 23);
}

// tanh x to two units in the last place.
inline Vector Tanh(Vector x) {
  const Vector square = x * x, large = Vector{} + 40.0f;
  Vector y = Vector{} - 5.70498872745e-3f;  // the polynomial of Cephes' tanhf, for small x
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) y = y * square + c;
  const Vector twice = 2.0f * x;
  const Vector far = 1.0f - 2.0f / (Exp(Choose(twice > large, large, twice)) + 1.0f);
  return Choose(square < Vector{} + 0.625f * 0.625f, y * square * x + x, far);
}
