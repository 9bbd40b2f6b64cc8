"""Supervised fine-tuning in the same trainer: every token of the given response counts alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from rljax.algorithms import per_token
from rljax.sample import Sample


def advantages(samples: list[Sample], algo: Any, scores: Any) -> list[np.ndarray]:
    """A = 1 on every trained token; with the surrogate `sft` the loss is their negative log-likelihood."""
    return per_token(samples, np.ones(len(samples)))
