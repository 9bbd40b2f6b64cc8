"""losses.py: hand-computed numbers, the cases, a float64 model of each formula, gradients, and extreme inputs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_data import cases

from rljax import losses, packing

ROWS = cases("numerics")
INTEGERS = ("loss_mask", "segment_ids")
RESULTS = {
    "clipped_surrogate": ("loss", "clipped"),
    "cispo_surrogate": ("loss", "clipped"),
    "value_loss": ("loss", "clipped"),
    "importance_weights": ("weights", "clipped"),
}
# What a test function differentiates by, and the bounds and modes it is called with.
SETTINGS = [
    ("clipped_surrogate", {"eps_clip": 0.2, "eps_clip_high": 0.28}, 3),
    ("clipped_surrogate", {"eps_clip": 0.2, "eps_clip_high": 0.28, "dual_clip": 1.4}, 3),
    ("cispo_surrogate", {"eps_clip": 0.2, "eps_clip_high": 0.28}, 3),
    ("approx_kl", {"kind": "k1"}, 2),
    ("approx_kl", {"kind": "k2"}, 2),
    ("approx_kl", {"kind": "k3"}, 2),
    ("approx_kl", {"kind": "low_var_kl"}, 2),
    ("importance_weights", {"low": 0.5, "high": 2.0, "mode": "truncate"}, 2),
    ("importance_weights", {"low": 0.5, "high": 2.0, "mode": "mask"}, 2),
    ("value_loss", {"value_clip": 0.2}, 3),
]
IDS = [f"{name}-{'-'.join(map(str, settings.values()))}" for name, settings, _ in SETTINGS]


def model(name, settings, a, b, c=None):
    """The formulas of the module in float64 numpy: (result, clipped)."""
    with np.errstate(over="ignore"):
        ratio = np.exp(np.clip(a - b, -20, 20))
    if name in ("clipped_surrogate", "cispo_surrogate"):
        bounded = np.clip(ratio, 1 - settings["eps_clip"], 1 + settings["eps_clip_high"])
        if name == "cispo_surrogate":
            return -bounded * c * a, bounded != ratio
        loss = np.maximum(-ratio * c, -bounded * c)
        clipped = -bounded * c > -ratio * c
        if settings.get("dual_clip"):
            loss = np.where(c < 0, np.minimum(loss, -settings["dual_clip"] * c), loss)
        return loss, clipped
    if name == "approx_kl":
        bounded = np.clip(b - a, -20, 20)
        k3 = np.expm1(bounded) - bounded
        kinds = {"k1": a - b, "k2": (a - b) ** 2 / 2, "k3": k3, "low_var_kl": np.clip(k3, -10, 10)}
        return kinds[settings["kind"]], None
    if name == "importance_weights":
        outside = (ratio < settings["low"]) | (ratio > settings["high"])
        truncated = np.clip(ratio, settings["low"], settings["high"])
        return truncated if settings["mode"] == "truncate" else np.where(outside, 0, ratio), outside
    move = np.clip(a - b, -settings["value_clip"], settings["value_clip"])
    return np.maximum((a - c) ** 2, (b + move - c) ** 2), np.abs(a - b) > settings["value_clip"]


def as_array(name, value):
    """A list of a case as an array, `null` and text as floats."""
    if not isinstance(value, list):
        return value
    return jnp.asarray(np.array(value, np.int32 if name in INTEGERS else np.float32))


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    """Equal where `expected` is a number, and finite everywhere."""
    actual, expected = np.asarray(actual), np.array(expected, np.float64)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(np.where(np.isnan(expected), np.nan, actual), expected, rtol=rtol, atol=atol)


def run(name, settings, *arrays):
    """What the function returns, and the gradients of its first result's sum by every array: one program."""

    def total(arrays):
        result = getattr(losses, name)(*arrays, **settings)
        return jnp.sum(result[0] if isinstance(result, tuple) else result), result

    gradients, result = jax.jit(jax.grad(total, has_aux=True))(arrays)
    return result, gradients


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["input"].get("call", "").startswith("rljax.losses.")], ids=lambda r: r["id"]
)
def test_case(row):
    name = row["input"]["call"].rpartition(".")[2]
    args = {key: as_array(key, value) for key, value in row["input"]["args"].items()}
    expected, function = row["expected"], getattr(losses, name)
    names = RESULTS.get(name, ("value",))
    wrt = expected.get("grad", {}).get("wrt", next(iter(args)))

    def total(x):
        result = function(**{**args, wrt: x})
        results = result if isinstance(result, tuple) else (result,)
        return jnp.sum(results[0]), results

    gradient, results = jax.jit(jax.grad(total, has_aux=True))(args[wrt])
    for key, actual in zip(names, results, strict=True):
        assert_close(actual, expected[key], expected["rtol"], expected["atol"])
    assert_close(gradient, expected.get("grad", {}).get("value", np.full(gradient.shape, None)))


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r["input"].get("quantity") in ("unbiased_kl", "gspo_loss")], ids=lambda r: r["id"]
)
def test_quantity(row):
    args = {key: as_array(key, value) for key, value in row["input"]["args"].items()}
    if row["input"]["quantity"] == "unbiased_kl":
        value = losses.approx_kl(**args)
    else:
        mask = args["loss_mask"]
        ratio = losses.sequence_log_ratio(args["logp"], args["old_logp"], mask, args["segment_ids"])
        loss, _ = losses.clipped_surrogate(
            ratio, jnp.zeros_like(ratio), args["advantages"], args["eps_clip"], args["eps_clip_high"]
        )
        value = jnp.sum(loss * jnp.stack(packing.loss_weights(np.asarray(mask), "sample_mean")))
    assert_close(value, row["expected"]["value"])


