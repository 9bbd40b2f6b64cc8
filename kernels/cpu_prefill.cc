// Causal attention of the next positions of a prompt over its keys so far, which XLA's CPU does on one core.

#include <vector>

#include "cpu_attend.h"

namespace {

constexpr int QUERIES = 6, UNROLL = LANES == 16 ? 4 : 2;  // of a tile
constexpr int64_t TOGETHER = 48;                          // queries that pass over some keys before the next ones do
constexpr int64_t SIZE = 64;                              // of those keys
constexpr int64_t ANY = int64_t(1) << 40;                 // positions before the first

struct Prompts {
  const float *q, *keys, *values;  // [R, T, K, g, h], [R, K, h, L], [R, K, L, h]
  float* out;                      // as q
  int64_t positions, heads, group, width, length, start, window;
  float scale, softcap;

  // Queries of one row and key/value head, from `begin` to `end`, `block` [queries, h] of them one behind the other.
  template <typename Do>
  void Each(int64_t row, int64_t head, int64_t begin, int64_t end, float* block, const Do& copy) const {
    for (int64_t t = begin; t < end; ++t, block += group * width) {
      copy(((row * positions + t) * heads + head) * group * width, block, group * width * sizeof(float));
    }
  }

  void Attend(int64_t row, int64_t head, int64_t begin, int64_t end) const {
    const Shape shape{(end - begin) * group, group, width, scale, softcap};
    const int64_t block = shape.queries * width, unit = UNROLL * LANES, room = (SIZE + unit - 1) / unit * unit;
    static thread_local std::vector<float> memory;
    memory.resize(2 * block + 2 * shape.queries + QUERIES * room + width * SIZE);
    float *queries = memory.data(), *sums = queries + block, *top = sums + block, *total = top + shape.queries;
    float *scores = total + shape.queries, *some = scores + QUERIES * room;
    const Running running{sums, top, total, scores, room};
    Start(running, shape);
    Each(row, head, begin, end, queries, [&](int64_t at, float* to, size_t size) { std::memcpy(to, q + at, size); });
    const float* row_keys = keys + (row * heads + head) * width * length;
    const float* row_values = values + (row * heads + head) * length * width;
    const int64_t position = start + begin, last = start + end;
    const int64_t first = window ? position - window + 1 : -ANY;
    for (int64_t at = std::max<int64_t>(0, first) / SIZE * SIZE; at < last; at += SIZE) {
      const int64_t count = std::min(SIZE, length - at);
      for (int64_t d = 0; d < width; ++d) {  // together, as they lie far apart
        std::memcpy(some + d * SIZE, row_keys + d * length + at, count * sizeof(float));
        std::fill(some + d * SIZE + count, some + (d + 1) * SIZE, 0.0f);
      }
      AddKeys<QUERIES, UNROLL>(queries, Keys<float>{some, row_values + at * width, nullptr, nullptr, SIZE, first - at,
                                                    position + 1 - at, nullptr}, shape, running);
    }
    Finish(running, shape);
    Each(row, head, begin, end, sums, [&](int64_t at, float* from, size_t size) { std::memcpy(out + at, from, size); });
  }
};

ffi::Error Prefill(ffi::ThreadPool pool, Floats q, Floats keys, Floats values, Integers start,
                   ffi::ResultBuffer<ffi::F32> out, float scale, float softcap, int64_t window) {
  const auto shape = q.dimensions();  // R, T, K, g, h
  const Prompts all{q.typed_data(), keys.typed_data(), values.typed_data(), out->typed_data(), shape[1], shape[2],
                    shape[3], shape[4], keys.dimensions()[3], *start.typed_data(), window, scale, softcap};
  const int64_t some = std::max<int64_t>(1, TOGETHER / std::max<int64_t>(1, all.group));
  const int64_t blocks = (all.positions + some - 1) / some;
  Parallel(pool, shape[0] * all.heads * blocks, [&](int64_t task) {
    const int64_t begin = (blocks - 1 - task % blocks) * some;  // the longest first
    all.Attend(task / blocks / all.heads, task / blocks % all.heads, begin, std::min(all.positions, begin + some));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    RljaxPrefill, Prefill,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Integers>()
        .Ret<Floats>()
        .Attr<float>("scale").Attr<float>("softcap").Attr<int64_t>("window"));
