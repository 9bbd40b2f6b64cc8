"""Drawing one token per slot from logits: temperature, top-k, top-p, min-p, and the log-prob of what was drawn."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

BLOCK = 256


@flax.struct.dataclass
class Knobs:
    """How each slot draws. What is off leaves every probability exactly as it was."""

    temperature: jax.Array  # [S] float32, 0 = greedy
    top_k: jax.Array  # [S] int32, 0 or less = off
    top_p: jax.Array  # [S] float32, 1 or more = off
    min_p: jax.Array  # [S] float32, 0 = off
    bias_ids: jax.Array  # [S, B] int32, tokens whose logits are raised
    bias: jax.Array  # [S, B] float32, by how much; 0 = off

    def special(self) -> jax.Array:
        """Whether a slot draws from anything but its own softmax: bool [S]."""
        filtered = (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))
        return filtered | (self.bias != 0.0).any(-1)


def allowed(mass: jax.Array, knobs: Knobs) -> jax.Array:
    """Which tokens the filters leave: bool [S, V].

    mass [S, V] float32, at least 0, not normalised. top_k first, then top_p of what top_k left (the token that crosses
    the threshold is kept, and the first always is), then min_p relative to the largest. Of equal tokens, those with
    lower ids come first. Thresholds are found by bisection, which on a CPU takes a tenth of the time of a sort.
    """
    bits = jax.lax.bitcast_convert_type(mass, jnp.int32)  # ordered as the floats are, denormal ones too
    by_k, by_p = knobs.top_k > 0, knobs.top_p < 1.0

    def count_above(least):
        return (bits > least[:, None]).sum(-1)

    def mass_above(least):
        return jnp.where(bits > least[:, None], mass, 0.0).sum(-1)

    count = jnp.where(by_k, jnp.minimum(knobs.top_k, mass.shape[-1]), mass.shape[-1])
    least = jnp.where(by_k, _bisect(by_k, bits, lambda at: count_above(at - 1) >= count), 0)
    most = count - count_above(least)  # how many of those equal to the threshold
    value = jax.lax.bitcast_convert_type(least, jnp.float32)
    goal = knobs.top_p * (mass_above(least) + jnp.where(by_k, most, 0) * value)
    least_p = _bisect(by_p, bits, lambda at: mass_above(at - 1) >= goal)
    higher = by_p & (least_p > least)
    least = jnp.where(higher, least_p, least)
    value = jax.lax.bitcast_convert_type(least, jnp.float32)
    most = jnp.where(higher, mass.shape[-1], most)
    needed = jnp.ceil((goal - mass_above(least)) / jnp.where(value > 0, value, 1.0))
    most = jnp.where(by_p, jnp.clip(needed, 1, most.astype(jnp.float32)).astype(jnp.int32), most)
    keep = (bits > least[:, None]) | _first(bits == least[:, None], most)
    return keep & (mass >= (knobs.min_p * mass.max(-1))[:, None])


def _bisect(wanted: jax.Array, bits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest threshold up to the largest of `bits` [S, V] that is `enough`: int32 [S]. 0 is enough, and what is
    below an enough one; where no slot is `wanted`, nothing is looked for."""

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low + 1) // 2
        good = enough(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    steps = jnp.where(wanted.any(), 31, 0)
    highest = bits.max(-1)
    return jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(highest), highest))[0]


def _first(equal: jax.Array, most: jax.Array) -> jax.Array:
    """The first `most` [S] of the true entries of `equal` [S, V]."""
    crowded = (equal.sum(-1) > most).any()
    return jax.lax.cond(crowded, lambda: equal & (jnp.cumsum(equal, axis=-1) <= most[:, None]), lambda: equal)


