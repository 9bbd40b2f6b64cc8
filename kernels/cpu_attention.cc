// Attention of one decoding step, from each slot to its pages: what is filled is read, and nothing is left to merge.
//
// All float32; pages also int8 with scales. Keys come in the order of their positions, with a running maximum.

#include <cmath>
#include <vector>

#include "cpu.h"

namespace {

constexpr int QUERIES = 3, UNROLL = 4;  // query heads that pass over a page together, vectors of sums of each
constexpr float MASKED = -1e30f;

// Some keys, those of one slot and key/value head that lie together: keys [h, stride], values [stride, h].
template <typename T>
struct Keys {
  const T *keys, *values;
  const float *key_scale, *value_scale;  // [stride], or null
  int64_t stride, first, last;           // of them, first <= index < last are seen
  const T* next;                         // the keys that come after these
};

// Fetches what will be read at `at` of another array, as much of it as a tile reads at once of this one.
template <int U, typename T>
inline void Fetch(const T* other, int64_t at) {
  for (int byte = 0; byte < U * LANES * int(sizeof(T)); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(other + at) + byte);
  }
}

// scores[r, p] of G queries [G, width], for U vectors of keys from p on; only one vector may be cut short.
template <int G, int U, typename T>
void ScoreTile(const float* q, const Keys<T>& some, int64_t width, int64_t p, float* scores, int64_t room) {
  Vector sums[G][U] = {};
  const T* row = some.keys + p;
  for (int64_t d = 0; d < width; ++d, row += some.stride) {
    Fetch<U>(some.values, row - some.keys);
    for (int u = 0; u < U; ++u) {
      const Vector key = U > 1 ? Load(row + u * LANES) : Load(row, some.stride - p);
      for (int r = 0; r < G; ++r) sums[r][u] += key * q[r * width + d];
    }
  }
  for (int r = 0; r < G; ++r) {
    for (int u = 0; u < U; ++u) Store(scores + r * room + p + u * LANES, sums[r][u]);
  }
}

template <int G, typename T>
void Scores(const float* q, const Keys<T>& some, int64_t width, float* scores, int64_t room) {
  int64_t p = 0;
  for (; p < some.last && p + UNROLL * LANES <= some.stride; p += UNROLL * LANES) {
    ScoreTile<G, UNROLL>(q, some, width, p, scores, room);
  }
  for (; p < some.last; p += LANES) ScoreTile<G, 1>(q, some, width, p, scores, room);
}

// out[r, d] = out[r, d] * keep[r] + sum over p of weights[r, p] * values[p, d], for U vectors from d on.
template <int G, int U, typename T>
void ValueTile(const float* weights, int64_t room, const Keys<T>& some, int64_t width, int64_t d, const float* keep,
               float* out) {
  const int64_t count = U > 1 ? LANES : width - d;
  Vector sums[G][U];
  for (int r = 0; r < G; ++r) {
    for (int u = 0; u < U; ++u) sums[r][u] = Load(out + r * width + d + u * LANES, count) * keep[r];
  }
  const T* row = some.values + some.first * width + d;
  for (int64_t p = some.first; p < some.last; ++p, row += width) {
    Fetch<U>(some.next, row - some.values);
    for (int u = 0; u < U; ++u) {
      const Vector value = U > 1 ? Load(row + u * LANES) : Load(row, count);
      for (int r = 0; r < G; ++r) sums[r][u] += value * weights[r * room + p];
    }
  }
  for (int r = 0; r < G; ++r) {
    for (int u = 0; u < U; ++u) Store(out + r * width + d + u * LANES, sums[r][u], count);
  }
}

template <int G, typename T>
void AddValues(const float* weights, int64_t room, const Keys<T>& some, int64_t width, const float* keep, float* out) {
  int64_t d = 0;
  for (; d + UNROLL * LANES <= width; d += UNROLL * LANES) {
    ValueTile<G, UNROLL>(weights, room, some, width, d, keep, out);
  }
  for (; d < width; d += LANES) ValueTile<G, 1>(weights, room, some, width, d, keep, out);
}

// A softmax on its way: per query the largest score, the sum of exp(score - top), and that of the values so weighted.
struct Running {
  float *out, *top, *total;  // [g, h], [g], [g]
  float* scores;             // room for [g, room]
  int64_t room;
};

