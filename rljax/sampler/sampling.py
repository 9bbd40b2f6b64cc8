"""Drawing one token per slot from logits: temperature, top-k, top-p, min-p, and the log-prob of what was drawn."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

BLOCK = 256


@flax.struct.dataclass
class Knobs:
    """How each slot draws. A filter that is off leaves every probability exactly as it was."""

    temperature: jax.Array  # [S] float32, 0 = greedy
    top_k: jax.Array  # [S] int32, 0 or less = off
    top_p: jax.Array  # [S] float32, 1 or more = off
    min_p: jax.Array  # [S] float32, 0 = off

    def filtered(self) -> jax.Array:
        """Whether a slot draws from less than the whole distribution: bool [S]."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))


def keep_sorted(probs: jax.Array, knobs: Knobs) -> jax.Array:
    """Which of the probabilities, sorted from large to small, may be drawn: bool [S, V].

    probs [S, V], not necessarily normalised. top_k first, then top_p of what top_k left (the token that crosses
    the threshold is kept, and the first always is), then min_p relative to the largest.
    """
    rank = jnp.arange(probs.shape[-1])
    top_k, top_p = knobs.top_k[:, None], knobs.top_p[:, None]
    keep = (rank < top_k) | (top_k <= 0)
    kept = jnp.where(keep, probs, 0.0)
    before = jnp.cumsum(kept, axis=-1) - kept
    keep &= (before < top_p * kept.sum(-1, keepdims=True)) | (rank == 0) | (top_p >= 1.0)
    return keep & (probs >= knobs.min_p[:, None] * probs[:, :1])


def allowed(mass: jax.Array, knobs: Knobs) -> jax.Array:
    """Which tokens the filters leave, in the order of their ids: bool [S, V]; of equal ones the lower ids first."""
    ids = jnp.broadcast_to(jnp.arange(mass.shape[-1]), mass.shape)
    negative, order = jax.lax.sort((-mass, ids), num_keys=1, is_stable=True)
    last = jnp.maximum(keep_sorted(-negative, knobs).sum(-1, keepdims=True) - 1, 0)
    least = -jnp.take_along_axis(negative, last, axis=-1)
    return (mass > least) | ((mass == least) & (ids <= jnp.take_along_axis(order, last, axis=-1)))


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
    logits: jax.Array, uniform: jax.Array, forced: jax.Array, filters: jax.Array, knobs: Knobs, *, valid: int
) -> tuple[jax.Array, jax.Array]:
    """One token per slot and its log-prob under the tempered full softmax.

    logits [S, V] float32; uniform [S] in [0, 1); forced [S] int32 is the token to take, where it is not negative;
    filters, bool scalar: whether any slot that counts is filtered (without one the sort is skipped); temperature 0
    takes the largest logit, with the log-prob at temperature 1. Ids from `valid` on are rows that the tokenizer does
    not know: they are never drawn, but belong to the full softmax. Returns int32 [S], float32 [S] in nats.
    """
    greedy = knobs.temperature == 0.0
    known = jnp.arange(logits.shape[-1]) < valid
    best = jnp.argmax(jnp.where(known, logits, -jnp.inf), axis=-1)
    top = jnp.take_along_axis(logits, best[:, None], axis=-1)
    # Relative to the largest known logit: neither a tiny temperature nor a huge unknown row leaves no mass to draw.
    scaled = (logits - top) / jnp.where(greedy, 1.0, knobs.temperature)[:, None]
    mass = jnp.where(known, jnp.exp(scaled), 0.0)
    normalizer = jnp.log(mass.sum(-1))
    if valid < logits.shape[-1]:
        normalizer = jnp.logaddexp(normalizer, jax.nn.logsumexp(scaled[:, valid:], axis=-1))
    keep = jax.lax.cond(filters, allowed, lambda mass, _: jnp.ones(mass.shape, bool), mass, knobs)
    token = jnp.where(greedy, best, inverse_cdf(jnp.where(keep, mass, 0.0), uniform))
    token = jnp.where(forced >= 0, forced, token).astype(jnp.int32)
    return token, jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0] - normalizer