def inverse_cdf(logits: jax.Array, uniform: jax.Array, scaled: Callable[[jax.Array], jax.Array] = lambda x: x
                ) -> tuple[jax.Array, jax.Array]:
    """The first index whose cumulative mass exceeds uniform * total: (int32 [S], total mass float32 [S]).

    The mass is exp(scaled(logits)), of logits [S, V] float32, at most about 1 (-inf = none); scaled(x [S, ...]) is
    elementwise, and neither it nor the mass need be stored; uniform [S] in [0, 1). Two levels, sums of blocks and then
    inside one block, since a cumulative sum over a whole vocabulary is the slow part. An index without mass is never
    drawn: where rounding runs past the end, the last index with mass is taken.
    """
    slots, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    logits = jnp.pad(logits, ((0, 0), (0, blocks * BLOCK - vocab)), constant_values=-jnp.inf)
    logits = logits.reshape(slots, blocks, BLOCK)
    sums = jnp.exp(scaled(logits)).sum(-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    block = _first_above(ends, sums, target)
    start = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    inside = jnp.exp(scaled(jnp.take_along_axis(logits, block[:, None, None], axis=1)[:, 0]))
    return block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), inside, target - start), ends[:, -1]


def _first_above(ends: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """First index with ends > target and mass > 0, else the last with mass > 0: int32 [S]."""
    index = jnp.arange(ends.shape[-1])
    hit = (ends > target[:, None]) & (mass > 0)
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1)
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)


def draw(
    logits: jax.Array, uniform: jax.Array, forced: jax.Array, barred: jax.Array, special: jax.Array, knobs: Knobs, *,
    valid: int, stop_ids: tuple[int, ...] = (), alternatives: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One token per slot and its log-prob under the tempered full softmax.

    logits [S, V] float32; uniform [S] in [0, 1); forced [S] int32 is the token to take, where it is not negative;
    barred [S] bool: no stop id may be drawn; special, bool scalar: whether any slot that counts is barred or has a
    filter or a bias (without one these are skipped). Temperature 0 takes the largest logit, with the log-prob at
    temperature 1. Ids from `valid` on are rows that the tokenizer does not know: they are never drawn, but belong to
    the full softmax; a bias, as a filter, moves what is drawn, not what is recorded. Returns tokens int32 [S] and
    log-probs float32 [S] in nats, and the ids and log-probs [S, alternatives] of the most likely tokens.
    """
    greedy, vocab = knobs.temperature == 0.0, logits.shape[-1]
    temperature = jnp.where(greedy, 1.0, knobs.temperature)

    def known():
        return logits if valid == vocab else jnp.where(jnp.arange(vocab) < valid, logits, -jnp.inf)

    top = known().max(-1)

    def scaled(x):
        # Relative to the largest known logit: neither a tiny temperature nor a huge unknown row leaves no mass to draw.
        shape = (-1,) + (1,) * (x.ndim - 1)
        return (x - top.reshape(shape)) / temperature.reshape(shape)

    plain, total = inverse_cdf(known(), uniform, scaled)

    def restricted():
        slots = jnp.arange(len(logits))[:, None]
        changed = scaled(known()).at[slots, knobs.bias_ids].add(knobs.bias / temperature[:, None])
        stops = jnp.isin(jnp.arange(vocab), jnp.asarray(stop_ids, jnp.int32))
        changed = jnp.where(stops & barred[:, None], -jnp.inf, changed)
        changed = changed - changed.max(-1, keepdims=True)
        keep = allowed(jnp.exp(changed), knobs)
        return inverse_cdf(jnp.where(keep, changed, -jnp.inf), uniform)[0], changed.argmax(-1).astype(jnp.int32)

    def unrestricted():
        # On a CPU the index of the largest takes as long as the rest: only where it is asked for.
        return plain, jax.lax.cond(greedy.any(), lambda: known().argmax(-1).astype(jnp.int32), lambda: plain)

    drawn, best = jax.lax.cond(special, restricted, unrestricted)
    token = jnp.where(forced >= 0, forced, jnp.where(greedy, best, drawn)).astype(jnp.int32)
    normalizer = jnp.log(total)
    if valid < vocab:
        unknown = logits[:, valid:]  # relative to their own largest: scaled, they may lie far from 0
        most = unknown.max(-1)
        mass = jnp.exp((unknown - most[:, None]) / temperature[:, None]).sum(-1)
        normalizer = jnp.logaddexp(normalizer, scaled(most) + jnp.log(mass))
    logp = scaled(jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]) - normalizer
    likely, ids = jax.lax.top_k(logits, alternatives)
    return token, logp, ids.astype(jnp.int32), scaled(likely) - normalizer[:, None]
