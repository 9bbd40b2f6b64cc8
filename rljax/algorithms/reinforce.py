"""REINFORCE with the mean reward of the whole rollout as baseline (Williams 1992)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rljax import advantages as formulas
from rljax.algorithms import per_token, rewards_and_groups
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """A = reward - mean reward of all samples, on every trained token. List of float32 [m]."""
    rewards, groups = rewards_and_groups(samples, algo, scores)
    return per_token(samples, formulas.group_normalize(rewards, np.zeros_like(groups), std=False))
