"""advantages.py: hand-computed numbers, the cases, and float64 loops for the recursions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import cases

from rljax import advantages, losses

ROWS = cases("numerics")
INTEGERS = ("groups", "mask")


def as_array(name, value):
    return np.array(value, np.int32 if name in INTEGERS else np.float32) if isinstance(value, list) else value


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    """Equal where `expected` is a number, and finite everywhere."""
    actual, expected = np.asarray(actual), np.array(expected, np.float64)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(np.where(np.isnan(expected), np.nan, actual), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["input"].get("call", "").startswith("rljax.advantages.")], ids=lambda r: r["id"]
)
def test_case(row):
    args = {key: as_array(key, value) for key, value in row["input"]["args"].items()}
    expected = row["expected"]
    result = getattr(advantages, row["input"]["call"].rpartition(".")[2])(**args)
    names = ("advantages", "returns") if isinstance(result, tuple) else ("value",)
    for name, actual in zip(names, result if isinstance(result, tuple) else (result,)):
        assert_close(actual, expected[name], expected["rtol"], expected["atol"])


@pytest.mark.parametrize(
    "row",
    [r for r in ROWS if r["input"].get("quantity") in ("returns_from_kl", "whitened_surrogate")],
    ids=lambda r: r["id"],
)
def test_quantity(row):
    args = {key: as_array(key, value) for key, value in row["input"]["args"].items()}
    if row["input"]["quantity"] == "returns_from_kl":
        rewards = advantages.token_rewards(args["reward"], args["kl"], args["mask"], args["kl_coef"])
        value = advantages.discounted_returns(rewards, args["mask"], args["gamma"])
    else:
        white = advantages.whiten(args["advantages"], args["mask"])
        loss, _ = losses.clipped_surrogate(
            args["log_ratio"], jnp.zeros_like(white), white, args["eps_clip"], args["eps_clip_high"]
        )
        value = jnp.sum(jnp.where(args["mask"] == 1, loss, 0.0)) / args["mask"].sum()
    assert_close(value, row["expected"]["value"])


def test_groups_by_hand():
    result = advantages.group_normalize([1, 0, 0, 0], [0, 0, 0, 0])
    assert isinstance(result, np.ndarray) and result.dtype == np.float32
    assert_close(result, [1.499997, -0.499999, -0.499999, -0.499999])
    assert_close(advantages.leave_one_out([1, 0, 0, 1], [5, 5, 5, 5]), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert_close(advantages.leave_one_out([1, 9, 0, 4], [3, 1, 3, 2]), [1, 0, -1, 0])
    assert advantages.group_normalize([], []).shape == (0,)


@pytest.mark.parametrize("function", [advantages.group_normalize, advantages.leave_one_out])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3, 1e8, 1e30])
def test_constant_groups_and_singletons_are_exactly_zero(function, reward):
    assert function([reward] * 7 + [2.0], [4] * 7 + [9]).tolist() == [0.0] * 8
    if function is advantages.group_normalize:
        assert function([reward] * 7, [4] * 7, std=False).tolist() == [0.0] * 7


def test_missing_reward_left_out_or_given_the_fallback():
    rewards = np.array([1.0, np.nan, 0.0, 1.0])
    scored = ~np.isnan(rewards)
    assert_close(advantages.group_normalize(rewards[scored], [0] * 3, std=False), [1 / 3, -2 / 3, 1 / 3])
    filled = np.where(scored, rewards, 0.0)
    assert_close(advantages.group_normalize(filled, [0] * 4, std=False), [0.5, -0.5, -0.5, 0.5])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_groups_against_a_loop_in_any_order(data):
    size = data.draw(st.integers(1, 12))
    rewards = np.array(data.draw(st.lists(st.floats(-100, 100, width=32), min_size=size, max_size=size)))
    groups = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size)))
    normalized, alone = np.zeros(size), np.zeros(size)
    for i in range(size):
        members, others = rewards[groups == groups[i]], rewards[(groups == groups[i]) & (np.arange(size) != i)]
        if len(others) and members.min() < members.max():
            normalized[i] = (rewards[i] - members.mean()) / (members.std(ddof=1) + 1e-6)
            alone[i] = rewards[i] - others.mean()
    order = np.array(data.draw(st.permutations(range(size))))
    assert_close(advantages.group_normalize(rewards[order], groups[order]), normalized[order], atol=1e-5)
    assert_close(advantages.leave_one_out(rewards[order], groups[order]), alone[order], atol=1e-4)


@pytest.mark.parametrize(
    ("rewards", "groups", "words"),
    [
        ([1.0, None, 2.0], [0, 0, 0], ("rewards[1]", "None", "1 of 3")),
        ([1.0, float("nan")], [0, 0], ("rewards[1]", "nan")),
        ([float("inf")], [0], ("rewards[0]", "inf")),
        ([1.0, 2.0], [0], ("(2,)", "(1,)")),
    ],
)
def test_bad_rewards_are_named(rewards, groups, words):
    with pytest.raises(ValueError) as error:
        advantages.group_normalize(rewards, groups)
    assert all(word in str(error.value) for word in words)


def gae_loop(rewards, values, mask, gamma, lam):
    """The recursion in float64, row by row over the trainable tokens alone."""
    result = np.zeros(mask.shape)
    for row in range(len(mask)):
        next_value = next_advantage = 0.0
        for t in reversed(np.flatnonzero(mask[row])):
            next_advantage = rewards[row, t] + gamma * next_value - values[row, t] + gamma * lam * next_advantage
            next_value = values[row, t]
            result[row, t] = next_advantage
    return result, np.where(mask, result + values, 0.0)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_gae_and_returns_against_a_loop(gamma, lam):
    rng = np.random.default_rng(3)
    rewards, values = rng.normal(size=(2, 5, 12))
    mask = rng.integers(0, 2, (5, 12))
    mask[3], mask[4] = 0, 1
    dirty = np.where(mask, rewards, np.nan), np.where(mask, values, np.inf)
    for actual, expected in zip(advantages.gae(*dirty, mask, gamma, lam), gae_loop(rewards, values, mask, gamma, lam)):
        assert actual.dtype == jnp.float32
        assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    expected, _ = gae_loop(rewards, np.zeros_like(values), mask, gamma, 1.0)
    assert_close(advantages.discounted_returns(dirty[0], mask, gamma), expected, rtol=1e-4, atol=1e-5)


def test_gae_by_hand():
    rewards, values, mask = np.array([[0, 0, 0, 1.0]]), np.array([[0.1, 0.2, 0.3, 0.4]]), np.ones((1, 4), int)
    assert_close(advantages.gae(rewards, values, mask, 1.0, 1.0)[0], [[0.9, 0.8, 0.7, 0.6]])
    assert_close(advantages.gae(rewards, values, mask, 1.0, 0.95)[0], [[0.799675, 0.7365, 0.67, 0.6]])
    jitted = jax.jit(advantages.gae)(rewards, values, mask, 1.0, 0.95)[0]
    assert_close(jitted, [[0.799675, 0.7365, 0.67, 0.6]])


def test_token_rewards():
    mask = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    kl = np.where(mask, 0.5, np.nan)
    result = advantages.token_rewards(np.array([1.0, 2.0, 3.0, 4.0]), kl, mask, 0.2)
    assert_close(result, [[-0.1, 0.9, 0, 0], [0, -0.1, -0.1, 1.9], [0, 0, 0, 0], [-0.1, 0, 3.9, 0]])
    with pytest.raises(ValueError, match=r"\(3,\) for 4"):
        advantages.token_rewards(np.ones(3), kl, mask, 0.2)


def test_whiten_against_numpy_and_ignores_the_mask():
    rng = np.random.default_rng(4)
    x, mask = rng.normal(3.0, 2.0, (3, 8)), rng.integers(0, 2, (3, 8))
    chosen = x[mask == 1]
    expected = np.where(mask, (x - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0.0)
    assert_close(advantages.whiten(np.where(mask, x, np.nan), mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
def test_whiten_of_equal_one_or_no_values_is_zero_with_a_finite_gradient(mask):
    x = jnp.full((4,), 1000.1)

    def total(x):
        white = advantages.whiten(x, np.array(mask))
        return white[0], white

    gradient, white = jax.jit(jax.grad(total, has_aux=True))(x)
    assert white.tolist() == [0.0] * 4
    assert np.isfinite(gradient).all()


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 4\)"):
        advantages.whiten(np.zeros((1, 3)), np.zeros((1, 4)))
