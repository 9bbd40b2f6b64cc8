"""GRPO: the reward of each sample, normalised inside its group (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rljax import advantages as formulas
from rljax.algorithms import per_token, rewards_and_groups
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """A = (reward - group mean) / (group std + 1e-6) on every trained token; `algo.normalize_std` False leaves the
    std out (Dr. GRPO, arXiv 2503.20783). A group of one, or with equal rewards, has A = 0. List of float32 [m]."""
    rewards, groups = rewards_and_groups(samples, algo, scores)
    return per_token(samples, formulas.group_normalize(rewards, groups, std=algo.normalize_std))
