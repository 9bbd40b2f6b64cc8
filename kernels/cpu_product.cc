// A product of few rows with a matrix, which XLA packs first: with few rows that takes longer than to multiply.
//
// x [rows, in] times a matrix [out, in], transposed, in float32; the matrix also int8. A row's bits depend on nothing
// but the row.

#include "cpu.h"

namespace {

// The accumulators of a tile, ROWS of x times COLUMNS of y, fit in the registers.
constexpr int ROWS = LANES == 16 ? 8 : 4, COLUMNS = LANES == 4 ? 4 : 3;
constexpr int64_t DEPTH = 768;  // of `in` at once, at most: a tile's rows of x stay in the first cache,
constexpr int64_t PASS_BYTES = 16 << 10, MOST_BYTES = 256 << 10;  // a block of the matrix in the second: more for more
constexpr int TASKS = 2;  // for each thread, so that a late one holds up little

template <typename T>
struct Matrices {
  const float* x;
  const T* matrix;
  float* y;
  int64_t in, out;
};

// Terms [begin, end) of the sums; those of a later part are added to what y has.
struct Part {
  int64_t begin, end;
};

// What comes next: `step` bytes of it are fetched for each vector of a tile.
struct Next {
  const char* at;
  int64_t step;
};

// y of M columns, rows of the matrix, and R rows of x.
template <int M, int R, typename T>
void Tile(const Matrices<T>& all, int64_t row, int64_t column, Part part, Next next) {
  const int64_t in = all.in;
  const float* x = all.x + row * in;
  const T* matrix = all.matrix + column * in;
  Vector sums[R][M] = {};
  int64_t k = part.begin;
  for (; k + LANES <= part.end; k += LANES, next.at += next.step) {
    for (int64_t byte = 0; byte < next.step; byte += 64) __builtin_prefetch(next.at + byte);
    Vector w[M];
    for (int m = 0; m < M; ++m) w[m] = Held(Load(matrix + m * in + k));
    for (int r = 0; r < R; ++r) {
      const Vector some = Held(Load(x + r * in + k));
      for (int m = 0; m < M; ++m) sums[r][m] += w[m] * some;
    }
  }
  if (k < part.end) {
    for (int r = 0; r < R; ++r) {
      const Vector some = Load(x + r * in + k, part.end - k);
      for (int m = 0; m < M; ++m) sums[r][m] += Load(matrix + m * in + k, part.end - k) * some;
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      float* y = all.y + (row + r) * all.out + column + m;
      *y = Sum(sums[r][m]) + (part.begin ? *y : 0.0f);
    }
  }
}

// Columns [begin, end) of `rows` rows, at most R of them.
template <int R, typename T>
void Rows(const Matrices<T>& all, int64_t row, int64_t rows, int64_t begin, int64_t end, Part part, Next next) {
  if constexpr (R > 1) {
    if (rows < R) return Rows<R - 1>(all, row, rows, begin, end, part, next);
  }
  for (; begin + COLUMNS <= end; begin += COLUMNS, next.at += COLUMNS * all.in * sizeof(T)) {
    Tile<COLUMNS, R>(all, row, begin, part, next);
  }
  for (; begin < end; ++begin) Tile<1, R>(all, row, begin, part, Next{next.at, 0});
}

template <typename T>
ffi::Error Multiply(ffi::ThreadPool& pool, const Matrices<T>& all, int64_t rows) {
  const int64_t in = all.in, out = all.out;
  const int64_t row_bytes = std::max<int64_t>(1, in) * sizeof(T), passes = (rows + ROWS - 1) / ROWS;
  const int64_t block = std::max<int64_t>(1, std::min(PASS_BYTES * passes, MOST_BYTES) / row_bytes / COLUMNS) * COLUMNS;
  const int64_t parts = std::max<int64_t>(1, (in + DEPTH - 1) / DEPTH);
  const int64_t depth = std::max<int64_t>(1, ((in + parts - 1) / parts + LANES - 1) / LANES) * LANES;
  const int64_t groups = (out + COLUMNS - 1) / COLUMNS;
  const int64_t tasks = std::min<int64_t>(groups, TASKS * std::max<int64_t>(1, pool.num_threads()));
  Parallel(pool, tasks, [=](int64_t task) {
    const int64_t last = std::min(out, (task + 1) * groups / tasks * COLUMNS);
    for (int64_t begin = task * groups / tasks * COLUMNS; begin < last; begin += block) {
      const int64_t end = std::min(last, begin + block);
      int64_t k = 0;
      do {
        // Each pass of rows over each part of this block fetches its share of the next block.
        const char* next = reinterpret_cast<const char*>(all.matrix + (begin + block) * in) +
                           COLUMNS * k * int64_t(sizeof(T)) / passes;
        for (int64_t r = 0; r < rows; r += ROWS) {
          Rows<ROWS>(all, r, rows - r, begin, end, Part{k, std::min(in, k + depth)},
                     Next{next + r / ROWS * COLUMNS * row_bytes / passes,
                          COLUMNS * LANES * int64_t(sizeof(T)) / passes});
        }
        k += depth;
      } while (k < in);
    }
  });
  return ffi::Error::Success();
}

ffi::Error Product(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer matrix, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = matrix.dimensions()[0];
  auto run = [&](auto type) {
    using T = decltype(type);
    return Multiply(pool, Matrices<T>{x.typed_data(), matrix.typed_data<T>(), y->typed_data(), in, out}, rows);
  };
  return matrix.element_type() == ffi::S8 ? run(int8_t{}) : run(float{});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    RljaxProduct, Product,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<ffi::AnyBuffer>().Ret<Floats>());