def test_hand_computed():
    logp, zero = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5, 1.1])), jnp.zeros(5)
    loss, clipped = losses.clipped_surrogate(logp, zero, jnp.array([1.0, 1, -1, -1, 2]), 0.2, 0.2)
    assert_close(loss, [-1.2, -0.5, 1.5, 0.8, -2.2])
    assert clipped.tolist() == [1, 0, 0, 1, 0]
    rollout = jnp.array([-1.0, -2.0, -0.5, -1.1])
    weights, clipped = losses.importance_weights(-jnp.ones(4), rollout, 0.0, 2.0, "truncate")
    assert_close(weights, [1, 2, 0.60653066, 1.10517092])
    assert clipped.tolist() == [0, 1, 0, 0]
    assert_close(losses.approx_kl(jnp.array([1e-4]), jnp.zeros(1), "k3"), [4.9998333e-9], rtol=1e-3, atol=0)


def test_dual_clip_bounds_only_negative_advantages_and_stops_their_gradient():
    logp, advantages = jnp.log(jnp.array([8.0, 8.0])), jnp.array([-2.0, 2.0])
    loss, clipped = losses.clipped_surrogate(logp, jnp.zeros(2), advantages, 0.2, 0.2, dual_clip=3.0)
    assert_close(loss, [6.0, -2.4])
    assert clipped.tolist() == [0, 1]
    gradient = jax.grad(lambda x: losses.clipped_surrogate(x, jnp.zeros(2), advantages, 0.2, 0.2, 3.0)[0].sum())(logp)
    assert gradient.tolist() == [0, 0]


@pytest.mark.parametrize(("name", "settings", "arrays"), SETTINGS, ids=IDS)
def test_values_and_gradients_against_float64(name, settings, arrays):
    rng = np.random.default_rng(1)
    inputs = [rng.normal(size=(4, 16)).astype(np.float32) for _ in range(arrays)]
    inputs[0] = (inputs[1] + rng.normal(size=(4, 16)) * 0.5).astype(np.float32)
    exact = [x.astype(np.float64) for x in inputs]
    expected, expected_clipped = model(name, settings, *exact)
    result, gradient = run(name, settings, *inputs)
    value = result[0] if isinstance(result, tuple) else result
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6)
    if expected_clipped is not None:
        assert result[1].dtype == jnp.float32
        np.testing.assert_array_equal(result[1], expected_clipped)
        assert 0 < expected_clipped.sum() < expected_clipped.size
    step = 1e-7
    up, down = (model(name, settings, exact[0] + sign * step, *exact[1:])[0] for sign in (1, -1))
    numeric = (up - down) / (2 * step)
    if name == "cispo_surrogate":
        numeric = expected / exact[0]  # the ratio is held constant
    if name == "importance_weights":
        numeric = np.zeros_like(expected)
    np.testing.assert_allclose(gradient[0], numeric, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "settings", "arrays"), SETTINGS, ids=IDS)
def test_every_finite_input_gives_finite_results_and_gradients(name, settings, arrays):
    largest = float(np.finfo(np.float32).max)
    numbers = [0.0, 1e-38, -1.0, 89.0, -1e4, 3e15, -1e30, largest, -largest]
    grid = np.array(list(itertools.product(numbers, repeat=arrays)), np.float32).T

    for leaf in jax.tree.leaves(run(name, settings, *grid)):
        assert np.isfinite(leaf).all()


