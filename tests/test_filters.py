"""Filters of groups: the published case, the built-in ones, and those of one's own."""

from __future__ import annotations

import pytest
from shared_data import cases

from rljax import filters
from rljax.sample import COMPLETED, TRUNCATED, Sample


def group(*rewards, statuses=None):
    statuses = statuses or [COMPLETED] * len(rewards)
    return [Sample(uid=i, group=0, reward=r, status=s) for i, (r, s) in enumerate(zip(rewards, statuses, strict=True))]


def test_case_equal_rewards():
    rows = [row for row in cases("numerics") if row["id"] == "FCT-100"]
    for row in rows:
        kept = [filters.reward_std(group(*rewards)) for rewards in row["input"]["groups"]]
        assert kept == row["expected"]["keep"]


@pytest.mark.parametrize(("name", "kept", "dropped"), [
    ("reward_std", [(0, 1), (0.1, None, 0.3)], [(1, 1), (0.5,), (None, None), (1, None)]),
    ("not_all_right", [(1, 0), (0.5, 0.5)], [(1, 1), (2,), (None,)]),
    ("not_all_wrong", [(1, 0), (1, 1)], [(0, 0.9), (None,)]),
])  # fmt: skip
def test_by_reward(name, kept, dropped):
    for rewards in kept:
        assert filters.find("rollout.dynamic_filter", name)(group(*rewards))
    for rewards in dropped:
        assert not filters.find("rollout.dynamic_filter", name)(group(*rewards))


def test_by_length():
    keeps = filters.BUILT_IN["not_all_truncated"]
    assert keeps(group(0, 0, statuses=[TRUNCATED, COMPLETED])) and not keeps(group(0, statuses=[TRUNCATED]))


def test_names():
    with pytest.raises(ValueError, match="rollout.sample_filter 'reward_sd': there are reward_std, not_all_right"):
        filters.find("rollout.sample_filter", "reward_sd")
    assert filters.find("rollout.dynamic_filter", "rljax.filters:not_all_wrong") is filters.not_all_wrong
