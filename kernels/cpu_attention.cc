// Attention of one decoding step, from each slot to its pages: what is filled is read, and nothing is left to merge.
//
// All float32; pages also int8 with scales. Keys come in the order of their positions, with a running maximum.

#include <vector>

#include "cpu_attend.h"

namespace {

constexpr int QUERIES = 3, UNROLL = 4;  // of a tile

// Pages of one layer: keys [N, K, h, P], values [N, K, P, h], scales [N, K, P].
template <typename T>
struct Pool {
  const T *keys, *values;
  const float *key_scale, *value_scale;
  int64_t heads, width, size;

  Keys<T> At(int64_t page, int64_t next, int64_t head, int64_t first, int64_t last) const {
    const int64_t at = page * heads + head;
    return {keys + at * width * size, values + at * size * width, key_scale ? key_scale + at * size : nullptr,
            value_scale ? value_scale + at * size : nullptr, size, first, std::min(last, size), keys + (next * heads + head) * width * size};
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
  memory.resize(QUERIES * room + 2 * shape.queries);
  float *top = memory.data() + QUERIES * room, *total = top + shape.queries;
  const Running sums{out, top, total, memory.data(), room};
  Start(sums, shape);
  const int64_t prompt_len = tables.prompt_len[slot], context = prompt_len + tables.own_len[slot];
  const int64_t first = tables.window ? tables.position[slot] - tables.window + 1 : 0;  // position seen first
  auto add = [&](const auto& keys) { AddKeys<QUERIES, UNROLL>(q, keys, shape, sums); };
  auto pages = [&](const Pool<T>& pool, const int32_t* table, int64_t columns, int64_t base, int64_t end) {
    for (int64_t column = 0; column < columns && base < end; ++column, base += pool.size) {
      const int64_t page = table[column], next = column + 1 < columns ? table[column + 1] : -1;
      if (page >= 0) add(pool.At(page, next < 0 ? page : next, head, first - base, end - base));
    }
  };
  pages(prompt, tables.prompt + slot * tables.prompt_columns, tables.prompt_columns, 0, prompt_len);
  pages(own, tables.own + slot * tables.own_columns, tables.own_columns, prompt_len, context);
  add(staged.At(slot, slot, head, first - context, tables.staged));
  Finish(sums, shape);
}

template <typename T>
ffi::Error AttendAll(ffi::ThreadPool& pool, Floats q, const Pool<T>& prompt, const Pool<T>& own,
                     const Pool<float>& staged, const Tables& tables, float scale, float softcap, float* out) {
  const auto sizes = q.dimensions();  // S, K, g, h
  const int64_t slots = sizes[0], heads = sizes[1], block = sizes[2] * sizes[3];
  const Shape shape{sizes[2], sizes[2], sizes[3], scale, softcap};
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
