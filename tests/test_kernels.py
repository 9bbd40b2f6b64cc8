"""kernels/: each kernel, interpreted, against its reference; lowering and, with libtpu, compiling for real chips."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest

from rljax import ops
from rljax.kernels import page_attention as module

ROOT = pathlib.Path(__file__).resolve().parents[1]
# (W, K, M, g, h, P, dtype of q, int8 pages, softcap): heads and pages narrow, odd and wide, one member and many.
SHAPES = [
    (7, 2, 1, 4, 128, 64, "bfloat16", True, 0.0),
    (5, 1, 8, 3, 64, 128, "float32", False, 0.0),
    (9, 2, 2, 1, 16, 16, "float32", False, 5.0),
    (6, 3, 8, 3, 48, 20, "float32", True, 5.0),
    (4, 1, 24, 3, 16, 64, "bfloat16", False, 5.0),
]
REAL = [
    (512, 8, 1, 2, 128, 128, "bfloat16", False, 0.0),
    (64, 8, 8, 2, 128, 128, "bfloat16", True, 0.0),
    (256, 3, 8, 3, 64, 128, "float32", False, 30.0),
]


def inputs(shape):
    """Random arguments, with pages that nobody sees, members that see nothing and windows."""
    pages, kv_heads, members, group, width, length, dtype, quantised, _ = shape
    rng = np.random.default_rng(0)
    q = rng.normal(size=(pages, kv_heads, members, group, width)).astype(dtype)
    kinds = ((pages, kv_heads, width, length), (pages, kv_heads, length, width))
    last = rng.integers(0, length + 1, (pages, members)).astype(np.int32)
    first = np.where(rng.random((pages, members)) < 0.5, 0, rng.integers(0, length + 1, (pages, members)))
    first[[0, -1]], last[[0, -1]] = length, 0  # pages that nobody sees
    last[1], first[1] = length, 0
    scales = {}
    if quantised:
        keys, values = (rng.integers(-127, 128, kind).astype(np.int8) for kind in kinds)
        scales = {name: rng.uniform(0.005, 0.02, (pages, kv_heads, length)).astype(np.float32)
                  for name in ("key_scale", "value_scale")}
    else:
        keys, values = (rng.normal(size=kind).astype(dtype) for kind in kinds)
    return (q, keys, values, first.astype(np.int32), last), scales


def settings(shape):
    return dict(scale=shape[4] ** -0.5, softcap=shape[-1])


def formula(q, keys, values, first, last, *, scale, softcap, key_scale=None, value_scale=None):
    """Page by page and member by member, in float64."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    keys = keys if key_scale is None else keys * key_scale[:, :, None]
    values = values if value_scale is None else values * value_scale[..., None]
    out, top, total = np.zeros(q.shape), np.full(q.shape[:-1], -1e30), np.zeros(q.shape[:-1])
    for page, head, member, query in np.ndindex(top.shape):
        seen = slice(first[page, member], max(first[page, member], last[page, member]))
        scores = q[page, head, member, query] @ keys[page, head][:, seen] * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        if scores.size:
            at = page, head, member, query
            top[at] = scores.max()
            weights = np.exp(scores - top[at])
            total[at], out[at] = weights.sum(), weights @ values[page, head][seen]
    return out, top, total


def merged(out, top, total):
    """Attention over all pages, from the parts of each page: axis 0 is summed over."""
    share = np.exp(top - top.max(0))
    return (out * share[..., None]).sum(0) / (total * share).sum(0)[..., None]


def assert_alike(found, expected, dtype):
    """The tolerance is for values of about 1: sums over a page grow with its weights."""
    atol = 3e-5 if dtype == "float32" else 3e-2
    names = ("out", "top", "total")
    for name, one, other in zip(names, found, expected, strict=True):
        assert np.asarray(one).dtype == np.float32
        np.testing.assert_allclose(one, other, atol=atol, rtol=atol, err_msg=name)


@functools.cache
def reference(shape):
    """(arguments, scales, what the reference makes of them)."""
    args, scales = inputs(shape)
    return args, scales, jax.jit(functools.partial(ops.page_attention, **settings(shape)))(*args, **scales)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_against_the_formula(shape):
    args, scales, found = reference(shape)
    assert_alike(found, formula(*args, **settings(shape), **scales), shape[6])
    assert (np.asarray(found[1])[[0, -1]] == ops.MASKED).all()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_against_the_reference(monkeypatch, shape, platform):
    """Pages that nobody sees are not even computed: what lies in them does not matter, be it nan."""
    monkeypatch.setattr(module, "_pages_of_a_block", lambda *_: 2)
    (q, keys, values, first, last), scales, expected = reference(shape)
    if not scales:
        keys, values = keys.copy(), values.copy()
        keys[[0, -1]] = values[[0, -1]] = np.nan
    kernel = functools.partial(module.page_attention, platform=platform, interpret=True, **settings(shape))
    found = jax.jit(kernel)(q, keys, values, first, last, **scales)
    assert_alike(found, expected, shape[6])
    unseen = np.asarray(expected[2]) == 0
    assert unseen.any() and not unseen.all()
    for one, other in zip(found, (0.0, ops.MASKED, 0.0)):
        assert (np.asarray(one)[unseen] == other).all()


def test_blocks_that_nobody_sees_keep_the_data_that_is_there():
    low = np.zeros((11, 2), np.int32)
    high = np.zeros((11, 2), np.int32)
    high[[4, 9], 1] = 3
    live, source = module._live_blocks(low, high, 2)
    assert np.flatnonzero(live).tolist() == [4, 9]
    assert live.shape == (12,) and source.tolist() == [2, 2, 2, 2, 4, 4]
    assert module._live_blocks(low, low, 2)[1].tolist() == [0] * 6