struct Shape {
  int64_t group, width;
  float scale, softcap;
};

// Raw scores [room] of one query become weights exp(score - top), 0 where not seen; returns what the sums so far keep.
template <typename T>
float Weigh(const Keys<T>& some, const Shape& shape, float* scores, float* top, float* total) {
  Ints index;
  for (int i = 0; i < LANES; ++i) index[i] = i;
  auto seen = [&](int32_t p) { return index + p >= (int32_t)some.first & index + p < (int32_t)some.last; };
  Vector highest = Vector{} + *top;
  for (int64_t p = 0; p < some.last; p += LANES) {
    Vector x = Load(scores + p) * shape.scale;
    if (some.key_scale) x *= Load(some.key_scale + p, some.stride - p);
    if (shape.softcap) x = shape.softcap * Tanh(x * (1.0f / shape.softcap));
    x = Choose(seen(p), x, Vector{} + MASKED);
    highest = Choose(x > highest, x, highest);
    Store(scores + p, x);
  }
  float best = highest[0];
  for (int i = 1; i < LANES; ++i) best = std::max(best, highest[i]);
  Vector sums = {};
  for (int64_t p = 0; p < some.last; p += LANES) {
    Vector x = Choose(seen(p), Exp(Load(scores + p) - best), Vector{});
    sums += x;
    if (some.value_scale) x *= Load(some.value_scale + p, some.stride - p);
    Store(scores + p, x);
  }
  const float keep = std::exp(*top - best);
  *total = *total * keep + Sum(sums);
  *top = best;
  return keep;
}

template <int G, typename T>
void AddKeys(const float* q, const Keys<T>& some, const Shape& shape, const Running& sums, int64_t from) {
  if (shape.group - from < G) {
    if constexpr (G > 1) AddKeys<G - 1>(q, some, shape, sums, from);
    return;
  }
  float keep[G];
  Scores<G>(q + from * shape.width, some, shape.width, sums.scores, sums.room);
  for (int r = 0; r < G; ++r) {
    keep[r] = Weigh(some, shape, sums.scores + r * sums.room, sums.top + from + r, sums.total + from + r);
  }
  AddValues<G>(sums.scores, sums.room, some, shape.width, keep, sums.out + from * shape.width);
  AddKeys<G>(q, some, shape, sums, from + G);
}

// Pages of one layer: keys [N, K, h, P], values [N, K, P, h], scales [N, K, P].
template <typename T>
struct Pool {
  const T *keys, *values;
  const float *key_scale, *value_scale;
  int64_t heads, width, size;

  Keys<T> At(int64_t page, int64_t next, int64_t head, int64_t first, int64_t last) const {
    const int64_t at = page * heads + head;
    return {keys + at * width * size, values + at * size * width, key_scale ? key_scale + at * size : nullptr,
            value_scale ? value_scale + at * size : nullptr, size, std::clamp<int64_t>(first, 0, size),
            std::clamp<int64_t>(last, 0, size), keys + (next * heads + head) * width * size};
  }
};

template <typename T>
Pool<T> PoolOf(ffi::AnyBuffer keys, ffi::AnyBuffer values, Floats key_scale, Floats value_scale) {
  const auto shape = keys.dimensions();
  const bool scaled = key_scale.element_count();
  return {keys.typed_data<T>(), values.typed_data<T>(), scaled ? key_scale.typed_data() : nullptr,
          scaled ? value_scale.typed_data() : nullptr, shape[1], shape[2], shape[3]};
}

// Where a slot's keys lie: pages of its prompt, then of its own, then what is staged, of `staged` positions.
struct Tables {
  const int32_t *prompt, *prompt_len, *own, *own_len, *position;
  int64_t prompt_columns, own_columns, staged, window;
};

