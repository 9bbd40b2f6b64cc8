"""ops.py: attention and token log-probs against plain float64 formulas, their gradients, extremes and memory."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_data import cases

from rljax import ops, sharding

ROWS = {row["input"]["quantity"]: row for row in cases("numerics") if "quantity" in row["input"]}


def plain_attention(q, k, v, segments, window, scale, cap):
    """Query by query, head by head, in float64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for row, at, head in np.ndindex(q.shape[:3]):
        low = max(0, at - window + 1) if window else 0
        keys = [s for s in range(low, at + 1) if segments[row, s] == segments[row, at]]
        scores = k[row, keys, head // group] @ q[row, at, head] * scale
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        out[row, at, head] = weights / weights.sum() @ v[row, keys, head // group]
    return out


def attend(*args, **settings):
    """`ops.attention` as one program."""
    return jax.jit(functools.partial(ops.attention, **settings), static_argnums=4)(*args)


@functools.cache
def attention_inputs(length=23, heads=4, kv_heads=2):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, length, n, 8)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    segments = np.array([[1] * 9 + [2] * 14, [1] * 3 + [2] * 1 + [3] * 12 + [0] * 7])
    return q, k, v, segments


@pytest.mark.parametrize(
    ("kv_heads", "window", "cap", "block"),
    [(2, 0, 0.0, 512), (1, 5, 0.0, 512), (4, 1, 3.0, 512), (2, 5, 3.0, 7), (1, 0, 0.0, 8)],
)
def test_attention_against_the_formula(monkeypatch, kv_heads, window, cap, block):
    monkeypatch.setattr(ops, "QUERY_CHUNK", block)
    q, k, v, segments = attention_inputs(kv_heads=kv_heads)
    out = attend(q, k, v, segments, window, scale=0.4, softcap=cap)
    expected = plain_attention(*(x.astype(np.float64) for x in (q, k, v)), segments, window, 0.4, cap)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


def test_blocks_of_queries_change_neither_value_nor_gradient(monkeypatch):
    q, k, v, segments = attention_inputs()

    def result(block):
        monkeypatch.setattr(ops, "QUERY_CHUNK", block)

        def total(args):
            out = ops.attention(*args, segments, 6, scale=0.4, softcap=2.0)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(total, has_aux=True))((q, k, v))

    (whole, out), (blocks, out_blocks) = result(23), result(8)
    np.testing.assert_allclose(out_blocks, out, atol=1e-6)
    for one, other in zip(whole, blocks, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


def test_a_traced_window_equals_a_static_one():
    q, k, v, segments = attention_inputs()
    traced = jax.jit(lambda w: ops.attention(q, k, v, segments, w, scale=0.4))
    for window in (0, 4):
        np.testing.assert_allclose(traced(window), attend(q, k, v, segments, window, scale=0.4), atol=1e-6)


def test_rows_of_padding_are_finite_in_value_and_gradient():
    q, k, v, _ = attention_inputs()
    args = [x * 1e4 for x in (q, k, v)]  # a masked score must not win by its size
    empty = np.zeros(q.shape[:2], np.int32)
    value, gradients = jax.jit(jax.value_and_grad(lambda a: ops.attention(*a, empty, 3, scale=1.0).sum()))(args)
    assert all(np.isfinite(x).all() for x in [value, *gradients])


def test_a_query_that_may_see_nothing_is_finite():
    q, k, v, segments = attention_inputs()
    block = functools.partial(ops._attend_block, query_segments=segments + 9, key_segments=segments, start=0, window=0,
                              scale=1.0, cap=0.0)
    value, gradients = jax.jit(jax.value_and_grad(lambda a: block(*a).sum()))([q, k, v])
    assert all(np.isfinite(x).all() for x in [value, *gradients])


def test_half_precision_attention_keeps_its_softmax_in_float32():
    q, k, v, segments = attention_inputs()
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    out = attend(*half, segments, 0, scale=0.4)
    assert out.dtype == jnp.bfloat16
    expected = plain_attention(*(np.asarray(x, np.float64) for x in half), segments, 0, 0.4, 0.0)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)


