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

  Keys<T> At(int64_t page, int64_t head, int64_t first, int64_t last, const T* next) const {
    const int64_t at = page * heads + head;
    return {KeysOf(page, head), values + at * size * width, key_scale ? key_scale + at * size : nullptr,
            value_scale ? value_scale + at * size : nullptr, size, first, std::min(last, size), next};
  }

  const T* KeysOf(int64_t page, int64_t head) const { return keys + (page * heads + head) * width * size; }
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
struct Layer {
  Pool<T> prompt, own;
  Pool<float> staged;
  Tables tables;
  Shape shape;

  // Key/value heads [begin, end) of a slot, page after page as they lie: q and out [K, g, h].
  void Attend(const float* q, int64_t slot, int64_t begin, int64_t end, float* out) const {
    const int64_t most = std::max({prompt.size, own.size, staged.size}), unit = UNROLL * LANES;
    const int64_t room = (most + unit - 1) / unit * unit, block = shape.queries * shape.width;
    static thread_local std::vector<float> memory;
    memory.resize(QUERIES * room + 2 * shape.queries * (end - begin));
    auto sums = [&](int64_t head) {
      float* top = memory.data() + QUERIES * room + 2 * shape.queries * (head - begin);
      return Running{out + head * block, top, top + shape.queries, memory.data(), room};
    };
    for (int64_t head = begin; head < end; ++head) Start(sums(head), shape);
    const int64_t prompt_len = tables.prompt_len[slot], context = prompt_len + tables.own_len[slot];
    const int64_t first = tables.window ? tables.position[slot] - tables.window + 1 : 0;  // position seen first
    auto add = [&](const auto& pool, const int32_t* table, int64_t columns, int64_t base, int64_t last) {
      for (int64_t column = 0; column < columns && base < last; ++column, base += pool.size) {
        const int64_t page = table[column], next = column + 1 < columns ? table[column + 1] : -1;
        for (int64_t head = begin; head < end && page >= 0; ++head) {
          const auto* after = head + 1 < end ? pool.KeysOf(page, head + 1) : pool.KeysOf(next < 0 ? page : next, begin);
          AddKeys<QUERIES, UNROLL>(q + head * block, pool.At(page, head, first - base, last - base, after), shape,
                                   sums(head));
        }
      }
    };
    add(prompt, tables.prompt + slot * tables.prompt_columns, tables.prompt_columns, 0, prompt_len);
    add(own, tables.own + slot * tables.own_columns, tables.own_columns, prompt_len, context);
    const int32_t here = slot;
    add(staged, &here, 1, context, context + tables.staged);
    for (int64_t head = begin; head < end; ++head) Finish(sums(head), shape);
  }

  ffi::Error AttendAll(ffi::ThreadPool& pool, int64_t slots, int64_t heads, const float* q, float* out) const {
    const int64_t parts = slots < 2 * pool.num_threads() ? heads : 1, block = heads * shape.queries * shape.width;
    Parallel(pool, slots * parts, [&](int64_t task) {
      const int64_t slot = task / parts, part = task % parts;
      Attend(q + slot * block, slot, part * heads / parts, (part + 1) * heads / parts, out + slot * block);
    });
    return ffi::Error::Success();
  }
};

ffi::Error Attention(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer prompt_keys, ffi::AnyBuffer prompt_values,
                     Floats prompt_key_scale, Floats prompt_value_scale, ffi::AnyBuffer own_keys,
                     ffi::AnyBuffer own_values, Floats own_key_scale, Floats own_value_scale, ffi::AnyBuffer keys,
                     ffi::AnyBuffer values, Integers prompt, Integers prompt_len, Integers own, Integers own_len,
                     Integers position, Integers step, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap,
                     int64_t window) {
  const Tables tables{prompt.typed_data(), prompt_len.typed_data(), own.typed_data(), own_len.typed_data(),
                      position.typed_data(), prompt.dimensions()[1], own.dimensions()[1], *step.typed_data() + 1,
                      window};
  const auto sizes = q.dimensions(), here = keys.dimensions();  // S, K, g, h; S, K, h, T
  const Pool<float> staged{keys.typed_data<float>(), values.typed_data<float>(), nullptr, nullptr, here[1], here[2],
                           here[3]};
  const Shape shape{sizes[2], sizes[2], sizes[3], scale, softcap};
  auto run = [&](auto type) {
    using T = decltype(type);
    const Layer<T> layer{PoolOf<T>(prompt_keys, prompt_values, prompt_key_scale, prompt_value_scale),
                         PoolOf<T>(own_keys, own_values, own_key_scale, own_value_scale), staged, tables, shape};
    return layer.AttendAll(pool, sizes[0], sizes[1], q.typed_data(), out->typed_data());
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
