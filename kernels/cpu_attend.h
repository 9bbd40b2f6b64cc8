// A softmax over keys that come some at a time, with a running maximum: what the kernels of attention have in common.
//
// All float32; keys and values also int8 with scales. A tile is G queries by U vectors: G queries pass over the same
// keys together, each of which may see others of them; a value that one of them sees must be finite.

#pragma once

#include <cmath>

#include "cpu.h"

constexpr float MASKED = -1e30f;

// Some keys of one key/value head that lie together: keys [h, stride], values [stride, h].
template <typename T>
struct Keys {
  const T *keys, *values;
  const float *key_scale, *value_scale;  // [stride], or null
  int64_t stride, first, last;           // of them, query 0 sees first <= index < last
  const T* next;                         // the keys that come after these; null: all is in a cache already
};

// What is the same for all keys. The queries see one key further every `per` of them.
struct Shape {
  int64_t queries, per, width;
  float scale, softcap;
};

// A softmax on its way: per query the largest score, the sum of exp(score - top), and that of the values so weighted.
struct Running {
  float *out, *top, *total;  // [queries, h], [queries], [queries]
  float* scores;             // room for [G, room], whole tiles of them
  int64_t room;
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
    if (some.next) Fetch<U>(some.values, row - some.keys);
    Vector key[U];
    for (int u = 0; u < U; ++u) key[u] = Held(U > 1 ? Load(row + u * LANES) : Load(row, some.stride - p));
    for (int r = 0; r < G; ++r) {
      for (int u = 0; u < U; ++u) sums[r][u] += key[u] * q[r * width + d];
    }
  }
  for (int r = 0; r < G; ++r) {
    for (int u = 0; u < U; ++u) Store(scores + r * room + p + u * LANES, sums[r][u]);
  }
}

template <int G, int U, typename T>
void Scores(const float* q, const Keys<T>& some, int64_t width, float* scores, int64_t room) {
  int64_t p = 0;
  for (; p + LANES < some.last && p + U * LANES <= some.stride; p += U * LANES) {
    ScoreTile<G, U>(q, some, width, p, scores, room);
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
    if (some.next) Fetch<U>(some.next, row - some.values);
    Vector value[U];
    for (int u = 0; u < U; ++u) value[u] = Held(U > 1 ? Load(row + u * LANES) : Load(row, count));
    for (int r = 0; r < G; ++r) {
      for (int u = 0; u < U; ++u) sums[r][u] += value[u] * weights[r * room + p];
    }
  }
  for (int r = 0; r < G; ++r) {
    for (int u = 0; u < U; ++u) Store(out + r * width + d + u * LANES, sums[r][u], count);
  }
}

template <int G, int U, typename T>
void AddValues(const float* weights, int64_t room, const Keys<T>& some, int64_t width, const float* keep, float* out) {
  int64_t d = 0;
  for (; d + U * LANES <= width; d += U * LANES) ValueTile<G, U>(weights, room, some, width, d, keep, out);
  for (; d < width; d += LANES) ValueTile<G, 1>(weights, room, some, width, d, keep, out);
}

// Raw scores [some.last] of one query become weights exp(score - top), 0 but for first <= index < last, which it sees;
// returns what the sums so far keep.
template <typename T>
float Weigh(const Keys<T>& some, int64_t first, int64_t last, const Shape& shape, float* scores, float* top,
            float* total) {
  Ints index;
  for (int i = 0; i < LANES; ++i) index[i] = i;
  auto seen = [&](int32_t p) { return index + p >= (int32_t)first & index + p < (int32_t)last; };
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

// Some keys for queries `from` on, G at a time, in tiles of U vectors.
template <int G, int U, typename T>
void AddKeys(const float* q, const Keys<T>& some, const Shape& shape, const Running& sums, int64_t from = 0) {
  if (shape.queries - from < G) {
    if constexpr (G > 1) AddKeys<G - 1, U>(q, some, shape, sums, from);
    return;
  }
  auto within = [&](int64_t index) { return std::clamp<int64_t>(index, 0, some.stride); };
  Keys<T> all = some;  // that any of the G sees
  all.first = within(some.first + from / shape.per);
  all.last = within(some.last + (from + G - 1) / shape.per);
  if (all.first < all.last) {
    float keep[G];
    Scores<G, U>(q + from * shape.width, all, shape.width, sums.scores, sums.room);
    for (int r = 0; r < G; ++r) {
      const int64_t further = (from + r) / shape.per;
      keep[r] = Weigh(all, within(some.first + further), within(some.last + further), shape,
                      sums.scores + r * sums.room, sums.top + from + r, sums.total + from + r);
    }
    AddValues<G, U>(sums.scores, sums.room, all, shape.width, keep, sums.out + from * shape.width);
  }
  AddKeys<G, U>(q, some, shape, sums, from + G);
}

inline void Start(const Running& sums, const Shape& shape) {
  std::fill(sums.top, sums.top + shape.queries, MASKED);
  std::fill(sums.total, sums.total + shape.queries, 0.0f);
  std::fill(sums.out, sums.out + shape.queries * shape.width, 0.0f);
}

// Sums become means; those of a query that saw nothing stay 0.
inline void Finish(const Running& sums, const Shape& shape) {
  for (int64_t r = 0; r < shape.queries; ++r) {
    const float scale = sums.total[r] > 0 ? 1.0f / sums.total[r] : 0.0f;
    for (int64_t d = 0; d < shape.width; ++d) sums.out[r * shape.width + d] *= scale;
  }
}
