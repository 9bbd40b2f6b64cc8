// A product of few rows with a matrix, which XLA packs first: with few rows that takes longer than to multiply.
//
// x [rows, in] times a matrix [out, in], transposed, in float32: a row's bits depend on nothing but the row.

#include "cpu.h"

namespace {

// The accumulators of a tile, ROWS of x times COLUMNS of y, fit in the registers.
constexpr int ROWS = LANES == 16 ? 8 : 4, COLUMNS = LANES == 4 ? 4 : 3;
constexpr int64_t BLOCK_BYTES = 16 << 10;  // of a matrix, that stay in the first cache while rows pass over them
constexpr int TASKS = 2;                   // for each thread, so that a late one holds up little

// M rows of the matrix times R of x. Meanwhile `step` bytes of what comes next are fetched for each vector.
template <int M, int R>
void Tile(const float* x, const float* matrix, int64_t in, float* y, int64_t out, const char* next, int64_t step) {
  Vector sums[R][M] = {};
  int64_t k = 0;
  for (; k + LANES <= in; k += LANES, next += step) {
    for (int64_t at = 0; at < step; at += 64) __builtin_prefetch(next + at);
    Vector w[M];
    for (int m = 0; m < M; ++m) w[m] = Load(matrix + m * in + k);
    for (int r = 0; r < R; ++r) {
      const Vector row = Load(x + r * in + k);
      for (int m = 0; m < M; ++m) sums[r][m] += w[m] * row;
    }
  }
  if (k < in) {
    for (int r = 0; r < R; ++r) {
      const Vector row = Load(x + r * in + k, in - k);
      for (int m = 0; m < M; ++m) sums[r][m] += Load(matrix + m * in + k, in - k) * row;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) y[r * out + m] = Sum(sums[r][m]);
  }
}

// Columns [begin, end) of y for the last `rows` rows, at most R of them.
template <int R>
void Rows(const float* x, int64_t rows, const float* matrix, int64_t in, float* y, int64_t out, int64_t begin,
          int64_t end, const char* next, int64_t step) {
  if constexpr (R > 1) {
    if (rows < R) return Rows<R - 1>(x, rows, matrix, in, y, out, begin, end, next, step);
  }
  int64_t o = begin;
  for (; o + COLUMNS <= end; o += COLUMNS) {
    Tile<COLUMNS, R>(x, matrix + o * in, in, y + o, out, next, step);
    next += COLUMNS * in * sizeof(float);
  }
  for (; o < end; ++o) Tile<1, R>(x, matrix + o * in, in, y + o, out, next, 0);
}

ffi::Error Product(ffi::ThreadPool pool, Floats x, Floats matrix, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = matrix.dimensions()[0];
  const int64_t row_bytes = in * sizeof(float), passes = (rows + ROWS - 1) / ROWS;
  const int64_t block = std::max<int64_t>(1, BLOCK_BYTES / std::max<int64_t>(1, row_bytes) / COLUMNS) * COLUMNS;
  const int64_t blocks = (out + block - 1) / block;
  const int64_t tasks = std::min<int64_t>(blocks, TASKS * std::max<int64_t>(1, pool.num_threads()));
  const float *from = x.typed_data(), *weights = matrix.typed_data();
  float* to = y->typed_data();
  Parallel(pool, tasks, [=](int64_t task) {
    for (int64_t b = task * blocks / tasks; b < (task + 1) * blocks / tasks; ++b) {
      const int64_t begin = b * block, end = std::min(out, begin + block);
      // Each pass of rows over this block fetches its share of the next one.
      const char* next = reinterpret_cast<const char*>(weights + (begin + block) * in);
      for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t share = r / ROWS * COLUMNS * row_bytes / passes;
        Rows<ROWS>(from + r * in, rows - r, weights, in, to + r * out, out, begin, end, next + share,
                   COLUMNS * LANES * sizeof(float) / passes);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    RljaxProduct, Product,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Ret<Floats>());
