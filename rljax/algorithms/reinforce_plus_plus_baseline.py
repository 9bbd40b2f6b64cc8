"""REINFORCE++ with the group's mean as baseline (Hu 2025, arXiv 2501.03262, its variant for groups of samples)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rljax import advantages as formulas
from rljax.algorithms import over_tokens, token_kl
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """A_t = whiten(reward - group mean - kl_coef KL_t), whitened over all trained tokens of the rollout. List of
    float32 [m]."""
    rewards, groups = [sample.reward for sample in samples], [sample.group for sample in samples]
    centered = formulas.group_normalize(rewards, groups, std=False)
    kl = token_kl(samples, algo, scores)
    return over_tokens(_whitened, samples, list(centered), kl, kl_coef=algo.kl_coef)[0]


def _whitened(mask: jax.Array, rewards: jax.Array, kl: jax.Array, kl_coef: float):
    return (formulas.whiten(rewards[:, None] - kl_coef * kl, mask),)
