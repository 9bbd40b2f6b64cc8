"""Policy, value and divergence losses: one formula = one function, elementwise over [..., T], no reduction.

Everything is computed in float32. Log-probs are natural logarithms (nats). A step's loss is
`sum(loss_weight * token_loss)` with the host's weights (`packing.loss_weights`), so nothing here divides by a count.

Finite inputs give finite results and gradients. Exponents are bounded before they are taken, and differences and
factors are held within +-`LIMIT`: far beyond any honest value, and small enough that no product of them overflows.
Beyond a bound the gradient is 0. Values that may be NaN or infinite under the mask have to be replaced
(`jnp.where`) by the caller before they come here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

EXPONENT_LIMIT = 20.0  # nats; exp(20) = 4.9e8
LIMIT = 1e14  # LIMIT^2 * exp(EXPONENT_LIMIT) = 4.9e36 < 3.4e38, the largest float32
LOW_VAR_KL_LIMIT = 10.0
KL_KINDS = ("k1", "k2", "k3", "low_var_kl")
WEIGHT_MODES = ("truncate", "mask")


def _bounded(x: ArrayLike) -> jax.Array:
    """float32 copy of x within +-LIMIT."""
    return jnp.clip(jnp.asarray(x, jnp.float32), -LIMIT, LIMIT)


def _log_ratio(logp: ArrayLike, base: ArrayLike) -> jax.Array:
    """logp - base in nats, float32, within +-LIMIT."""
    return _bounded(jnp.asarray(logp, jnp.float32) - jnp.asarray(base, jnp.float32))


def _exp(log_ratio: jax.Array) -> jax.Array:
    """exp with the exponent bounded first."""
    return jnp.exp(jnp.clip(log_ratio, -EXPONENT_LIMIT, EXPONENT_LIMIT))


def clipped_surrogate(
    logp: ArrayLike,
    old_logp: ArrayLike,
    advantages: ArrayLike,
    eps_clip: float,
    eps_clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped policy loss, with an upper bound of its own and an optional dual clip.

        ratio = exp(clip(logp - old_logp, -20, 20))
        loss  = max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A)
        where A < 0 and dual_clip > 1:  loss = min(loss, -dual_clip A)

    All [..., T]. Returns (loss, clipped), float32; clipped is 1 where the second argument of max is strictly the
    larger; the dual clip does not count. On a tie the gradient is that of the unclipped term. dual_clip 0 = off.
    Raises ValueError for a dual_clip that is neither 0 nor above 1.
    Schulman et al. 2017 (arXiv:1707.06347); clip-higher: Yu et al. 2025 (arXiv:2503.14476); dual clip: Ye et al.
    2020 (arXiv:1912.09729).
    """
    if dual_clip != 0.0 and not dual_clip > 1.0:
        raise ValueError(f"dual_clip is {dual_clip}: it must be 0 (off) or above 1")
    advantages = _bounded(advantages)
    ratio = _exp(_log_ratio(logp, old_logp))
    unclipped_loss = -ratio * advantages
    clipped_loss = -jnp.clip(ratio, 1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    clipped = clipped_loss > unclipped_loss
    loss = jnp.where(clipped, clipped_loss, unclipped_loss)
    if dual_clip:
        ceiling = -dual_clip * advantages
        loss = jnp.where((advantages < 0) & (loss > ceiling), ceiling, loss)
    return loss, clipped.astype(jnp.float32)


def cispo_surrogate(
    logp: ArrayLike, old_logp: ArrayLike, advantages: ArrayLike, eps_clip: float, eps_clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """CISPO: the bounded ratio is a constant weight, so that no token loses its gradient.

        loss = -stop_gradient(clip(ratio, 1 - eps_clip, 1 + eps_clip_high)) A logp,   ratio = exp(logp - old_logp)

    All [..., T]. Returns (loss, clipped), float32; clipped is 1 where the ratio lies outside the window.
    MiniMax-M1 2025 (arXiv:2506.13585).
    """
    ratio = _exp(_log_ratio(logp, old_logp))
    bounded = jnp.clip(ratio, 1.0 - eps_clip, 1.0 + eps_clip_high)
    loss = -jax.lax.stop_gradient(bounded) * _bounded(advantages) * _bounded(logp)
    return loss, (bounded != ratio).astype(jnp.float32)


def sequence_log_ratio(
    logp: ArrayLike, old_logp: ArrayLike, loss_mask: ArrayLike, segment_ids: ArrayLike, *, total: bool = False
) -> jax.Array:
    """GSPO's log-ratio of a sequence: the mean of logp - old_logp over the trainable tokens of each segment; `total`:
    their sum, the log-ratio of the whole sequence's probability.

    logp, old_logp [..., T] nats; loss_mask [..., T] 0/1; segment_ids [..., T] integers. Returns [..., T] float32:
    the segment's mean (or sum) on each of its tokens, 0 in a segment with nothing to train. What stands under the mask
    has no effect. Into `clipped_surrogate` it goes as (this, 0). Zheng et al. 2025 (arXiv:2507.18071).
    """
    mask = jnp.asarray(loss_mask) != 0
    log_ratio = _log_ratio(jnp.where(mask, jnp.asarray(logp), 0.0), jnp.where(mask, jnp.asarray(old_logp), 0.0))

    def one_row(log_ratio: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
        # An id's place among the sorted ids is below T whatever the ids are, so that no scatter is out of range.
        slot = jnp.searchsorted(jnp.sort(segment_ids), segment_ids)
        sums = jnp.zeros_like(log_ratio).at[slot].add(log_ratio)
        count = jnp.zeros_like(log_ratio).at[slot].add(mask.astype(jnp.float32))
        return (sums if total else sums / jnp.maximum(count, 1.0))[slot]

    segment_ids = jnp.asarray(segment_ids)
    return jnp.vectorize(one_row, signature="(t),(t),(t)->(t)")(log_ratio, mask, segment_ids)


def approx_kl(
    logp: ArrayLike, ref_logp: ArrayLike, kind: str, *, old_logp: ArrayLike | None = None
) -> jax.Array:
    """Estimates KL(policy || reference) from one drawn token; lr = logp - ref_logp.

        k1  lr            k2  lr^2 / 2            k3  expm1(d) + lr with d = -lr bounded to +-20, and lr = -d
        low_var_kl  k3 bounded to [-10, 10]

    With old_logp, the log-prob under the policy that drew the token, the estimate is multiplied by
    exp(logp - old_logp) before the last bound, and its gradient is then unbiased too.
    All [..., T]; returns float32, nats. expm1 keeps k3 accurate where |lr| is small (5.0e-9 at 1e-4).
    Raises ValueError for an unknown kind. Schulman 2020, http://joschu.net/blog/kl-approx.html; the weight:
    DeepSeek-V3.2 2025 (arXiv:2512.02556).
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown kind of KL {kind!r}: one of {', '.join(KL_KINDS)}")
    log_ratio = _log_ratio(logp, ref_logp)
    if kind == "k1":
        kl = log_ratio
    elif kind == "k2":
        kl = 0.5 * jnp.square(log_ratio)
    else:
        exponent = jnp.clip(-log_ratio, -EXPONENT_LIMIT, EXPONENT_LIMIT)
        kl = jnp.expm1(exponent) - exponent
    if old_logp is not None:
        kl = kl * _exp(_log_ratio(logp, old_logp))
    return jnp.clip(kl, -LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else kl


def importance_weights(
    old_logp: ArrayLike, rollout_logp: ArrayLike, low: float, high: float, mode: str
) -> tuple[jax.Array, jax.Array]:
    """Corrects for the sampler's probabilities: weights on the policy term only, without gradient.

        w = exp(old_logp - rollout_logp);  `truncate`: clip(w, low, high);  `mask`: w inside [low, high], else 0

    All [..., T]. Returns (weights, clipped), float32; clipped is 1 where w lies outside [low, high].
    Raises ValueError for an unknown mode. Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training" (truncated importance sampling).
    """
    if mode not in WEIGHT_MODES:
        raise ValueError(f"unknown mode of importance weights {mode!r}: one of {', '.join(WEIGHT_MODES)}")
    ratio = jax.lax.stop_gradient(_exp(_log_ratio(old_logp, rollout_logp)))
    outside = (ratio < low) | (ratio > high)
    weights = jnp.clip(ratio, low, high) if mode == "truncate" else jnp.where(outside, 0.0, ratio)
    return weights, outside.astype(jnp.float32)


def value_loss(
    values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, value_clip: float
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped squared error of the critic, without a factor of one half.

        loss = max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)

    All [..., T], in units of reward. Returns (loss, clipped), float32; clipped is 1 where |v - v_old| > c. On a
    tie the gradient is that of the unclipped term. Schulman et al. 2017 (arXiv:1707.06347), as in OpenAI's
    baselines.
    """
    values, old_values, returns = _bounded(values), _bounded(old_values), _bounded(returns)
    change = values - old_values
    error = jnp.square(values - returns)
    clipped_error = jnp.square(old_values + jnp.clip(change, -value_clip, value_clip) - returns)
    loss = jnp.where(clipped_error > error, clipped_error, error)
    return loss, (jnp.abs(change) > value_clip).astype(jnp.float32)
