"""The paged cache: what is written is read, at any place and dtype; budget, chunked prefill, kernels' programs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampler_helpers as tiny
from jax import export
from sampler_helpers import draw, request, same

from rljax import sharding
from rljax.sample import SamplingParams
from rljax.sampler import cache, decode
from rljax.sampler import requests as asked
from rljax.sampler.decode import Slots
from rljax.sampler.engine import Engine
from rljax.sampler.scheduler import Request, Scheduler

TRITON = "__gpu$xla.gpu.triton"
TIGHT = dataclasses.replace(tiny.QUICK, slots=6, cache_tokens=14 * 8, prefill_chunk=8)


def some(count=12, least=0):
    lengths = zip(range(count), (5, 1, 8, 9, 3, 17, 2, 31, 12, 3, 25, 4))
    return [request(i, n, 17 if least else 10, min_new_tokens=least) for i, n in lengths]


@functools.cache
def tight():
    return Engine(tiny.CONFIG, TIGHT, tiny.one_device())


def test_quantized_values_come_back_within_half_a_step():
    x = jax.random.normal(jax.random.key(0), (3, 5, 64)) * jnp.array([1e-3, 1.0, 0.0, 50.0, 7.0])[:, None]
    whole, scale = cache.quantize(x, -1)
    assert whole.dtype == jnp.int8 and scale.shape == (3, 5) and (scale > 0).all()
    assert (jnp.abs(whole * scale[..., None] - x) <= scale[..., None] * 0.5001).all()


def test_partials_of_any_split_merge_to_the_softmax():
    """Pages in any order, a prompt's pages shared by two slots, a window over their border: as plain attention."""
    rng = np.random.default_rng(0)
    heads, group, width, size = 2, 2, 16, 4
    lengths, prompt = np.array([5, 9, 3]), np.array([6, 6, 0])  # own and of the prompt, which slots 0 and 1 share
    own = np.array([[4, 1, -1], [7, 0, 3], [2, -1, -1]], np.int32)
    shared = np.array([[1, 0], [1, 0], [-1, -1]], np.int32)
    keys = rng.normal(size=(3, 16, heads, width)).astype(np.float32)
    values = rng.normal(size=(3, 16, heads, width)).astype(np.float32)
    keys[1, :6], values[1, :6] = keys[0, :6], values[0, :6]
    pools = {name: cache.zeros(count, heads, width, size, jnp.float32) for name, count in (("own", 8), ("prompt", 2))}
    for slot in range(3):
        for table, pool, start, filled in ((shared, "prompt", 0, prompt), (own, "own", prompt[slot], lengths)):
            for i in range(filled[slot]):
                page, at = table[slot, i // size], i % size
                old = pools[pool]
                pools[pool] = cache.Pages(old.keys.at[page, :, :, at].set(keys[slot, start + i]),
                                          old.values.at[page, :, at].set(values[slot, start + i]))
    q = rng.normal(size=(3, heads, group, width)).astype(np.float32)
    position = jnp.asarray(prompt + lengths - 1)
    member = np.array([1, 0, 0], np.int32)
    for window in (0, 7):
        def both(q, pools):
            zero = jnp.zeros(3, jnp.int32)
            who = {"own": cache.reads(own, lengths, prompt, zero, 8, 1, size),
                   "prompt": cache.reads(shared, prompt, zero, member, 2, 2, size)}
            parts = [[cache.Pages(pool.keys[part], pool.values[part]) for part in (slice(0, n), slice(n, None))]
                     for pool, n in ((pools["own"], 3), (pools["prompt"], 1))]
            return cache.merge([
                cache.page_partials(q, chunks, who[name], position, window, scale=0.3)  # noqa: B023
                for name, chunks in zip(("own", "prompt"), parts, strict=True)])

        found = np.asarray(jax.jit(both)(q, pools))
        for slot in range(3):
            total = prompt[slot] + lengths[slot]
            first = max(0, total - window) if window else 0
            k, v = keys[slot, first:total], values[slot, first:total]
            scores = np.einsum("kgh,ckh->kgc", q[slot], k) * 0.3
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("kgc,ckh->kgh", weights / weights.sum(-1, keepdims=True), v)
            np.testing.assert_allclose(found[slot], expected, rtol=1e-5, atol=1e-6)


def test_no_prompt_outlives_the_requests():
    """Aborted by name between two parts of its prompt, or ended: whoever comes next may have other weights."""
    scheduler = Scheduler(tight())
    scheduler.submit([request(0, 1, 17, min_new_tokens=14)])
    scheduler.step(tiny.weights())
    scheduler.submit([request(1, 31, 4)])
    scheduler.step(tiny.weights())
    assert scheduler._long is not None
    scheduler.abort([0, 1])
    assert scheduler._long is None and scheduler.tables.prompts == []
    other = tiny.weights(3)
    same(draw([request(1, 31, 4)], other, scheduler)[0], draw([request(1, 31, 4)], other, Scheduler(tight()))[0])
    assert scheduler.tables.prompts == []


def test_a_tight_cache_and_chunked_prefill_change_no_token():
    """Requests give way and come back, prompts are prefilled by chunks of 8: bit for bit what each gives alone, and
    under forced tokens the log-probs of another engine, with other slots, to 1e-5."""
    scheduler, crowd = Scheduler(tight()), some(least=14)
    draw(crowd, scheduler=scheduler)
    assert scheduler.take_counts()["preempted"] > 0
    for alone, one in zip(some(least=14), crowd, strict=True):
        single = Scheduler(tight())
        same(draw([alone], scheduler=single)[0], one)
        assert single.take_counts()["preempted"] == 0
    forced = [dataclasses.replace(r, logprobs=[], params=SamplingParams(len(r.tokens))) for r in crowd]
    draw(forced)
    for one, other in zip(forced, crowd, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_long_prompt_delays_the_others_by_one_chunk():
    scheduler = Scheduler(tight())
    short, long = request(0, 4, 30, temperature=0.0), request(1, 25, 4, temperature=0.0)
    scheduler.submit([short])
    scheduler.step(tiny.weights())
    calls, extend, prefill = [], tight().extend, tight().prefill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tight(), "extend", lambda *a: calls.append("extend") or extend(*a))
        patch.setattr(tight(), "prefill", lambda *a: calls.append("prefill") or prefill(*a))
        scheduler.submit([long, request(2, 5, 4)])
        for expected in range(1, 4):
            before = len(short.tokens)
            scheduler.step(tiny.weights())
            assert len(calls) == expected and len(short.tokens) == before + 4
    assert calls == ["extend"] * 3, "the prompt that came first goes first"
    while scheduler.busy:
        scheduler.step(tiny.weights())
    same(long, draw([request(1, 25, 4, temperature=0.0)], scheduler=Scheduler(tight()))[0])


def test_a_long_prompt_aborted_between_its_parts_starts_again():
    scheduler, long = Scheduler(tight()), request(1, 25, 4)
    scheduler.submit([request(0, 4, 12, min_new_tokens=12)])
    scheduler.step(tiny.weights())
    scheduler.submit([long])
    scheduler.step(tiny.weights())
    assert scheduler._long
    scheduler.submit(scheduler.abort())
    for _ in range(40):
        scheduler.step(tiny.weights())
    assert scheduler.busy == 0
    same(long, draw([request(1, 25, 4)], scheduler=Scheduler(tight()))[0])


def test_a_prefill_program_also_takes_prompts_that_come_soon(monkeypatch):
    """One of two slots is free, two prompts wait: both are stored by one program."""
    engine, stored = tiny.Scripted({}, slots=2), []
    monkeypatch.setattr(engine, "prefill", lambda params, prompts, bucket: stored.append(len(prompts)))
    scheduler = Scheduler(engine)
    scheduler.submit([request(uid, 5, new) for uid, new in enumerate((4, 40, 8, 8))])
    while scheduler.busy:
        scheduler.step({})
    assert stored == [2, 2]


RESUMES = dataclasses.replace(tiny.QUICK, prefill_chunk=16, resumes=True)


@pytest.fixture
def soon(monkeypatch):
    """Eight tokens for each chunk are enough to prefill them."""
    monkeypatch.setattr(asked, "CHUNK_STEPS", 1)


@functools.cache
def resuming(**change):
    return Engine(tiny.CONFIG, dataclasses.replace(RESUMES, **change), tiny.one_device())


def old(uid, length=5, drawn=25):
    """A request of 30 greedy tokens, and the same as it goes on after `drawn` of them came from older weights."""
    whole = request(uid, length, 30, temperature=0.0, min_new_tokens=30)
    draw([whole], scheduler=Scheduler(resuming()))
    assert len(whole.tokens) == 30
    return whole, dataclasses.replace(whole, tokens=whole.tokens[:drawn], logprobs=whole.logprobs[:drawn], stale=drawn)


def agree(one, other):
    assert one.tokens == other.tokens and one.end_reason == other.end_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("change", [{"parts": 3, "kernel": "xla"}, {"cache_tokens": 12 * 8}], ids=str)
def test_what_older_weights_drew_is_prefilled(soon, change):
    """24 of 25 tokens by two chunks, not six dispatches: the rest is as if it had been fed token by token."""
    whole, part = old(1)
    scheduler = Scheduler(resuming(**change))
    draw([part], scheduler=scheduler)
    assert part.prefilled == 24 and scheduler.take_counts()["dispatches"] == 2
    agree(part, whole)
    assert not scheduler.tables.prompts and len(scheduler.tables.own_pool) == scheduler.tables.own_pool.pages


def test_resumed_requests_share_their_prompt_and_delay_the_others_by_one_chunk(soon):
    """Two greedy members of a group come while another decodes, which draws in every step."""
    scheduler, first = Scheduler(resuming()), request(0, 4, 40, temperature=0.0, min_new_tokens=40)
    scheduler.submit([first])
    scheduler.step(tiny.weights())
    whole, part = old(1, drawn=17)
    twin = dataclasses.replace(part, uid=2, tokens=part.tokens[:], logprobs=part.logprobs[:])
    for one in (part, twin):
        scheduler.submit([one])
    while scheduler.busy:
        before, ended = len(first.tokens), first.end_reason
        scheduler.step(tiny.weights())
        assert ended or len(first.tokens) == before + 4
    assert part.prefilled == twin.prefilled == 16 and scheduler.take_counts()["shared_tokens"] == 5
    agree(part, whole)
    agree(twin, whole)


@pytest.mark.parametrize("change, drawn", [({"stale": 0}, 25), ({"stale": 8}, 25), ({}, 8)], ids=str)
def test_tokens_are_fed_again_where_that_is_asked_for_or_as_fast(soon, change, drawn):
    """Of these weights' own, or too few of others': no bit changes."""
    whole, part = old(1, drawn=drawn)
    part = dataclasses.replace(part, **change)
    draw([part], scheduler=Scheduler(resuming()))
    assert part.prefilled == 0
    same(part, whole)


def test_a_resumed_request_aborted_between_its_chunks_starts_again(soon):
    whole, part = old(1)
    scheduler = Scheduler(resuming())
    scheduler.submit([request(0, 4, 40, min_new_tokens=40)])
    scheduler.step(tiny.weights())
    scheduler.submit([part])
    for _ in range(2):  # its prompt, and one of two chunks
        scheduler.step(tiny.weights())
    assert scheduler._long.request is part
    assert scheduler.abort([1]) == [part] and scheduler._long is None
    scheduler.submit([part])
    while scheduler.busy:
        scheduler.step(tiny.weights())
    agree(part, whole)


@pytest.mark.parametrize("drawn, prefilled", [(17, 16), (20, 16), (21, 20)])
def test_a_resumed_request_that_stops_again_goes_on_bitwise(soon, drawn, prefilled):
    """Tokens of older weights, then of these: aborted in the middle, it is as if it had not been."""
    whole, part = old(1, drawn=drawn)
    part, again = (dataclasses.replace(part, tokens=part.tokens[:], logprobs=part.logprobs[:]) for _ in range(2))
    draw([part], scheduler=Scheduler(resuming()))
    scheduler = Scheduler(resuming())
    scheduler.submit([again])
    for _ in range(3):
        scheduler.step(tiny.weights())
    assert scheduler.abort() == [again] and drawn < len(again.tokens) < 30
    draw([again], scheduler=scheduler)
    assert again.prefilled == prefilled
    same(again, part)


def test_those_who_give_way_do_not_block_what_is_resumed(monkeypatch):
    """They come before a request whose tokens are prefilled already, and need what it holds: it starts again."""
    monkeypatch.setattr(asked, "CHUNK_STEPS", 0.25)
    scheduler = Scheduler(resuming(slots=4, prompt_buckets=(8, 32), cache_tokens=11 * 8))
    crowd = [Request(uid, [token] * length, SamplingParams(new, min_new_tokens=new), [9] * drawn, [-1.0] * drawn,
                     stale=drawn) for uid, token, length, new, drawn in (
        (2, 11, 1, 40, 0), (6, 13, 30, 18, 9), (1, 11, 1, 40, 0), (0, 10, 30, 18, 9), (4, 12, 1, 40, 0),
        (5, 13, 30, 18, 17), (3, 11, 1, 40, 0))]
    scheduler.submit(crowd[:2])
    scheduler.step(tiny.weights())
    scheduler.submit(crowd[2:])
    for _ in range(60):
        scheduler.step(tiny.weights())
    assert scheduler.busy == 0 and scheduler.take_counts()["preempted"] > 0


def test_a_resumed_request_is_not_starved():
    """Others come all the time and fill a tight cache: they do not overtake it for ever, nor take its pages each time
    that it has them."""
    scheduler = Scheduler(tiny.Scripted(
        {}, cache_len=1024, prompt_buckets=(64,), steps_per_dispatch=8, prefill_chunk=256, new_tokens=960,
        cache_tokens=20 * 64, resumes=True))
    part, uids = Request(0, [7] * 30, SamplingParams(900), [2] * 700, [-0.5] * 700, stale=700), iter(range(1, 10**4))
    scheduler.submit([Request(next(uids), [5] * 30, SamplingParams(600)) for _ in range(3)])
    for _ in range(20):
        scheduler.step({})
    scheduler.submit([part])
    for _ in range(400):
        scheduler.submit([Request(next(uids), [5] * 30, SamplingParams(600))] if len(scheduler.queue) < 6 else [])
        scheduler.step({})
    assert part.prefilled == 696 and part.end_reason == "length"


def test_a_resumed_request_that_waits_for_pages_is_not_overtaken():
    scheduler = Scheduler(tiny.Scripted(
        {}, cache_len=1024, prompt_buckets=(64,), steps_per_dispatch=8, prefill_chunk=256, new_tokens=960,
        cache_tokens=20 * 64, resumes=True))
    scheduler.submit([Request(uid, [5] * 30, SamplingParams(600)) for uid in (1, 2)])
    for _ in range(45):
        scheduler.step({})
    part = Request(4, [7] * 30, SamplingParams(900), [2] * 700, [-0.5] * 700, stale=700)
    scheduler.submit([part])
    while not (scheduler._long and scheduler._long.complete):
        scheduler.step({})
    other = Request(5, [5] * 30, SamplingParams(600))
    scheduler.submit([other])
    while not part.entered:
        assert not other.entered
        scheduler.step({})


def test_resumed_requests_in_a_tight_cache(soon):
    """Pages for two of six: they wait for each other and for long prompts, and all end as alone."""
    engine = resuming(slots=6, cache_tokens=14 * 8)
    pairs = [old(uid, 3, 29) for uid in range(6)]
    crowd = [part for _, part in pairs]
    scheduler = Scheduler(engine)
    scheduler.submit([request(10, 30, 8)])
    for part in crowd:
        scheduler.submit([part])
    scheduler.submit([request(11, 30, 8)])
    for _ in range(200):
        scheduler.step(tiny.weights())
    assert scheduler.busy == 0
    for whole, part in pairs:
        assert part.prefilled == 28
        agree(part, whole)


@pytest.mark.parametrize("change", [{"page_len": 4, "new_tokens": 4}, {"cache_tokens": 10 * 8, "row_levels": 2}])
def test_warm_up_of_a_small_cache(change):
    """One page a slot, or fewer pages than a probe of fewer rows takes."""
    usual = {"slots": 16, "row_levels": 2, "prompt_buckets": (32,)}
    shape = dataclasses.replace(tiny.QUICK, **usual | change)
    engine = Engine(tiny.CONFIG, shape, tiny.one_device())
    engine.warmup(tiny.weights())
    assert engine.row_counts[-1] == 16


def test_the_cache_is_given_back():
    scheduler = Scheduler(tiny.engine())
    scheduler.submit([request(0, 5, 4)])
    scheduler.step(tiny.weights())
    assert len(scheduler.chunks) == tiny.SHAPE.parts
    with pytest.raises(ValueError, match="1 requests are in flight"):
        scheduler.release()
    draw([request(1, 5, 4)], scheduler=scheduler)
    scheduler.release()
    assert scheduler.chunks == []
    same(draw([request(0, 5, 4)], scheduler=scheduler)[0], draw([request(0, 5, 4)])[0])


def test_fewer_rows_decode_only_if_they_give_the_same_bits():
    """A CPU's products do, whatever the number of rows; its sums over rows as narrow as here do not. The whole of a
    real model is in test_decode."""
    shape = dataclasses.replace(tiny.QUICK, slots=16, row_levels=2, prompt_buckets=(32,))
    engine = Engine(tiny.CONFIG, shape, tiny.one_device())
    assert shape.rows(1) == [8, 16] and shape.rows(16) == [16] and engine.row_counts == [16]
    engine.warmup(tiny.weights())
    bits = [engine._probe(tiny.weights(), engine.chunks(), n, 8) for n in (8, 16)]
    assert (8 in engine.row_counts) == np.array_equal(*bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_probe", lambda params, chunks, rows, busy: np.float32(rows == 8))
        engine.warmup(tiny.weights())
        assert engine.row_counts == [16]
        patch.setattr(engine, "_probe", lambda params, chunks, rows, busy: np.float32(0))
        engine.warmup(tiny.weights())
    assert engine.row_counts == [8, 16]
    crowd = [request(i, n, 4 + i % 14) for i, n in zip(range(13), [5, 1, 8, 9, 3, 17, 2, 31, 12, 3] * 2)]
    draw(crowd)
    forced = [dataclasses.replace(r, logprobs=[], params=SamplingParams(len(r.tokens))) for r in crowd]
    used, generate = set(), engine.generate
    engine.generate = lambda params, chunks, slots, *rest: used.add(len(slots.tokens)) or generate(
        params, chunks, slots, *rest)
    for one, other in zip(draw(forced, scheduler=Scheduler(engine)), crowd, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert used == {8, 16}


def test_a_request_longer_than_the_engine_is_made_for_is_refused():
    shape = dataclasses.replace(tiny.SHAPE, new_tokens=9)
    assert shape.columns == (2, 4) and tiny.SHAPE.columns == (6, 4)
    with pytest.raises(ValueError, match="request 1: 10 new tokens; the engine is made for 9"):
        Scheduler(Engine(tiny.CONFIG, shape, tiny.one_device())).submit([request(1, 5, 10)])


def test_a_prompt_that_comes_again_much_later_blocks_nobody():
    """The pool holds one long prompt: the first is stored, and wanted again behind twenty others."""
    scheduler = Scheduler(tight())
    prompt = request(0, 25).context
    crowd = [Request(0, prompt, SamplingParams(4)), *[request(i, 26, 4) for i in range(1, 20)],
             Request(30, prompt, SamplingParams(4))]
    draw(crowd, scheduler=scheduler)
    assert all(r.end_reason for r in crowd) and scheduler.tables.prompts == []


def test_a_group_larger_than_a_prompts_members():
    scheduler = Scheduler(tiny.engine())
    group = draw([Request(uid, [10, 11, 12], SamplingParams(6)) for uid in range(8)], scheduler=scheduler)
    assert scheduler.take_counts()["shared_tokens"] == 6 * 3, "stored twice, for four members each"
    for r in group[3:6]:
        same(draw([Request(r.uid, [10, 11, 12], SamplingParams(6))])[0], r)


def test_a_cache_that_holds_no_sample_is_refused():
    with pytest.raises(ValueError, match="cache_tokens 40 holds 5 pages of 8 tokens, but a prompt may need 4 and its "
                                         "response 6 of their own: set 80 or more"):
        Engine(tiny.CONFIG, dataclasses.replace(TIGHT, cache_tokens=40), tiny.one_device())


@functools.cache
def int8():
    shape = dataclasses.replace(tiny.SHAPE, int8_weights=True, cache_dtype=jnp.int8, parts=1)
    engine = Engine(tiny.CONFIG, shape, tiny.one_device())
    return engine, engine.weights(tiny.master())


def test_int8_weights_and_cache_stay_near():
    engine, weights = int8()
    assert {leaf.dtype for name, leaf in weights["layers"][0].items() if name.endswith("_proj")} == {jnp.dtype("int8")}
    exact = draw([request(i, 12, 10, temperature=0.0) for i in range(6)])
    forced = [dataclasses.replace(r, logprobs=[], params=SamplingParams(len(r.tokens))) for r in exact]
    scheduler = Scheduler(engine)
    scheduler.submit(forced)
    while scheduler.busy:
        scheduler.step(weights)
        held = [pages for chunk in scheduler.chunks for pages in (*chunk.own, *chunk.prompt)]
        assert all(pages.keys.dtype == jnp.int8 for pages in held)
    gaps = np.concatenate([np.subtract(a.logprobs, b.logprobs) for a, b in zip(forced, exact, strict=True)])
    assert 0 < np.abs(gaps).mean() < 0.1 and np.abs(gaps).max() < 0.5


def test_int8_is_deterministic_too():
    engine, weights = int8()
    together = draw(some(8), weights, Scheduler(engine))
    for alone, one in zip(some(8)[2:5], together[2:5], strict=True):
        same(draw([alone], weights, Scheduler(engine))[0], one)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype if np.isscalar(x) else x.dtype),
                        tree)


@pytest.mark.parametrize("platform, kernel", [("tpu", "tpu"), ("cuda", "gpu")])
def test_decoding_with_kernels_lowers_for_accelerators(platform, kernel):
    """The whole program of a dispatch, in bfloat16, over a mesh of four: nothing but the kernels' own compilers is
    missing here."""
    mesh = sharding.make_mesh(2, 1, 2, jax.devices()[:4])
    shape = dataclasses.replace(tiny.SHAPE, dtype=jnp.bfloat16, kernel=kernel, page_len=128, cache_len=256)
    engine = Engine(tiny.CONFIG, shape, mesh)
    weights = engine.weights.shapes(tiny.master())
    chunks = tuple(map(abstract, engine.chunks()))
    tables = engine.tables().of([], 8)
    args = abstract((Slots.idle(8), tables, np.zeros((8, shape.steps_per_dispatch), np.int32)))
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(decode.generate, tiny.CONFIG, shape))
        made = export.export(program, platforms=[platform],
                             disabled_checks=[export.DisabledSafetyCheck.custom_call(TRITON)])(weights, chunks, *args)
    assert ("tpu_custom_call" if platform == "tpu" else TRITON) in made.mlir_module()
