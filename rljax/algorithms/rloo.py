"""RLOO: each sample against the mean of the others of its group (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rljax import advantages as formulas
from rljax.algorithms import per_token, rewards_and_groups
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """A = reward - mean reward of the group's other samples, on every trained token. A group of one has A = 0. List of
    float32 [m]."""
    return per_token(samples, formulas.leave_one_out(*rewards_and_groups(samples, algo, scores)))