def test_half_precision_inputs_are_computed_in_float32():
    logp = jnp.array([-1.0, -2.0], jnp.bfloat16)
    kl = losses.approx_kl(logp, jnp.array([-1.001, -2.001], jnp.float32), "k3")
    assert kl.dtype == jnp.float32
    assert_close(kl, [4.9983e-7, 4.9983e-7], rtol=1e-3, atol=0)


def test_unbiased_kl_is_weighted_before_the_bound():
    # k3 at a log-ratio of -3 is 16.09: bounded before the weight it would give 10 exp(-1) = 3.68.
    args = jnp.array([-3.0]), jnp.zeros(1), "low_var_kl"
    assert_close(losses.approx_kl(*args, old_logp=jnp.array([-2.0])), [16.08553692 * np.exp(-1.0)])
    assert_close(losses.approx_kl(*args, old_logp=jnp.array([-4.0])), [10.0])


def test_gradient_of_unbiased_kl_is_that_of_the_true_kl():
    logits, reference = jnp.array([0.3, -0.8, 1.1]), jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.4]))
    old = jax.nn.log_softmax(jnp.array([0.1, 0.1, 0.2]))

    def estimated(logits):  # the expectation over tokens drawn from the old policy
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(old) * losses.approx_kl(logp, reference, "k3", old_logp=old))

    def true(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - reference))

    np.testing.assert_allclose(jax.grad(estimated)(logits), jax.grad(true)(logits), rtol=1e-4, atol=1e-6)


def test_sequence_log_ratio_against_a_loop():
    rng = np.random.default_rng(2)
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [7, 7, 900, 900, 7, 4, 4, 0]])
    mask = rng.integers(0, 2, segments.shape) * (segments > 0)
    mask[0, 3:5] = 0  # a segment with nothing to train
    logp, old = rng.normal(size=(2, *segments.shape)).astype(np.float32)
    expected = np.zeros(segments.shape)
    for row, token in np.ndindex(segments.shape):
        chosen = (segments[row] == segments[row, token]) & (mask[row] == 1)
        expected[row, token] = (logp[row] - old[row])[chosen].mean() if chosen.any() else 0.0
    dirty = np.where(mask == 1, logp, np.nan), np.where(mask == 1, old, -np.inf).astype(np.float32)
    function = jax.jit(losses.sequence_log_ratio)
    np.testing.assert_allclose(function(*dirty, mask, segments), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(function(*dirty, mask, segments), function(logp, old, mask, segments))
    one_row = function(logp[0], old[0], mask[0], segments[0])
    np.testing.assert_allclose(one_row, expected[0], rtol=1e-5, atol=1e-6)


def test_sequence_log_ratio_spreads_its_gradient_over_the_trainable_tokens():
    mask, segments = jnp.array([[1, 0, 1, 1, 1]]), jnp.array([[1, 1, 1, 2, 0]])
    logp = jnp.where(mask == 1, -1.0, jnp.nan)
    total = jax.jit(jax.grad(lambda x: losses.sequence_log_ratio(x, jnp.zeros((1, 5)), mask, segments)[0, 0]))
    gradient = total(logp)
    assert_close(gradient, [[0.5, 0, 0.5, 0, 0]])


def test_ties_keep_the_whole_gradient():
    logp = jnp.zeros(2)
    surrogate = jax.grad(lambda x: losses.clipped_surrogate(x, logp, jnp.array([1.0, -1]), 0.0, 0.0)[0].sum())(logp)
    assert surrogate.tolist() == [-1, 1]
    value = jax.grad(lambda v: losses.value_loss(v, jnp.zeros(2), jnp.array([1.0, -2]), 0.2)[0].sum())(jnp.zeros(2))
    assert value.tolist() == [-2, 4]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: losses.approx_kl(x, x, "k4"), ("k4", "low_var_kl")),
        (lambda x: losses.importance_weights(x, x, 0, 2, "clip"), ("clip", "truncate")),
        (lambda x: losses.clipped_surrogate(x, x, x, 0.2, 0.2, dual_clip=0.5), ("dual_clip", "0.5")),
    ],
)
def test_errors_name_what_was_given_and_what_exists(call, words):
    with pytest.raises(ValueError) as error:
        call(jnp.zeros(1))
    assert all(word in str(error.value) for word in words)
