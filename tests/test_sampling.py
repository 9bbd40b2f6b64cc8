"""One draw: distributions, filters, ties, the padded vocabulary, extremes; the cases of top-k, top-p and log-prob."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import cases

from rljax.sampler import sampling
from rljax.sampler.sampling import Knobs

CASES = [row for row in cases("sampler") if row["input"].get("quantity") in ("top_k", "top_p", "tempered_logprobs")]
SLOTS = 2000


def knobs(slots: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Knobs:
    return Knobs(jnp.full(slots, temperature, jnp.float32), jnp.full(slots, top_k, jnp.int32),
                 jnp.full(slots, top_p, jnp.float32), jnp.full(slots, min_p, jnp.float32),
                 jnp.zeros((slots, 1), jnp.int32), jnp.zeros((slots, 1), jnp.float32))


@functools.partial(jax.jit, static_argnames="valid")
def drawn(logits, uniform, forced, special, knobs, valid):
    return sampling.draw(logits, uniform, forced, jnp.zeros(len(uniform), bool), special, knobs, valid=valid)[:2]


def draw(logits, uniform, *, valid=None, forced=None, **filters):
    """Tokens and log-probs [S] of one distribution [V] for many uniforms [S], or of [S, V]."""
    uniform = np.atleast_1d(np.asarray(uniform, np.float32))
    logits = np.broadcast_to(np.asarray(logits, np.float32), (len(uniform), np.shape(logits)[-1]))
    how = knobs(len(uniform), **filters)
    forced = np.full(len(uniform), -1, np.int32) if forced is None else np.full(len(uniform), forced, np.int32)
    out = drawn(logits, uniform, forced, how.special().any(), how, valid or logits.shape[-1])
    return tuple(np.asarray(x) for x in out)


def kept(probs, **filters):
    """The set of tokens that the filters leave, and their renormalised probabilities."""
    probs = jnp.asarray(probs, jnp.float32)[None]
    mask = np.asarray(sampling.allowed(probs, knobs(1, **filters)))[0]
    left = np.where(mask, probs[0], 0.0)
    return np.flatnonzero(mask).tolist(), left / left.sum()


def softmax(logits):
    mass = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return mass / mass.sum()


@pytest.mark.parametrize("row", CASES, ids=lambda row: row["id"])
def test_case(row):
    args, expected = row["input"]["args"], row["expected"]
    tolerance = {"rtol": expected["rtol"], "atol": expected["atol"]}
    if row["input"]["quantity"] == "tempered_logprobs":
        width = len(args["logits"])
        for token in range(width):  # also under filters that leave the token out
            for filters in ({}, {"top_k": 1}):
                _, logp = draw(args["logits"], 0.5, forced=token, temperature=args["temperature"], **filters)
                np.testing.assert_allclose(logp[0], expected["value"][token], **tolerance)
        return
    probs = args["probs"] if "probs" in args else softmax(args["logits"])
    filters = {"top_k": args["k"]} if "k" in args else {"top_p": args["p"]}
    ids, left = kept(probs, **filters)
    assert ids == expected["value"]["kept"]
    np.testing.assert_allclose(left, expected["value"]["probs"], **tolerance)


def test_every_case_of_this_file_is_run():
    assert not cases("sampler") or {row["id"] for row in CASES} == {
        "SMP-006b", "SMP-007", "SMP-007b", "SMP-008", "SMP-027b"}


@pytest.mark.parametrize("probs, filters, expected", [
    ([0.25, 0.25, 0.25, 0.25], {"top_k": 2}, [0, 1]),  # ties keep exactly k, lower ids first
    ([0.1, 0.3, 0.3, 0.3], {"top_k": 2}, [1, 2]),
    ([0.1, 0.2, 0.3, 0.4], {"top_k": 9}, [0, 1, 2, 3]),
    ([0.1, 0.2, 0.3, 0.4], {"top_k": 0}, [0, 1, 2, 3]),
    ([0.1, 0.2, 0.3, 0.4], {"top_k": -1}, [0, 1, 2, 3]),
    ([0.1, 0.2, 0.3, 0.4], {"top_k": 1}, [3]),
    ([0.5, 0.25, 0.25, 0.0], {"top_p": 0.5}, [0]),  # reached exactly: no more
    ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.5}, [0, 1]),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 1e-9}, [3]),
    ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.5}, [0]),  # top-p of what top-k left: 0.4 / 0.7 reaches it
    ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.5}, [0, 1]),
    ([0.4, 0.3, 0.2, 0.1], {"min_p": 0.5}, [0, 1, 2]),
    ([0.4, 0.3, 0.2, 0.1], {"min_p": 1.0}, [0]),
    ([0.4, 0.3, 0.2, 0.1], {"top_k": 3, "top_p": 0.99, "min_p": 0.6}, [0, 1]),
])
def test_what_filters_leave(probs, filters, expected):
    assert kept(probs, **filters)[0] == expected


def test_filters_that_are_off_change_no_bit():
    """A slot without filters draws the same whether or not a neighbour is filtered, which is another branch."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(64, 700)) * 3).astype(np.float32)
    uniform = rng.random(64).astype(np.float32)
    off, none = knobs(64), np.full(64, -1, np.int32)
    one, other = (drawn(logits, uniform, none, flag, off, 700) for flag in (False, True))
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(-1, 12), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_filters_against_a_plain_loop(seed, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    probs = rng.choice([0.0, 1.0, 2.0, 3.0, 5.0, 8.0], 10).astype(np.float32)  # ties and zeros
    probs[rng.integers(10)] = 13.0
    order = sorted(range(10), key=lambda i: (-probs[i], i))
    left = order[:top_k] if top_k > 0 else order
    total, sum_before, expected = sum(probs[left]), 0.0, []
    for rank, i in enumerate(left):
        inside = rank == 0 or sum_before < np.float32(np.float32(top_p) * total) or top_p >= 1
        if inside and probs[i] >= np.float32(min_p) * np.float32(13.0):
            expected.append(i)
        sum_before += probs[i]
    assert kept(probs, top_k=top_k, top_p=top_p, min_p=min_p)[0] == sorted(expected)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.6, "top_k": 6}], ids=str)
