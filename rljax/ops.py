"""Attention, and log-prob and entropy of tokens from hidden states: the XLA reference of each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rljax import sharding

MASKED = -1e30  # finite, so that a fully masked row (padding) gives no nan
QUERY_CHUNK = 128
TOKEN_BLOCK = 256  # tokens of one block of logits, at least


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(x / cap); a cap of 0 is off (Gemma 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


def ordered_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum along `axis`, by adding halves: the order of a backend's own sums may change with the other dimensions."""
    size = x.shape[axis]
    full = 1 << (size - 1).bit_length()
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, full - size)
    x = jnp.pad(x, widths)
    while full > 1:
        full //= 2
        x = jax.lax.slice_in_dim(x, 0, full, axis=axis) + jax.lax.slice_in_dim(x, full, 2 * full, axis=axis)
    return jnp.squeeze(x, axis)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    window: jax.Array | int,
    *,
    scale: float,
    softcap: float = 0.0,
) -> jax.Array:
    """Causal grouped-query attention inside packed segments.

    q [R, T, H, h], k and v [R, T, K, h] with H a multiple of K, segment_ids [R, T]; a query sees the keys of its
    own segment at or before it, at most `window` of them, its own included (0 = all). Products in q's dtype,
    scores and softmax in float32. Long rows go by blocks of queries, whose scores are made again in the
    backward pass. Returns [R, T, H, h] in q's dtype.
    """
    length = q.shape[1]
    size = max(QUERY_CHUNK, -(-length // 16))
    if length <= size:
        return _attend_block(q, k, v, segment_ids, segment_ids, 0, window, scale, softcap)
    block = jax.checkpoint(_attend_block, static_argnums=(5, 7, 8))
    outputs = []
    for start in range(0, length, size):
        end = min(start + size, length)
        outputs.append(
            block(q[:, start:end], k[:, :end], v[:, :end], segment_ids[:, start:end], segment_ids[:, :end],
                  start, window, scale, softcap)
        )
    return jnp.concatenate(outputs, axis=1)


def _attend_block(q, k, v, query_segments, key_segments, start, window, scale, cap):
    """Attention of the queries from row position `start` on over all keys given."""
    rows, queries, heads, width = q.shape
    kv_heads = k.shape[2]
    # Heads outermost and one flat axis of queries: products of plain matrices, which a CPU does at full speed.
    q = q.reshape(rows, queries, kv_heads, -1, width).transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, width)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = jnp.einsum("rkqh,rksh->rkqs", q, k, preferred_element_type=jnp.float32) * scale
    scores = softcap(scores, cap).reshape(rows, kv_heads, queries, -1, k.shape[2])
    at = start + jnp.arange(queries)[:, None]
    key = jnp.arange(k.shape[2])[None, :]
    seen = (key <= at) & ((window == 0) | (key > at - window))
    seen = seen & (query_segments[:, :, None] == key_segments[:, None, :])
    scores = jnp.where(seen[:, None, :, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(rows, kv_heads, -1, k.shape[2])
    out = jnp.einsum("rkqs,rksh->rkqh", weights, v).reshape(rows, kv_heads, queries, -1, width)
    return out.transpose(0, 2, 1, 3, 4).reshape(rows, queries, heads, width)


def page_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    kernel: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one decoding step over W pages of P keys, each by itself: the parts of a softmax, to be merged.

    q [W, K, M, g, h]: M members see a page, each with g query heads for one of its K heads. keys [W, K, h, P], values
    [W, K, P, h], in q's dtype or int8 with key_scale and value_scale [W, K, P] float32, by which each key and value is
    to be multiplied. first, last [W, M] int32: a member sees first <= index < last, both in 0..P; last <= first: none.
    Scores and sums in float32, products in q's dtype. `kernel`: "xla", or "tpu" or "gpu" for that of `kernels/`.
    Returns, all float32: out [W, K, M, g, h], sum of exp(score - top) * value over the keys seen; top [W, K, M, g],
    their largest score; total [W, K, M, g], sum of exp(score - top). Where none is seen: 0, `MASKED` and 0.
    Raises ValueError if only one of the scales is given.
    """
    if (key_scale is None) != (value_scale is None):
        raise ValueError("key_scale and value_scale belong together: only one of them is given")
    if kernel == "xla":
        return _page_attention(q, keys, values, first, last, scale, softcap, key_scale, value_scale)
    from rljax.kernels import page_attention as kernels

    return kernels.page_attention(q, keys, values, first, last, scale=scale, softcap=softcap, key_scale=key_scale,
                                  value_scale=value_scale, platform=kernel)


def _page_attention(q, keys, values, first, last, scale, cap, key_scale, value_scale):
    """`page_attention` in XLA: members and their query heads as one axis of rows, so plain products of matrices."""
    pages, kv_heads, members, group, width = q.shape
    rows = q.reshape(pages, kv_heads, members * group, width)
    scores = jnp.einsum("wkrh,wkhp->wkrp", rows, keys.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    if key_scale is not None:
        scores = scores * key_scale[:, :, None]
    scores = softcap(scores, cap)
    at = jnp.arange(keys.shape[-1])
    low, high = (jnp.repeat(x, group, axis=1)[:, None, :, None] for x in (first, last))
    seen = (at >= low) & (at < high)
    scores = jnp.where(seen, scores, MASKED)
    top = scores.max(-1)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    total = ordered_sum(weights, -1)
    if value_scale is not None:
        weights = weights * value_scale[:, :, None]
    out = jnp.einsum("wkrp,wkph->wkrh", weights.astype(q.dtype), values.astype(q.dtype),
                     preferred_element_type=jnp.float32)
    return out.reshape(q.shape), top.reshape(q.shape[:-1]), total.reshape(q.shape[:-1])


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    chunk: int = 8192,
    shards: int = 1,
    groups: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of `targets` and entropy of the tempered softmax where `mask` is set, without ever holding [R, T, V].

    hidden [R, T, D] (already shifted: entry t predicts token t), head [V, D], targets [R, T] int32, mask [R, T]: where
    it is 0, both results are 0 and cost next to nothing. Logits, in float32, are made for `chunk` vocabulary rows and
    a block of tokens at a time, forward with a running maximum and again in the backward pass. `shards`: how many
    parts of the vocabulary lie on different devices (a chunk takes rows from each, so that none moves); `groups`: how
    many parts of the rows do, a divisor of R. Returns (logp, entropy), [R, T] float32, nats. Both are differentiable.
    """
    vocab = head.shape[0]
    rows = -(-vocab // shards)  # of one shard
    parts = -(-rows // chunk)
    width = -(-rows // parts)
    # Padded inside each shard, so that no row moves to another device.
    padded = jnp.pad(head, ((0, shards * rows - vocab), (0, 0))).reshape(shards, rows, -1)
    padded = jnp.pad(padded, ((0, 0), (0, parts * width - rows), (0, 0)))
    chunks = padded.reshape(shards, parts, width, -1).swapaxes(0, 1)
    hidden, targets, wanted = (_grouped(x, groups) for x in (hidden, targets, mask > 0))
    static = (vocab, rows, temperature, softcap)
    return tuple(x.reshape(mask.shape) for x in _chunked_logprobs(static, hidden, chunks, targets, wanted))


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """[R, T, ...] as [groups, tokens, ...]."""
    x = x.reshape(groups, -1, *x.shape[2:])
    return sharding.constrain(x, ("batch",) + (None,) * (x.ndim - 1))


def _wanted_first(wanted):
    """(block size, order [G, N] with each group's wanted tokens first, where each token went [G, N], number of blocks
    that hold a wanted token)."""
    block = min(wanted.shape[1], max(TOKEN_BLOCK, -(-wanted.shape[1] // 8)))
    order = jnp.argsort(~wanted, axis=1, stable=True)
    return block, order, jnp.argsort(order, axis=1), -(-wanted.sum(1).max() // block)


def _take(x, index, block=1):
    """x [G, N, ...] at index [G, N] of its second axis, zeros behind up to whole blocks."""
    x = jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)
    return jnp.pad(x, ((0, 0), (0, -index.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))


def _chunk_logits(static, hidden, weights, part):
    """(tempered logits, untempered ones), [G, B, shards, width], of one chunk and the vocabulary ids [shards, width]
    of its rows, -1 for padding. A logit of -inf (a token that cannot be) becomes `MASKED`, for 0 * inf would be nan."""
    vocab, rows, temperature, cap = static
    shards, width, _ = weights.shape
    row = part * width + jnp.arange(width)[None, :]
    ids = jnp.arange(shards)[:, None] * rows + row
    ids = jnp.where((row < rows) & (ids < vocab), ids, -1)
    raw = softcap(jnp.einsum("gbd,swd->gbsw", hidden, weights, preferred_element_type=jnp.float32), cap)
    raw = sharding.constrain(raw, ("batch", None, "vocab", None))
    return jnp.where(ids >= 0, jnp.maximum(raw / temperature, MASKED), MASKED), raw, ids


def _whole(weights):
    """One chunk [shards, width, D] with its width gathered: more of the head is never whole on a device."""
    return sharding.constrain(weights, ("vocab", None, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_logprobs(static, hidden, chunks, targets, wanted):
    return _chunked_forward(static, hidden, chunks, targets, wanted)[0]


def _chunked_forward(static, hidden, chunks, targets, wanted):
    block, order, place, used = _wanted_first(wanted)
    hidden, targets = _take(hidden, order, block), _take(targets, order, block)

    def one_chunk(carry, item):
        weights = _whole(item[0])

        def one_block(index, carry):
            at = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=index * block, slice_size=block, axis=1)
            top, total, weighted, target_logit = (at(x) for x in carry)
            logits, _, ids = _chunk_logits(static, at(hidden), weights, item[1])
            new_top = jnp.maximum(top, logits.max((-2, -1)))
            scale = jnp.exp(top - new_top)
            mass = jnp.exp(logits - new_top[..., None, None])
            hit = ids == at(targets)[..., None, None]
            new = (new_top, total * scale + mass.sum((-2, -1)), weighted * scale + (mass * logits).sum((-2, -1)),
                   target_logit + jnp.where(hit, logits, 0.0).sum((-2, -1)))
            return tuple(jax.lax.dynamic_update_slice_in_dim(x, y, index * block, 1) for x, y in zip(carry, new))

        return jax.lax.fori_loop(0, used, one_block, carry), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    carry = (zeros + MASKED, zeros, zeros, zeros)
    (top, total, weighted, target_logit), _ = jax.lax.scan(one_chunk, carry, (chunks, jnp.arange(chunks.shape[0])))
    normalizer = top + jnp.log(total)
    logp, entropy = target_logit - normalizer, normalizer - weighted / total
    results = tuple(jnp.where(wanted, _take(x, place), 0.0) for x in (logp, entropy))
    return results, (hidden, chunks, targets, normalizer, entropy, wanted)


def _chunked_backward(static, saved, cotangents):
    hidden, chunks, targets, normalizer, entropy, wanted = saved
    block, order, place, used = _wanted_first(wanted)
    d_logp, d_entropy = (_take(jnp.where(wanted, x, 0.0), order, block) for x in cotangents)
    _, _, temperature, cap = static

    def one_chunk(d_hidden, item):
        weights = _whole(item[0])

        def one_block(index, carry):
            def at(x):
                part = jax.lax.dynamic_slice_in_dim(x, index * block, block, axis=1)
                return part[..., None, None] if x.ndim == 2 else part

            logits, raw, ids = _chunk_logits(static, at(hidden), weights, item[1])
            surprise = logits - at(normalizer)
            p = jnp.exp(surprise)
            d = at(d_logp) * ((ids == at(targets)) - p) - at(d_entropy) * p * (surprise + at(entropy))
            d = (d / temperature * (1.0 - (raw / cap) ** 2 if cap else 1.0)).astype(hidden.dtype)
            d_hidden, d_weights = carry
            more = jnp.einsum("gbsw,swd->gbd", d, weights, preferred_element_type=jnp.float32)
            d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, at(d_hidden) + more, index * block, 1)
            return d_hidden, d_weights + jnp.einsum("gbsw,gbd->swd", d, at(hidden), preferred_element_type=jnp.float32)

        d_hidden, d_weights = jax.lax.fori_loop(0, used, one_block, (d_hidden, jnp.zeros(weights.shape, jnp.float32)))
        return d_hidden, sharding.constrain(d_weights, ("vocab", None, "embed")).astype(chunks.dtype)

    zeros = jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, d_chunks = jax.lax.scan(one_chunk, zeros, (chunks, jnp.arange(chunks.shape[0])))
    d_hidden = jnp.where(wanted[..., None], _take(d_hidden, place), 0.0)
    return d_hidden.astype(hidden.dtype), d_chunks, None, None


_chunked_logprobs.defvjp(_chunked_forward, _chunked_backward)
