"""Stage 4 of 7: advantage estimators, one file each.

An estimator's module defines `advantages(samples, algo, scores) -> list of float32 [m]`, one value for each of the m
response tokens of each sample; `algo` is the config's section and `scores` has one `Scores` for each sample. A path
`package.module:function` works as well.
"""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rljax import losses, plugins
from rljax.sample import Sample

Estimator = Callable[..., list[np.ndarray]]
WANTED_BY = {  # where a score is missing, what asks for it
    "old_logprobs": "algo.kl_coef > 0, or several updates per rollout",
    "ref_logprobs": "algo.kl_metric=true, or a KL coefficient above 0",
    "teacher_logprobs": "algo.opd_kl_coef > 0",
    "values": "algo.critic=true",
}


@dataclasses.dataclass(frozen=True)
class Scores:
    """What models say of one sample's response tokens, float32 [m] each; None where nothing asked for it."""

    old_logprobs: np.ndarray | None = None  # nats, by the policy before the rollout's first update
    ref_logprobs: np.ndarray | None = None  # nats, by the reference
    teacher_logprobs: np.ndarray | None = None  # nats, by the teacher
    values: np.ndarray | None = None  # by the critic, in units of reward

    def need(self, name: str) -> np.ndarray:
        """The array `name`; ValueError saying which knob makes it where it was not computed."""
        if (found := getattr(self, name)) is None:
            raise ValueError(f"the advantage estimator reads {name}, which nothing asked for: set {WANTED_BY[name]}")
        return found


def names() -> list[str]:
    """The built-in estimators: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Estimator:
    """The estimator `name`: a module of this folder, or `package.module:function`, found from the working directory.

    Raises ValueError listing what exists.
    """
    return plugins.find("algo.advantage_estimator", name, __name__, names(), "advantages")


def estimate(estimator: Estimator, samples: list[Sample], algo: Any, scores: Sequence[Scores]) -> list[np.ndarray]:
    """`estimator(samples, algo, scores)` as float32 [m] each, checked; ValueError where it does not fit the samples."""
    found = [np.asarray(values, np.float32) for values in estimator(samples, algo, scores)]
    if len(found) != len(samples):
        raise ValueError(f"algo.advantage_estimator returned {len(found)} arrays for {len(samples)} samples")
    for sample, values in zip(samples, found, strict=True):
        if values.shape != (len(sample.response_tokens),):
            raise ValueError(f"algo.advantage_estimator returned shape {values.shape} for sample {sample.uid}, which "
                             f"has {len(sample.response_tokens)} response tokens")
        if not np.isfinite(values).all():
            raise ValueError(f"algo.advantage_estimator returned {values[~np.isfinite(values)][0]} for sample "
                             f"{sample.uid}")
    return found


def per_token(samples: list[Sample], scalars: np.ndarray) -> list[np.ndarray]:
    """One scalar for each sample, on each of its trained tokens (0 on the others): list of float32 [m]."""
    return [
        np.where(np.asarray(sample.loss_mask) > 0, np.float32(scalar), np.float32(0))
        for sample, scalar in zip(samples, scalars, strict=True)
    ]


def rewards_and_groups(samples: list[Sample], algo: Any, scores: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
    """(reward less kl_coef times the sum of the sample's token KL [N] float64, group ids [N])."""
    rewards = np.asarray([sample.reward for sample in samples], np.float64)
    if algo.kl_coef > 0:
        masks = [np.asarray(sample.loss_mask) > 0 for sample in samples]
        kl = token_kl(samples, algo, scores)
        rewards = rewards - algo.kl_coef * np.asarray([x[mask].sum() for x, mask in zip(kl, masks)], np.float64)
    return rewards, np.asarray([sample.group for sample in samples])


def token_kl(samples: list[Sample], algo: Any, scores: Sequence[Scores]) -> list[np.ndarray]:
    """KL of the old policy to the reference on each trained token, of kind `kl_reward_type`, nats: float32 [m] each;
    zeros where kl_coef is 0."""
    if not algo.kl_coef > 0:
        return [np.zeros(len(sample.response_tokens), np.float32) for sample in samples]
    pairs = [[one.need(name) for one in scores] for name in ("old_logprobs", "ref_logprobs")]
    return over_tokens(kl_estimate, samples, *pairs, kind=algo.kl_reward_type)[0]


def kl_estimate(mask: jax.Array, logp: jax.Array, base: jax.Array, kind: str) -> tuple[jax.Array]:
    """`losses.approx_kl` as `over_tokens` takes it."""
    return (losses.approx_kl(logp, base, kind),)


def over_tokens(function: Callable[..., Any], samples: list[Sample], *arrays: Sequence[Any], **static: Any):
    """`function(mask, *arrays, **static)` over all samples at once, as one program; its outputs as lists of [m].

    Each of `arrays` holds one [m] for each sample, or one scalar each. Token arrays become [B, M] float32 with 0 under
    the mask, both sizes rounded up to powers of two so that few shapes are compiled, scalars [B]. The function returns
    a tuple of [B, M] arrays.
    """
    masks = [np.asarray(sample.loss_mask) > 0 for sample in samples]
    rows = 1 << (len(samples) - 1).bit_length()
    width = 1 << max(0, max(map(len, masks)) - 1).bit_length()

    def dense(values: Sequence[np.ndarray]) -> np.ndarray:
        if np.ndim(values[0]) == 0:
            return np.pad(np.asarray(values, np.float32), (0, rows - len(samples)))
        out = np.zeros((rows, width), np.float32)
        for row, (value, mask) in enumerate(zip(values, masks, strict=True)):
            out[row, : len(mask)] = np.where(mask, value, 0.0)
        return out

    outputs = _compiled(function, tuple(static))(dense(masks), *map(dense, arrays), **static)
    return [[np.array(row[: len(mask)]) for row, mask in zip(np.asarray(out), masks)] for out in outputs]


@functools.lru_cache(maxsize=64)
def _compiled(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(function, static_argnames=names)