def plain_logprobs(hidden, head, targets, temperature, cap):
    """(logp, entropy) from a whole log-softmax, differentiable."""
    logits = hidden @ head.T
    logits = (cap * jnp.tanh(logits / cap) if cap else logits) / temperature
    logp = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def fast_logprobs(hidden, head, targets, mask=None, **settings):
    """`ops.token_logprobs`, of all tokens without a mask."""
    return ops.token_logprobs(hidden, head, targets, np.ones(targets.shape) if mask is None else mask, **settings)


def combined(function, targets, mask=1.0):
    """A scalar of both results whose gradient weighs every token differently, zero weights among them."""
    weights = np.linspace(-1, 1, targets.size, dtype=np.float32).reshape(targets.shape) * mask

    def total(hidden, head):
        logp, entropy = function(hidden, head, targets)
        return jnp.sum(weights * logp) + jnp.sum((1 - weights) * mask * entropy), (logp, entropy)

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("vocab", "chunk", "shards", "temperature", "cap"),
    [(37, 100, 1, 1.0, 0.0), (37, 8, 1, 0.7, 0.0), (37, 5, 4, 1.0, 3.0), (40, 5, 2, 1.3, 2.0), (41, 1, 8, 1.0, 0.0),
     (3, 8, 4, 1.0, 0.0)],
)
def test_token_logprobs_against_the_formula(vocab, chunk, shards, temperature, cap):
    rng = np.random.default_rng(1)
    hidden, head = rng.normal(size=(2, 5, 16)).astype(np.float32), rng.normal(size=(vocab, 16)).astype(np.float32)
    targets = rng.integers(0, vocab, (2, 5)).astype(np.int32)
    targets[0, :2] = 0, vocab - 1
    fast = functools.partial(fast_logprobs, temperature=temperature, softcap=cap, chunk=chunk, shards=shards)
    gradients, values = combined(fast, targets)(hidden, head)
    plain = functools.partial(plain_logprobs, temperature=temperature, cap=cap)
    with jax.enable_x64(True):
        expected = combined(plain, targets)(hidden.astype(np.float64), head.astype(np.float64))
    assert values[0].dtype == values[1].dtype == jnp.float32
    for one, other in zip(jax.tree.leaves((gradients, values)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 4, 100])
