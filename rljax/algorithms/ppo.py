"""PPO: generalised advantage estimation with a critic (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rljax import advantages as formulas
from rljax.algorithms import over_tokens, token_kl
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """GAE(gamma, lambd) over the trained tokens, of token rewards -kl_coef KL_t plus the sample's reward on its last
    trained token. Needs `scores` with values. List of float32 [m]; the critic's returns are these plus the values."""
    values = [one.need("values") for one in scores]
    rewards = [sample.reward for sample in samples]
    kl = token_kl(samples, algo, scores)
    return over_tokens(
        _gae, samples, rewards, kl, values, kl_coef=algo.kl_coef, gamma=algo.gamma, lam=algo.lambd
    )[0]


def _gae(mask: jax.Array, rewards: jax.Array, kl: jax.Array, values: jax.Array, kl_coef: float, gamma: float,
         lam: float) -> tuple[jax.Array]:
    token_rewards = formulas.token_rewards(rewards, kl, mask, kl_coef)
    return (formulas.gae(token_rewards, values, mask, gamma, lam)[0],)