template <typename T>
void Attend(const float* q, const Pool<T>& prompt, const Pool<T>& own, const Pool<float>& staged, const Tables& tables,
            int64_t slot, int64_t head, const Shape& shape, float* out) {
  const int64_t most = std::max({prompt.size, own.size, staged.size}), unit = UNROLL * LANES;
  const int64_t room = (most + unit - 1) / unit * unit;
  static thread_local std::vector<float> memory;
  memory.assign(QUERIES * room + 2 * shape.group, 0.0f);
  float *top = memory.data() + QUERIES * room, *total = top + shape.group;
  std::fill(top, total, MASKED);
  std::fill(out, out + shape.group * shape.width, 0.0f);
  const Running sums{out, top, total, memory.data(), room};
  const int64_t prompt_len = tables.prompt_len[slot], context = prompt_len + tables.own_len[slot];
  const int64_t first = tables.window ? tables.position[slot] - tables.window + 1 : 0;  // position seen first
  auto add = [&](const auto& keys) {
    if (keys.first < keys.last) AddKeys<QUERIES>(q, keys, shape, sums, 0);
  };
  auto pages = [&](const Pool<T>& pool, const int32_t* table, int64_t columns, int64_t base, int64_t end) {
    for (int64_t column = 0; column < columns && base < end; ++column, base += pool.size) {
      const int64_t page = table[column], next = column + 1 < columns ? table[column + 1] : -1;
      if (page >= 0) add(pool.At(page, next < 0 ? page : next, head, first - base, end - base));
    }
  };
  pages(prompt, tables.prompt + slot * tables.prompt_columns, tables.prompt_columns, 0, prompt_len);
  pages(own, tables.own + slot * tables.own_columns, tables.own_columns, prompt_len, context);
  add(staged.At(slot, slot, head, first - context, tables.staged));
  for (int64_t r = 0; r < shape.group; ++r) {
    for (int64_t d = 0; d < shape.width && total[r] > 0; ++d) out[r * shape.width + d] /= total[r];
  }
}

template <typename T>
ffi::Error AttendAll(ffi::ThreadPool& pool, Floats q, const Pool<T>& prompt, const Pool<T>& own,
                     const Pool<float>& staged, const Tables& tables, float scale, float softcap, float* out) {
  const auto sizes = q.dimensions();  // S, K, g, h
  const int64_t slots = sizes[0], heads = sizes[1], block = sizes[2] * sizes[3];
  const Shape shape{sizes[2], sizes[3], scale, softcap};
  const float* from = q.typed_data();
  // One head after the other: what several slots read of a prompt is still in a cache when the next one comes.
  Parallel(pool, heads * slots, [&](int64_t task) {
    const int64_t head = task / slots, slot = task % slots, at = (slot * heads + head) * block;
    Attend(from + at, prompt, own, staged, tables, slot, head, shape, out + at);
  });
  return ffi::Error::Success();
}

ffi::Error Attention(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer prompt_keys, ffi::AnyBuffer prompt_values,
                     Floats prompt_key_scale, Floats prompt_value_scale, ffi::AnyBuffer own_keys,
                     ffi::AnyBuffer own_values, Floats own_key_scale, Floats own_value_scale, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, Integers prompt, Integers prompt_len, Integers own, Integers own_len,
                     Integers position, Integers step, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap,
                     int64_t window) {
  const Tables tables{prompt.typed_data(), prompt_len.typed_data(), own.typed_data(), own_len.typed_data(),
                      position.typed_data(), prompt.dimensions()[1], own.dimensions()[1], *step.typed_data() + 1,
                      window};
  const auto shape = keys.dimensions();
  const Pool<float> staged{keys.typed_data<float>(), values.typed_data<float>(), nullptr, nullptr, shape[1], shape[2],
                           shape[3]};
  auto run = [&](auto type) {
    using T = decltype(type);
    return AttendAll(pool, q, PoolOf<T>(prompt_keys, prompt_values, prompt_key_scale, prompt_value_scale),
                     PoolOf<T>(own_keys, own_values, own_key_scale, own_value_scale), staged, tables, scale, softcap,
                     out->typed_data());
  };
  return own_keys.element_type() == ffi::S8 ? run(int8_t{}) : run(float{});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    RljaxAttention, Attention,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Floats>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<Floats>().Arg<Floats>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<Floats>().Arg<Floats>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Arg<Integers>().Arg<Integers>().Arg<Integers>().Arg<Integers>().Arg<Integers>().Arg<Integers>()
        .Ret<Floats>()
        .Attr<float>("scale").Attr<float>("softcap").Attr<int64_t>("window"));