@pytest.mark.parametrize("groups", [1, 3])
def test_only_tokens_of_the_mask_are_computed(monkeypatch, block, groups):
    monkeypatch.setattr(ops, "TOKEN_BLOCK", block)
    rng = np.random.default_rng(4)
    hidden, head = rng.normal(size=(3, 11, 8)).astype(np.float32), rng.normal(size=(20, 8)).astype(np.float32)
    targets = rng.integers(0, 20, (3, 11)).astype(np.int32)
    for share in (0.0, 0.4, 1.0):
        mask = (rng.random((3, 11)) < share).astype(np.int32)
        fast = functools.partial(fast_logprobs, mask=mask, chunk=7, groups=groups)
        found = combined(fast, targets, mask)(hidden, head)
        plain = combined(functools.partial(plain_logprobs, temperature=1.0, cap=0.0), targets, mask)
        gradients, values = plain(hidden, head)
        expected = gradients, [np.where(mask, value, 0.0) for value in values]
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [40, 37])
def test_token_logprobs_split_over_devices(vocab):
    rng = np.random.default_rng(2)
    hidden, head = rng.normal(size=(4, 6, 16)).astype(np.float32), rng.normal(size=(vocab, 16)).astype(np.float32)
    targets = rng.integers(0, vocab, (4, 6)).astype(np.int32)
    expected = combined(functools.partial(fast_logprobs, chunk=6), targets)(hidden, head)
    mesh = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        split = sharding.to_devices(head, sharding.named(("vocab", "embed"), sharding.TRAIN_RULES, mesh, head.shape))
        rows = sharding.to_devices(hidden, sharding.named(("batch", None, None), sharding.TRAIN_RULES, mesh))
        found = combined(functools.partial(fast_logprobs, chunk=6, shards=2, groups=4), targets)(rows, split)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_entropy_of_an_even_and_of_a_certain_distribution():
    hidden = np.ones((1, 1, 1), np.float32)
    targets = np.zeros((1, 1), np.int32)
    logp, entropy = fast_logprobs(hidden, np.zeros((50, 1), np.float32), targets, chunk=7)
    assert float(entropy[0, 0]) == pytest.approx(np.log(50), rel=1e-6)
    assert float(logp[0, 0]) == pytest.approx(-np.log(50), rel=1e-6)
    logp, entropy = fast_logprobs(hidden, 1e4 * np.eye(50, 1, dtype=np.float32), targets, chunk=7)
    assert (float(logp[0, 0]), float(entropy[0, 0])) == (0.0, 0.0)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_case_entropy_with_excluded_tokens(chunk):
    """An excluded token: its logit overflows to -inf, from weights that are finite."""
    if "entropy" not in ROWS:
        pytest.skip("case NUM-027 is missing")
    row = ROWS["entropy"]
    for logits, expected in zip(row["input"]["args"]["logits"], row["expected"]["value"], strict=True):
        logits = np.array(logits, np.float32)
        finite = np.where(np.isinf(logits), 0.0, logits)
        head = np.stack([finite, np.where(np.isinf(logits), -1e30, 0.0)], axis=1).astype(np.float32)
        hidden = np.array([[[1.0, 1e30]]], np.float32)
        for target in range(len(logits)):
            function = functools.partial(fast_logprobs, chunk=chunk)
            gradients, (logp, entropy) = combined(function, np.full((1, 1), target, np.int32))(hidden, head)
            assert float(entropy[0, 0]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
            if np.isfinite(logits[target]):
                exact = logits[target] - np.log(np.exp(logits).sum())
                assert float(logp[0, 0]) == pytest.approx(exact, rel=1e-5, abs=1e-6)
                assert all(np.isfinite(x).all() for x in gradients)


def test_case_tempered_logprobs():
    if "tempered_logprobs" not in ROWS:
        pytest.skip("case NUM-020 is missing")
    args, expected = ROWS["tempered_logprobs"]["input"]["args"], ROWS["tempered_logprobs"]["expected"]["value"]
    head = np.array(args["logits"], np.float32)[:, None]
    targets = np.arange(len(head), dtype=np.int32)[None]
    hidden = np.ones((1, len(head), 1), np.float32)
    logp, _ = fast_logprobs(hidden, head, targets, temperature=args["temperature"])
    np.testing.assert_allclose(logp[0], expected, rtol=1e-5, atol=1e-6)


def test_half_precision_hidden_states_give_float32_results():
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(1, 4, 16)).astype(jnp.bfloat16)
    head = rng.normal(size=(33, 16)).astype(jnp.bfloat16)
    targets = rng.integers(0, 33, (1, 4)).astype(np.int32)
    gradients, (logp, entropy) = combined(functools.partial(fast_logprobs, chunk=8), targets)(hidden, head)
    expected = plain_logprobs(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, 1.0, 0.0)
    assert logp.dtype == entropy.dtype == jnp.float32
    assert {x.dtype for x in gradients} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(logp, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)


def test_the_logits_of_all_tokens_are_never_held():
    rows, length, vocab, chunk = 2, 64, 4096, 128
    targets = np.zeros((rows, length), np.int32)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, length, 8), (vocab, 8))]

    def elements(function):
        text = combined(function, targets).lower(*shapes).compile().as_text()
        found = re.findall(r"f32\[([\d,]+)\]", text)
        return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in found)

    assert elements(functools.partial(fast_logprobs, chunk=chunk)) <= max(rows * length * chunk, vocab * 8)
    assert elements(functools.partial(plain_logprobs, temperature=1.0, cap=0.0)) >= rows * length * vocab
