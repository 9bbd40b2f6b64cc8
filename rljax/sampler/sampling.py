"""Drawing one token per slot from logits: temperature, top-k, top-p, min-p, and the log-prob of what was drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 256


def keep_sorted(probs: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which of the probabilities, sorted from large to small, may be drawn: bool [S, V].

    probs [S, V]; top_k [S] int32 (0 or less = all), then top_p [S] of what top_k left (the token that crosses
    the threshold is kept, and the first always is), then min_p [S] relative to the largest.
    """
    rank = jnp.arange(probs.shape[-1])
    keep = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    kept = jnp.where(keep, probs, 0.0)
    before = jnp.cumsum(kept, axis=-1) - kept
    keep &= (before < top_p[:, None] * kept.sum(-1, keepdims=True)) | (rank == 0)
    return keep & (probs >= min_p[:, None] * probs[:, :1])


def inverse_cdf(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index whose cumulative mass exceeds uniform * total: int32 [S].

    mass [S, V] float32, not normalised; uniform [S] in [0, 1). Two levels, block sums and then inside one block,
    since a cumulative sum over a whole vocabulary is the slow part. An index without mass is never drawn: where
    rounding runs past the end, the last index with mass is taken.
    """
    slots, vocab = mass.shape
    blocks = -(-vocab // BLOCK)
    mass = jnp.pad(mass, ((0, 0), (0, blocks * BLOCK - vocab))).reshape(slots, blocks, BLOCK)
    sums = mass.sum(-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    block = _first_above(ends, sums, target)
    start = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), inside, target - start)


def _first_above(ends: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """First index with ends > target and mass > 0, else the last with mass > 0: int32 [S]."""
    index = jnp.arange(ends.shape[-1])
    hit = (ends > target[:, None]) & (mass > 0)
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1)
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)


def draw(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    valid: int,
    filtered: bool,
) -> tuple[jax.Array, jax.Array]:
    """One token per slot and its log-prob under the tempered full softmax.

    logits [S, V] float32; keys [S] typed keys, one uniform from each; temperature [S] (0 = the largest logit,
    with the log-prob at temperature 1); ids from `valid` on are rows that the tokenizer does not know and are
    never drawn; `filtered` compiles the sort that top_k, top_p and min_p [S] need. Returns int32 [S], float32 [S]
    in nats.
    """
    greedy = temperature == 0.0
    logits = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    top = logits.max(-1, keepdims=True)
    mass = jnp.exp(logits - top)
    normalizer = jnp.log(mass.sum(-1)) + top[:, 0]
    known = jnp.arange(logits.shape[-1]) < valid
    mass = jnp.where(known, mass, 0.0)
    uniform = jax.vmap(jax.random.uniform)(keys)
    if filtered:
        order = jnp.argsort(-mass, axis=-1, stable=True)
        ranked = jnp.take_along_axis(mass, order, axis=-1)
        ranked = jnp.where(keep_sorted(ranked, top_k, top_p, min_p), ranked, 0.0)
        token = jnp.take_along_axis(order, inverse_cdf(ranked, uniform)[:, None], axis=-1)[:, 0]
    else:
        token = inverse_cdf(mass, uniform)
    best = jnp.argmax(jnp.where(known, logits, -jnp.inf), axis=-1)
    token = jnp.where(greedy, best, token).astype(jnp.int32)
    return token, jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - normalizer
