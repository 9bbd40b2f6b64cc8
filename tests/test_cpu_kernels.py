"""kernels/cpu.py: products and attention against float64, bits that depend on nothing else, what cannot be compiled."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampler_helpers as tiny
from sampler_helpers import draw, request, same

from rljax import assemble, sharding
from rljax.kernels import cpu
from rljax.sample import SamplingParams
from rljax.sampler.cache import Pages, Tables, quantize
from rljax.sampler.engine import Engine
from rljax.sampler.scheduler import Scheduler

needs_kernels = pytest.mark.skipif(not cpu.available(), reason="there is no C++ compiler")
KERNEL = dataclasses.replace(tiny.QUICK, kernel="cpu")


@pytest.fixture(autouse=True)
def one_device():
    with jax.default_device(jax.devices()[0]):
        yield


# --- products --------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("inner, out", [(1, 1), (7, 5), (64, 33), (100, 301), (576, 192), (1536, 50), (1601, 7)])
def test_a_products_rows_are_right_and_the_same_among_any_others(inner, out, dtype):
    rng = np.random.default_rng(inner)
    x, matrix = (rng.standard_normal((count, inner), np.float32) for count in (21, out))
    if dtype == "int8":
        x, matrix = x / 64, rng.integers(-128, 128, (out, inner)).astype(np.int8)
    product = jax.jit(cpu.product)
    whole = np.asarray(product(x, matrix))
    exact = x.astype(np.float64) @ matrix.T.astype(np.float64)
    np.testing.assert_allclose(whole, exact, atol=1e-6 * inner**0.5 * 4)
    for rows in range(1, 18):
        np.testing.assert_array_equal(product(x[:rows], matrix), whole[:rows], f"{rows} rows")
    np.testing.assert_array_equal(product(x[::-1].copy(), matrix), whole[::-1])
    assert product(x[:0], matrix).shape == (0, out)
    assert not np.asarray(product(x[:, :0], matrix[:, :0])).any()


@needs_kernels
def test_a_product_keeps_what_is_no_number_in_its_row():
    x, matrix = np.ones((5, 20), np.float32), np.ones((6, 20), np.float32)
    x[3, 19] = np.nan
    assert np.isnan(jax.jit(cpu.product)(x, matrix)).any(1).tolist() == [False, False, False, True, False]


@needs_kernels
def test_a_product_of_other_dtypes_or_widths_is_refused():
    x = jnp.ones((2, 8))
    for matrix in (jnp.ones((3, 7)), jnp.ones((3, 8), jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"float32 or int8 \[out, in\]: got float32 \[2, 8\] and "):
            cpu.product(x, matrix)


# --- attention -------------------------------------------------------------------------------------------------------

#         K, g, h, P, T, dtype, softcap, window
SHAPES = [(2, 3, 64, 64, 8, "float32", 0.0, 0), (1, 5, 20, 12, 4, "float32", 0.0, 0),
          (3, 1, 16, 8, 8, "float32", 5.0, 0), (2, 4, 33, 40, 5, "float32", 0.0, 17),
          (2, 3, 64, 64, 8, "float32", 1000.0, 0), (2, 3, 64, 64, 8, "int8", 0.0, 0),
          (1, 7, 24, 20, 10, "int8", 3.0, 9)]
PROMPT, OWN = np.array([130, 0, 37, 130, 12]), np.array([7, 3, 0, 90, 1])  # T's multiples of the latter are filled


def arrays(shape, seed=0):
    """(q, pools, staged, tables, positions, step) and, per slot, what it sees: keys and values [positions, K, h]."""
    heads, group, width, size, steps, dtype, _, _ = shape
    rng, slots, step = np.random.default_rng(seed), len(PROMPT), steps - 2
    columns = -(-PROMPT.max() // size), -(-(OWN.max() * steps) // size)
    pages = rng.permutation(40 * max(columns)).tolist()
    filled = {"prompt": PROMPT, "own": OWN * steps}
    tables, pools, seen = {}, {}, [[] for _ in range(slots)]
    for name, most in zip(filled, columns, strict=True):
        keys, values = (rng.standard_normal((len(pages), heads, *end)).astype(np.float32)
                        for end in ((width, size), (size, width)))
        tables[name] = np.full((slots, most), -1, np.int32)
        pools[name] = Pages(keys, values)
        if dtype == "int8":
            (keys, key_scale), (values, value_scale) = quantize(keys, -2), quantize(values, -1)
            pools[name] = Pages(keys, values, key_scale, value_scale)
            keys, values = keys * key_scale[:, :, None], values * value_scale[..., None]
        for slot in range(slots):
            count = -(-filled[name][slot] // size)
            tables[name][slot, :count] = pages[:count]
            pages = pages[count:] + pages[:count]
            rows = [(np.moveaxis(np.asarray(keys[page]), 2, 0), np.asarray(values[page]).swapaxes(0, 1))
                    for page in tables[name][slot, :count]]
            seen[slot].extend((k[i], v[i]) for k, v in rows for i in range(size))
            del seen[slot][int(sum(filled[n][slot] for n in list(filled)[: 1 + (name == "own")])):]
    staged = Pages(rng.standard_normal((slots, heads, width, steps)).astype(np.float32),
                   rng.standard_normal((slots, heads, steps, width)).astype(np.float32))
    for slot in range(slots):
        seen[slot].extend((staged.keys[slot, :, :, i], staged.values[slot, :, i]) for i in range(step + 1))
    q = rng.standard_normal((slots, heads, group, width)).astype(np.float32)
    own, prompt = filled["own"].astype(np.int32), filled["prompt"].astype(np.int32)
    tables = Tables(tables["own"], own, tables["prompt"], prompt, np.zeros(slots, np.int32))
    return (q, pools["prompt"], pools["own"], staged, tables, own + prompt + np.int32(step), np.int32(step)), seen


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_softmax_over_all_that_is_seen(shape):
    softcap, window = shape[6:]
    args, seen = arrays(shape)
    found = jax.jit(functools.partial(cpu.attention, scale=0.3, softcap=softcap, window=window))(*args)
    for slot, pairs in enumerate(seen):
        assert len(pairs) == args[5][slot] + 1
        keys, values = (np.stack(side).astype(np.float64) for side in zip(*pairs[-window:], strict=True))
        scores = np.einsum("kgh,pkh->kgp", args[0][slot], keys) * 0.3
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("kgp,pkh->kgh", weights / weights.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(found[slot], expected, atol=3e-6, err_msg=f"slot {slot}")


@needs_kernels
def test_attention_of_a_slot_that_sees_nothing_is_zero():
    (q, prompt, own, staged, tables, position, step), _ = arrays(SHAPES[0])
    attention = jax.jit(functools.partial(cpu.attention, scale=0.3, softcap=0.0, window=5))
    position[3] = 10**6
    found = np.asarray(attention(q, prompt, own, staged, tables, position, step))
    assert (found[3] == 0).all() and np.isfinite(found).all()


@needs_kernels
def test_attention_over_other_dtypes_or_shapes_is_refused():
    (q, prompt, own, *rest), _ = arrays(SHAPES[0])
    for pages in (jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), own), arrays(SHAPES[-2])[0][2]):
        with pytest.raises(ValueError, match="float32, and pages all float32 or all int8: got float32, "):
            cpu.attention(q, prompt, pages, *rest, scale=1.0, softcap=0.0, window=0)
    with pytest.raises(ValueError, match="pages of 1 heads of 64: got keys "):
        cpu.attention(q[:, :1], prompt, own, *rest, scale=1.0, softcap=0.0, window=0)


@needs_kernels
def test_attention_has_the_same_bits_in_any_slot_among_any_others():
    attention = jax.jit(functools.partial(cpu.attention, scale=0.3, softcap=0.0, window=0))
    (q, prompt, own, staged, tables, position, step), _ = arrays(SHAPES[0])
    whole = np.asarray(attention(q, prompt, own, staged, tables, position, step))
    for order in ([4, 2, 0, 1, 3], [3], [1, 3]):
        some = jax.tree.map(lambda leaf: leaf[np.asarray(order)], (q, staged, tables, position))  # noqa: B023
        q_some, staged_some, tables_some, position_some = some
        alone = attention(q_some, prompt, own, staged_some, tables_some, position_some, step)
        np.testing.assert_array_equal(alone, whole[order])


# --- attention of prompts ---------------------------------------------------------------------------------------------

#          R, T, L, start, K, g, h, softcap, window
PROMPTS = [(2, 64, 64, 0, 3, 3, 64, 0.0, 0), (1, 33, 200, 130, 2, 1, 20, 0.0, 0), (1, 40, 104, 64, 1, 8, 80, 4.0, 17),
           (3, 5, 5, 0, 2, 2, 16, 0.0, 2), (1, 100, 700, 600, 1, 7, 24, 0.0, 300)]


def prompts(shape, seed=0):
    rows, positions, length, _, heads, group, width, *_ = shape
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for size in (
        (rows, positions, heads * group, width), (rows, heads, width, length), (rows, heads, length, width))]


@needs_kernels
@pytest.mark.parametrize("shape", PROMPTS, ids=str)
def test_attention_of_prompts_is_the_softmax_over_all_that_is_seen(shape):
    rows, positions, length, start, heads, group, width, softcap, window = shape
    q, keys, values = prompts(shape)
    keys[..., start + positions :], values[:, :, start + positions :] = np.nan, np.nan  # not filled yet
    attention = jax.jit(functools.partial(cpu.prompt_attention, scale=0.3, softcap=softcap, window=window))
    found = attention(q, keys, values, np.int32(start))
    scores = np.einsum("rtkgh,rkhl->rkgtl", q.reshape(rows, positions, heads, group, width).astype(np.float64),
                       np.nan_to_num(keys)) * 0.3
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    behind = start + np.arange(positions)[:, None] - np.arange(length)
    scores = np.where((behind >= 0) & (behind < (window or length)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("rkgtl,rklh->rtkgh", weights / weights.sum(-1, keepdims=True), np.nan_to_num(values))
    np.testing.assert_allclose(found, expected.reshape(q.shape), atol=6e-6)


@needs_kernels
@pytest.mark.parametrize("window", [0, 70])
def test_attention_of_prompts_has_the_same_bits_chunk_after_chunk(window):
    q, keys, values = prompts((2, 200, 200, 0, 2, 3, 64))
    attention = jax.jit(functools.partial(cpu.prompt_attention, scale=0.3, softcap=0.0, window=window))
    whole = np.asarray(attention(q, keys, values, np.int32(0)))
    for size in (7, 64):
        for start in range(0, 200, size):
            chunk = attention(q[1:, start : start + size], keys[1:], values[1:], np.int32(start))
            np.testing.assert_array_equal(chunk[0], whole[1, start : start + size], f"{size} from {start}")


@needs_kernels
def test_attention_of_prompts_of_other_dtypes_or_shapes_is_refused():
    q, keys, values = prompts(PROMPTS[0])
    attention = functools.partial(cpu.prompt_attention, start=np.int32(0), scale=1.0, softcap=0.0, window=0)
    with pytest.raises(ValueError, match="all float32: got float32, bfloat16, float32"):
        attention(q, jnp.asarray(keys, jnp.bfloat16), values)
    for changed in ((q[:1], keys, values), (q, keys, values[:, :, :-1]), (q, keys[..., :63], values[:, :, :63])):
        with pytest.raises(ValueError, match=r"with T <= L: got \["):
            attention(*changed)


@needs_kernels
def test_what_is_held_is_the_same():
    x = jnp.arange(7.0)
    np.testing.assert_array_equal(jax.jit(lambda x: cpu.hold(x) + x)(x), 2 * x)


# --- the engine ------------------------------------------------------------------------------------------------------


@functools.cache
def engine(**change):
    return Engine(tiny.CONFIG, dataclasses.replace(KERNEL, **change), tiny.one_device())


def batch():
    return [request(i, n, 12, **({"temperature": 0.0} if i % 3 == 0 else {})) for i, n in
            enumerate((5, 1, 8, 9, 16, 17, 2, 31, 12, 3))]


@functools.cache
def together():
    return draw(batch(), engine().weights(tiny.master()), Scheduler(engine()))


@needs_kernels
def test_draws_agree_with_xlas():
    for one, other in zip(together(), draw(batch()), strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dispatches", [0, 1, 2])
def test_alone_and_after_an_abort_the_bits_are_the_same(dispatches):
    weights = engine().weights(tiny.master())
    for index in (9, 4, 7):
        scheduler, asked = Scheduler(engine()), batch()[index]
        scheduler.submit([asked])
        for _ in range(dispatches):
            scheduler.step(weights)
        scheduler.abort()
        same(draw([asked], weights, scheduler)[0] if asked.end_reason == "abort" else asked, together()[index])


@needs_kernels
@pytest.mark.parametrize("change", [{"cache_tokens": 14 * 8, "prefill_chunk": 8, "slots": 6},
                                    {"slots": 16, "row_levels": 2}], ids=str)
def test_another_cache_and_other_slots_agree(change):
    """Preempted, prefilled chunk after chunk, in programs for fewer rows: as far as prefill's rounding."""
    made = engine(**change)
    weights = made.weights(tiny.master())
    made.warmup(weights)
    for one, other in zip(draw(batch(), weights, Scheduler(made)), together(), strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@needs_kernels
def test_int8_weights_and_cache_stay_near():
    made = engine(cache_dtype=jnp.int8, int8_weights=True)
    forced = [dataclasses.replace(r, logprobs=[], end_reason=None, params=SamplingParams(len(r.tokens)))
              for r in together()]
    draw(forced, made.weights(tiny.master()), Scheduler(made))
    assert [r.tokens for r in forced] == [r.tokens for r in together()]
    pairs = zip(forced, together(), strict=True)
    gaps = np.abs(np.concatenate([np.subtract(one.logprobs, other.logprobs) for one, other in pairs]))
    assert 0 < gaps.mean() < 0.1 and gaps.max() < 0.5


@needs_kernels
def test_what_the_kernels_do_not_know_is_refused():
    for change in ({"parts": 3}, {"dtype": jnp.bfloat16}, {"cache_dtype": jnp.bfloat16}):
        with pytest.raises(ValueError, match="'cpu' takes float32, a cache of float32 or int8, 1 part and 1 dev"):
            Engine(tiny.CONFIG, dataclasses.replace(KERNEL, **change), tiny.one_device())
    with pytest.raises(ValueError, match="1 device: got .*, 1 and 8"):
        Engine(tiny.CONFIG, dataclasses.replace(KERNEL, prefill_rows=8), sharding.make_mesh(devices=jax.devices()))


@needs_kernels
def test_a_run_takes_the_kernels_where_they_fit():
    def chosen(dtype="float32", cache_dtype="float32", devices=1):
        mesh = sharding.make_mesh(devices=jax.devices()[:devices])
        return assemble._programs(tiny.CONFIG, jnp.dtype(dtype), jnp.dtype(cache_dtype), 48, mesh).get("kernel", "xla")

    assert chosen() == chosen(cache_dtype="int8") == "cpu"
    assert chosen(devices=8) == chosen(dtype="bfloat16") == chosen(cache_dtype="bfloat16") == "xla"


# --- the library -----------------------------------------------------------------------------------------------------


@needs_kernels
def test_the_library_is_compiled_once_and_again_if_it_is_damaged(tmp_path, monkeypatch):
    made = []

    def run(command):
        if "-o" in command:
            made.append(pathlib.Path(command[-1]).write_text("a library"))
        return b""

    monkeypatch.setattr(cpu, "_run", run)
    library = cpu._library(tmp_path)
    assert cpu._library(tmp_path) == library and len(made) == 1
    assert sorted(os.listdir(tmp_path)) == [library.with_suffix(".sha256").name, library.name]
    checksum = library.with_suffix(".sha256")
    for damage in (lambda: library.write_text("a lib"), lambda: checksum.write_bytes(b"\xff"), checksum.unlink,
                   library.unlink):
        damage()
        assert cpu._library(tmp_path) == library and library.read_text() == "a library"
    assert len(made) == 5
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-DOTHER"))
    assert cpu._library(tmp_path) != library


@pytest.mark.parametrize("compiler, chosen, message", [
    (None, "", "there is no C++ compiler (c++, g++, clang++, or what CXX names)"),
    ("#!/bin/sh\necho 'no such processor' >&2\nexit 3\n", "", "c++ failed: no such processor"),
    ("#!/bin/sh\necho \"$*\" >&2\nexit 3\n", "c++ --wrapped", "c++ failed: --wrapped -O3"),
    (None, "clang++-99", "CXX=clang++-99: there is no such program"),
], ids=["none", "broken", "with arguments", "chosen"])
def test_without_a_library_a_warning_says_why(tmp_path, monkeypatch, caplog, compiler, chosen, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", chosen)
    monkeypatch.setattr(cpu, "CACHE", str(tmp_path / "cache"))
    if compiler:
        (tmp_path / "c++").write_text(compiler)
        (tmp_path / "c++").chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert not cpu.available.__wrapped__()
    assert message in caplog.text and "the sampler takes XLA's slower way" in caplog.text
    monkeypatch.setattr(cpu, "available", lambda: False)
    with pytest.raises(ValueError, match="kernel 'cpu' is not there: a warning says why"):
        Engine(tiny.CONFIG, KERNEL, tiny.one_device())
