"""Advantage estimates: over groups of rewards on the host, over tokens on the device.

Group functions take one reward per sample, work in float64 and return numpy float32. Token functions take
[B, T] arrays (B samples, T tokens, aligned with the tokens) and return jnp float32; a token whose mask is 0
(padding, tool output) is skipped: it neither decays nor bootstraps, what stands there has no effect, and its
result is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Numbers = Sequence[float] | np.ndarray


def _grouped(rewards: Numbers, groups: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rewards as [N] float64 and, for each, the index of its group [N]."""
    values = np.asarray(rewards, np.float64)  # None becomes NaN
    ids = np.asarray(groups)
    if values.ndim != 1 or ids.shape != values.shape:
        raise ValueError(f"rewards of shape {values.shape} and groups of shape {ids.shape}: both must be [N]")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ValueError(
            f"rewards[{bad[0]}] is {rewards[bad[0]]} ({bad.size} of {values.size} are not finite): "
            "leave samples without a reward out, or give them the fallback"
        )
    return values, np.unique(ids, return_inverse=True)[1].reshape(-1)


def _deviations(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value less its group's mean, exactly 0 in a constant group, and its group's size."""
    size = np.bincount(group)
    mean = np.bincount(group, values) / np.maximum(size, 1)
    low, high = np.full(size.shape, np.inf), np.full(size.shape, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    # The mean of equal numbers may differ from them in the last bit, which a tiny deviation would blow up.
    return np.where((low == high)[group], 0.0, values - mean[group]), size[group]


def group_normalize(
    rewards: Numbers, groups: Sequence[int] | np.ndarray, std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """GRPO's advantage: (reward - mean of its group) / (deviation of its group with ddof 1 + eps).

    rewards [N]; groups [N] ids, in any order and of any sizes; std=False leaves the division out (Dr. GRPO).
    Returns [N] float32 in input order; a group of one and a constant group give exactly 0. Raises ValueError for
    unequal lengths and for a reward that is None or not finite. Shao et al. 2024 (arXiv:2402.03300).
    """
    values, group = _grouped(rewards, groups)
    deviations, size = _deviations(values, group)
    if std:
        variance = np.bincount(group, np.square(deviations))[group] / np.maximum(size - 1, 1)
        deviations = deviations / (np.sqrt(variance) + eps)
    return deviations.astype(np.float32)


def leave_one_out(rewards: Numbers, groups: Sequence[int] | np.ndarray) -> np.ndarray:
    """RLOO's advantage: the reward less the mean of the other samples of its group.

    rewards [N]; groups [N] ids. Returns [N] float32 in input order; a group of one gives 0. Raises ValueError as
    `group_normalize`. Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    values, group = _grouped(rewards, groups)
    deviations, size = _deviations(values, group)
    return (deviations * size / np.maximum(size - 1, 1)).astype(np.float32)


def _masked(x: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """x as float32 with 0 where the mask is 0, and the mask as booleans."""
    x, mask = jnp.asarray(x, jnp.float32), jnp.asarray(mask) != 0
    if x.shape != mask.shape:
        raise ValueError(f"an array of shape {x.shape} has a mask of shape {mask.shape}")
    return jnp.where(mask, x, 0.0), mask


def gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation over the trainable tokens; t+1 is the next trainable token.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        return_t = A_t + V_t

    rewards, values, mask [B, T]; V after the last trainable token is 0. Returns (advantages, returns), [B, T]
    float32, 0 where the mask is 0. Schulman et al. 2015 (arXiv:1506.02438).
    """
    values, keep = _masked(values, mask)
    rewards, _ = _masked(rewards, mask)

    def backward(carry, token):
        next_value, next_advantage = carry
        reward, value, keep = token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = jnp.where(keep, value, next_value), jnp.where(keep, advantage, next_advantage)
        return carry, jnp.where(keep, advantage, 0.0)

    end = jnp.zeros(values.shape[:1], jnp.float32)
    _, advantages = jax.lax.scan(backward, (end, end), (rewards.T, values.T, keep.T), reverse=True)
    return advantages.T, jnp.where(keep, advantages.T + values, 0.0)


def discounted_returns(rewards: ArrayLike, mask: ArrayLike, gamma: float) -> jax.Array:
    """G_t = r_t + gamma G_{t+1} over the trainable tokens: [B, T] float32, 0 where the mask is 0."""
    rewards, _ = _masked(rewards, mask)
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0)[0]


def token_rewards(reward: ArrayLike, kl: ArrayLike, mask: ArrayLike, kl_coef: float) -> jax.Array:
    """-kl_coef * kl on every trainable token, plus the sample's reward on the last trainable one.

    reward [B]; kl [B, T] nats; mask [B, T]. Returns [B, T] float32, 0 where the mask is 0. A sample without a
    trainable token gets no reward. Ouyang et al. 2022 (arXiv:2203.02155).
    """
    kl, keep = _masked(kl, mask)
    reward = jnp.asarray(reward, jnp.float32)
    if reward.shape != keep.shape[:1]:
        raise ValueError(f"reward of shape {reward.shape} for {keep.shape[0]} samples: one number each")
    trainable_from_here = jnp.cumsum(keep[:, ::-1], axis=1)[:, ::-1]
    last = keep & (trainable_from_here == 1)
    return jnp.where(keep, -kl_coef * kl, 0.0) + jnp.where(last, reward[:, None], 0.0)


def whiten(x: ArrayLike, mask: ArrayLike, eps: float = 1e-8) -> jax.Array:
    """(x - mean) / sqrt(variance with ddof 1 + eps), both over all trainable tokens of the array.

    x, mask of one shape; returns float32 of that shape, 0 where the mask is 0, and exactly 0 where the trainable
    values are all equal, one or none. eps is added to the variance, so that rounding errors of nearly equal
    values are not blown up.
    """
    x, keep = _masked(x, mask)
    count = jnp.sum(keep)
    mean = jnp.sum(x) / jnp.maximum(count, 1)
    constant = jnp.max(jnp.where(keep, x, -jnp.inf)) <= jnp.min(jnp.where(keep, x, jnp.inf))
    deviations = jnp.where(keep & ~constant, x - mean, 0.0)
    variance = jnp.sum(jnp.square(deviations)) / jnp.maximum(count - 1, 1)
    return deviations / jnp.sqrt(variance + eps)
