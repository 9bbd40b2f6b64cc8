"""REINFORCE++: KL in the token rewards, discounted returns, whitened over the rollout (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rljax import advantages as formulas
from rljax.algorithms import over_tokens, token_kl
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """A_t = whiten(sum over s >= t of gamma^(s - t) r_s), r_s = -kl_coef KL_s, plus the sample's reward on its last
    trained token; whitened over all trained tokens of the rollout. List of float32 [m]."""
    rewards = [sample.reward for sample in samples]
    kl = token_kl(samples, algo, scores)
    return over_tokens(_whitened_returns, samples, rewards, kl, kl_coef=algo.kl_coef, gamma=algo.gamma)[0]


def _whitened_returns(mask: jax.Array, rewards: jax.Array, kl: jax.Array, kl_coef: float, gamma: float):
    returns = formulas.discounted_returns(formulas.token_rewards(rewards, kl, mask, kl_coef), mask, gamma)
    return (formulas.whiten(returns, mask),)