def test_chi_square_of_200_000_draws(filters):
    rng = np.random.default_rng(1)
    logits = np.round(rng.normal(size=12) * 1.5, 2)
    logits[5] = -np.inf
    probs = softmax(logits / filters.get("temperature", 1.0))
    ids, _ = kept(probs, **{k: v for k, v in filters.items() if k != "temperature"})
    expected = np.where(np.isin(np.arange(12), ids), probs, 0.0)
    expected /= expected.sum()
    counts = np.zeros(12)
    for part in range(200_000 // SLOTS):
        uniform = jax.random.uniform(jax.random.key(part), (SLOTS,))
        counts += np.bincount(draw(logits, uniform, **filters)[0], minlength=12)
    assert counts.sum() == 200_000 and not counts[expected == 0].any()
    live = expected > 0
    statistic = ((counts - 200_000 * expected)[live] ** 2 / (200_000 * expected[live])).sum()
    degrees = live.sum() - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees), f"chi-square {statistic:.1f} for {degrees} degrees"


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 600])
def test_inverse_cdf_at_any_width(vocab):
    """Draw i lies where the cumulative sum passes the uniform; the vocabulary need not fill its last block."""
    rng = np.random.default_rng(vocab)
    mass = rng.random(vocab).astype(np.float32) * (rng.random(vocab) < 0.5)
    mass[rng.integers(vocab)] = 1.0
    uniform = np.linspace(0, 1, 997, endpoint=False).astype(np.float32)
    tokens, total = sampling.inverse_cdf(jnp.log(jnp.broadcast_to(mass, (997, vocab))), uniform)
    tokens, ends = np.asarray(tokens), np.cumsum(mass.astype(np.float64))
    np.testing.assert_allclose(total, ends[-1], rtol=1e-5)
    assert (mass[tokens] > 0).all()
    target = uniform * ends[-1]
    slack = 1e-5 * ends[-1]
    assert (ends[tokens] >= target - slack).all() and (ends[tokens] - mass[tokens] <= target + slack).all()
    assert set(tokens) >= set(np.flatnonzero(mass > 0.01 * ends[-1]))


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(np.float32(1), np.float32(0)), 0.5])
@pytest.mark.parametrize("zeros", ["front", "back", "both"])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9999}], ids=str)
def test_extreme_uniforms_never_draw_a_token_without_mass(uniform, zeros, filters):
    logits = np.zeros(1000, np.float32)
    if zeros in ("front", "both"):
        logits[:300] = -np.inf
    if zeros in ("back", "both"):
        logits[700:] = -np.inf
    token = draw(logits, uniform, **filters)[0][0]
    live = np.flatnonzero(np.isfinite(logits))
    assert token in live
    if not filters:
        assert abs(np.searchsorted(live, token) - int(uniform * len(live))) <= 1


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
def test_huge_logits_and_temperatures(scale, temperature):
    logits = np.array([-1.0, 0.25, 1.0, 0.5], np.float32) * np.float32(scale)
    token, logp = draw(logits, [0.01, 0.99], temperature=temperature)
    assert np.isfinite(logp).all() and (logp <= 0).all()
    if scale / max(temperature, 1e-6) > 1e3:
        assert token.tolist() == [2, 2] and logp.tolist() == [0, 0]


