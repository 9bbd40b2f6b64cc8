"""Filters of groups, by name or by `package.module:function`: `fn(group) -> bool`, True keeps the group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rljax import plugins
from rljax.sample import TRUNCATED, Sample

Filter = Callable[[list[Sample]], bool]
LEAST_STD = 1e-6


def _rewards(group: list[Sample]) -> np.ndarray:
    return np.asarray([sample.reward for sample in group if sample.reward is not None], np.float64)


def reward_std(group: list[Sample]) -> bool:
    """Whether the rewards' deviation (ddof 1) exceeds 1e-6: equal rewards teach nothing (DAPO, arXiv 2503.14476)."""
    rewards = _rewards(group)
    return rewards.size > 1 and float(rewards.std(ddof=1)) > LEAST_STD


def not_all_right(group: list[Sample]) -> bool:
    """Whether some reward is below 1."""
    return bool((_rewards(group) < 1).any())


def not_all_wrong(group: list[Sample]) -> bool:
    """Whether some reward is at least 1."""
    return bool((_rewards(group) >= 1).any())


def not_all_truncated(group: list[Sample]) -> bool:
    """Whether some response ended before its limit."""
    return any(sample.status != TRUNCATED for sample in group)


BUILT_IN: dict[str, Filter] = {f.__name__: f for f in (reward_std, not_all_right, not_all_wrong, not_all_truncated)}


def find(knob: str, name: str) -> Filter:
    """The filter that the value `name` of `knob` means; ValueError listing what exists."""
    return BUILT_IN[name] if name in BUILT_IN else plugins.find(knob, name, __name__, tuple(BUILT_IN), "")