def test_how_many_pages_a_grid_step_takes():
    """Pages of 2 x 8 x 128 x 128 values, bfloat16 and int8: 512 and 256 KiB of the 1 MiB that a step should read."""
    results = [(8, 8, 128), (8, 8), (8, 8)]
    for dtype, expected in (("bfloat16", 2), ("int8", 4), ("float32", 1)):
        page = jax.ShapeDtypeStruct((512, 8, 128, 128), dtype)
        others = [jax.ShapeDtypeStruct((512, 2, 8), "float32"), jax.ShapeDtypeStruct((512, 8, 8, 128), "bfloat16")]
        assert module._pages_of_a_block([*others, page, page], results, 512) == expected
        assert module._pages_of_a_block([*others, page, page], results, 1) == 1


def test_merged_pages_are_plain_attention():
    """Three pages in a row, the last one filled in part: the softmax over all keys."""
    rng = np.random.default_rng(2)
    q = rng.normal(size=(1, 2, 1, 2, 16)).astype(np.float32)
    keys, values = (rng.normal(size=(40, 2, 16)).astype(np.float32) for _ in range(2))
    padded = [np.pad(x, ((0, 8), (0, 0), (0, 0))).reshape(3, 16, 2, 16) for x in (keys, values)]
    first, last = np.array([[5], [0], [0]], np.int32), np.array([[16], [16], [8]], np.int32)
    parts = jax.jit(functools.partial(ops.page_attention, scale=0.25))(
        np.repeat(q, 3, 0), padded[0].transpose(0, 2, 3, 1), padded[1].swapaxes(1, 2), first, last)
    weights = np.exp(np.einsum("kgh,skh->kgs", q[0, :, 0], keys[5:]) * 0.25)
    expected = np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), values[5:])
    np.testing.assert_allclose(merged(*map(np.asarray, parts))[:, 0], expected, atol=1e-6)


def test_a_group_that_shares_a_page_equals_its_members_alone():
    shape = SHAPES[3]
    (q, keys, values, first, last), scales, together = reference(shape)
    one_member = jax.jit(functools.partial(ops.page_attention, **settings(shape), **scales))
    for member in (0, 5):
        one = slice(member, member + 1)
        alone = one_member(q[:, :, one], keys, values, first[:, one], last[:, one])
        for whole, part in zip(together, alone, strict=True):
            np.testing.assert_allclose(whole[:, :, one], part, atol=1e-5)


def test_errors_name_what_is_wrong():
    args, scales = inputs(SHAPES[0])
    with pytest.raises(ValueError, match='"metal"'):
        ops.page_attention(*args, scale=1.0, kernel="metal", **scales)
    with pytest.raises(ValueError, match="only one of them"):
        ops.page_attention(*args, scale=1.0, key_scale=scales["key_scale"])
    huge = abstract((2, 32, 8, 8, 256, 512, "float32", False, 0.0))
    with pytest.raises(ValueError, match=r"takes \d+ bytes; three times that exceeds 50331648"):
        jax.eval_shape(functools.partial(ops.page_attention, scale=1.0, kernel="tpu"), *huge)


def abstract(shape, sharding=None):
    """Arguments of a shape, without data: the arrays, then the scales if it has any."""
    pages, kv_heads, members, group, width, length, dtype, quantised, _ = shape
    stored = "int8" if quantised else dtype
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    found = [array((pages, kv_heads, members, group, width), dtype), array((pages, kv_heads, width, length), stored),
             array((pages, kv_heads, length, width), stored), *[array((pages, members), "int32")] * 2]
    return found + [array((pages, kv_heads, length), "float32")] * 2 * quantised


def positional(shape, platform):
    """The dispatching function with the scales as positional arguments."""
    def function(q, keys, values, first, last, key_scale=None, value_scale=None):
        return ops.page_attention(q, keys, values, first, last, key_scale=key_scale, value_scale=value_scale,
                                  kernel=platform, **settings(shape))

    return jax.jit(function)


@pytest.mark.parametrize("shape", REAL + SHAPES, ids=str)
def test_lowering_for_accelerators(shape):
    for platform, kernel, call in (("tpu", "tpu", "tpu_custom_call"), ("cuda", "gpu", "__gpu$xla.gpu.triton")):
        exported = jax.export.export(positional(shape, kernel), platforms=[platform], disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(call)])(*abstract(shape))
        assert call in exported.mlir_module()


COMPILE = """
import json, sys, jax
sys.path.insert(0, "tests")
from jax.experimental import topologies
from test_kernels import REAL, abstract, positional
for topology in ("v5e:2x2", "v6e:2x2"):
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    for shape in REAL:
        arguments = abstract(shape, jax.sharding.SingleDeviceSharding(device))
        compiled = positional(shape, "tpu").lower(*arguments).compile()
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        print(json.dumps([topology, shape, cost["flops"], memory.temp_size_in_bytes, memory.argument_size_in_bytes]))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu")
def test_the_compiler_of_real_chips_takes_it():
    """Ahead of time, for chips that this machine lacks; and no copy of the pool is made."""
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 2 * len(REAL)
    for topology, shape, flops, temporary, arguments in lines:
        pages, kv_heads, members, group, width, length, *_ = shape
        assert flops >= 4 * pages * kv_heads * members * group * width * length, topology
        assert temporary < arguments / 2, (topology, shape)
