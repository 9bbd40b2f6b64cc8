"""Attention, and log-prob and entropy of tokens from hidden states: the XLA reference of each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from rljax import sharding

MASKED = -1e30  # finite, so that a fully masked row (padding) gives no nan
QUERY_CHUNK = 512


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(x / cap); a cap of 0 is off (Gemma 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


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
    if length <= QUERY_CHUNK:
        return _attend_block(q, k, v, segment_ids, segment_ids, 0, window, scale, softcap)
    block = jax.checkpoint(_attend_block, static_argnums=(5, 7, 8))
    outputs = []
    for start in range(0, length, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, length)
        outputs.append(
            block(q[:, start:end], k[:, :end], v[:, :end], segment_ids[:, start:end], segment_ids[:, :end],
                  start, window, scale, softcap)
        )
    return jnp.concatenate(outputs, axis=1)


def _attend_block(q, k, v, query_segments, key_segments, start, window, scale, cap):
    """Attention of the queries from row position `start` on over all keys given."""
    rows, queries, heads, width = q.shape
    q = q.reshape(rows, queries, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("rtkgh,rskh->rkgts", q, k, preferred_element_type=jnp.float32) * scale
    scores = softcap(scores, cap)
    at = start + jnp.arange(queries)[:, None]
    key = jnp.arange(k.shape[1])[None, :]
    seen = (key <= at) & ((window == 0) | (key > at - window))
    seen = seen & (query_segments[:, :, None] == key_segments[:, None, :])
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("rkgts,rskh->rtkgh", weights, v).reshape(rows, queries, heads, width)


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    chunk: int = 8192,
    shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of `targets` and entropy of the tempered softmax, without ever holding [R, T, V].

    hidden [R, T, D] (already shifted: entry t predicts token t), head [V, D], targets [R, T] int32. Logits, in
    float32, are made `chunk` vocabulary rows at a time, forward with a running maximum and again in the backward
    pass. `shards`: how many parts of the vocabulary lie on different devices; a chunk takes rows from each, so
    that none moves. Returns (logp, entropy), [R, T] float32, nats. Both are differentiable.
    """
    vocab = head.shape[0]
    rows = -(-vocab // shards)  # of one shard
    parts = -(-rows // chunk)
    width = -(-rows // parts)
    # Padded inside each shard, so that no row moves to another device.
    padded = jnp.pad(head, ((0, shards * rows - vocab), (0, 0))).reshape(shards, rows, -1)
    padded = jnp.pad(padded, ((0, 0), (0, parts * width - rows), (0, 0)))
    chunks = padded.reshape(shards, parts, width, -1).swapaxes(0, 1)
    return _chunked_logprobs((vocab, rows, temperature, softcap), hidden, chunks, targets)


def _chunk_logits(static, hidden, weights, part):
    """(tempered logits, untempered ones), [R, T, shards, width], of one chunk and the vocabulary ids [shards, width]
    of its rows, -1 for padding. A logit of -inf (a token that cannot be) becomes `MASKED`, for 0 * inf would be nan."""
    vocab, rows, temperature, cap = static
    shards, width, _ = weights.shape
    row = part * width + jnp.arange(width)[None, :]
    ids = jnp.arange(shards)[:, None] * rows + row
    ids = jnp.where((row < rows) & (ids < vocab), ids, -1)
    raw = softcap(jnp.einsum("rtd,swd->rtsw", hidden, weights, preferred_element_type=jnp.float32), cap)
    raw = sharding.constrain(raw, ("batch", None, "vocab", None))
    return jnp.where(ids >= 0, jnp.maximum(raw / temperature, MASKED), MASKED), raw, ids


def _whole(weights):
    """One chunk [shards, width, D] with its width gathered: more of the head is never whole on a device."""
    return sharding.constrain(weights, ("vocab", None, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_logprobs(static, hidden, chunks, targets):
    return _chunked_forward(static, hidden, chunks, targets)[0]


def _chunked_forward(static, hidden, chunks, targets):
    def body(carry, item):
        top, total, weighted, target_logit = carry
        logits, _, ids = _chunk_logits(static, hidden, _whole(item[0]), item[1])
        new_top = jnp.maximum(top, logits.max((-2, -1)))
        scale = jnp.exp(top - new_top)
        mass = jnp.exp(logits - new_top[..., None, None])
        total = total * scale + mass.sum((-2, -1))
        weighted = weighted * scale + (mass * logits).sum((-2, -1))
        hit = ids == targets[..., None, None]
        return (new_top, total, weighted, target_logit + jnp.where(hit, logits, 0.0).sum((-2, -1))), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    carry = (zeros + MASKED, zeros, zeros, zeros)
    (top, total, weighted, target_logit), _ = jax.lax.scan(body, carry, (chunks, jnp.arange(chunks.shape[0])))
    normalizer = top + jnp.log(total)
    logp, entropy = target_logit - normalizer, normalizer - weighted / total
    return (logp, entropy), (hidden, chunks, targets, normalizer, entropy)


def _chunked_backward(static, saved, cotangents):
    hidden, chunks, targets, normalizer, entropy = saved
    d_logp, d_entropy = (x[..., None, None] for x in cotangents)
    _, _, temperature, cap = static

    def body(d_hidden, item):
        weights = _whole(item[0])
        logits, raw, ids = _chunk_logits(static, hidden, weights, item[1])
        surprise = logits - normalizer[..., None, None]
        p = jnp.exp(surprise)
        d = d_logp * ((ids == targets[..., None, None]) - p) - d_entropy * p * (surprise + entropy[..., None, None])
        d = d / temperature * (1.0 - (raw / cap) ** 2 if cap else 1.0)
        d = d.astype(hidden.dtype)
        d_hidden += jnp.einsum("rtsw,swd->rtd", d, weights, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("rtsw,rtd->swd", d, hidden, preferred_element_type=jnp.float32)
        d_weights = sharding.constrain(d_weights, ("vocab", None, "embed"))
        return d_hidden, d_weights.astype(chunks.dtype)

    zeros = jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, d_chunks = jax.lax.scan(body, zeros, (chunks, jnp.arange(chunks.shape[0])))
    return d_hidden.astype(hidden.dtype), d_chunks, None


_chunked_logprobs.defvjp(_chunked_forward, _chunked_backward)