@pytest.mark.parametrize("unknown, temperature", [(1e4, 1e-6), (1e10, 0.9), (3e38, 0.95)])
def test_huge_logits_of_unknown_tokens_change_no_log_prob_but_by_their_mass(unknown, temperature):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 128)).astype(np.float32)
    logits[:, 120:] = rng.choice([-1.0, 1.0], (64, 1)) * unknown * rng.uniform(0.9, 1.0, (64, 8))
    token, logp = draw(logits, np.full(64, 0.5), valid=120, temperature=temperature)
    scaled = logits.astype(np.float64) / np.float32(temperature)
    expected = scaled[np.arange(64), token] - np.logaddexp.reduce(scaled, axis=-1)
    np.testing.assert_allclose(logp, expected, rtol=2e-6, atol=2e-6)


def test_one_valid_token():
    logits = np.full(500, -np.inf, np.float32)
    logits[321] = -50.0
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        token, logp = draw(logits, [0.0, 0.3, 0.9999999], **filters)
        assert token.tolist() == [321] * 3 and logp.tolist() == [0] * 3


@pytest.mark.parametrize("above", [0.5, 30.0, 1000.0])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_padded_rows_are_never_drawn_but_count_in_the_softmax(above, filters):
    """SMP-016: the largest logit lies in a row that the tokenizer does not know."""
    logits = np.array([0.0, 2.0, 1.0, 2.0 + above, -1.0], np.float32)
    token, logp = draw(logits, np.linspace(0, 0.999, 50), valid=3, **filters)
    assert token.max() < 3
    if filters.get("temperature") == 0.0:
        assert set(token) == {1}
    else:
        assert len(set(token)) > 1, "what is known must still be drawn by its own probabilities"
    full = logits.astype(np.float64) - logits.max()
    full -= np.log(np.exp(full).sum())
    np.testing.assert_allclose(logp, full[token], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_recorded_log_prob_is_of_the_tempered_full_softmax(temperature):
    logits = np.random.default_rng(3).normal(size=300) * 4
    for filters in ({}, {"top_k": 5}, {"top_p": 0.5}):
        token, logp = draw(logits, np.linspace(0, 0.99, 20), temperature=temperature, **filters)
        np.testing.assert_allclose(logp, np.log(softmax(logits / temperature))[token], atol=2e-5)


def test_greedy_takes_the_largest_with_its_log_prob_at_temperature_one():
    logits = np.array([0.0, 3.0, 3.0, 1.0])
    token, logp = draw(logits, [0.0, 0.99], temperature=0.0, top_k=3)
    assert token.tolist() == [1, 1], "of equal ones the lower id"
    np.testing.assert_allclose(logp, np.log(softmax(logits))[1], atol=1e-6)


def test_each_slot_has_its_own_knobs():
    logits = np.broadcast_to(np.array([1.0, 0.9, 0.8, 0.0], np.float32), (4, 4))
    how = Knobs(jnp.array([0.0, 1.0, 1.0, 1.0]), jnp.array([0, 1, 0, 0]), jnp.array([1.0, 1.0, 0.6, 1.0]),
                jnp.array([0.0, 0.0, 0.0, 0.0]), jnp.zeros((4, 1), jnp.int32), jnp.zeros((4, 1)))
    token, _ = drawn(logits, np.full(4, 0.999, np.float32), np.full(4, -1, np.int32), True, how, 4)
    assert np.asarray(token).tolist() == [0, 0, 1, 3]
    assert np.asarray(how.special()).tolist() == [False, True, True, False]
