"""Engine and scheduler: exactness, golden models, the trainer's score, stops, limits, abort and resume, the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import types

import jax
import numpy as np
import pytest
import sampler_helpers as tiny
from model_helpers import NAMES, golden, loaded
from sampler_helpers import Scripted, draw, request, same
from shared_data import cases, shared

from rljax import packing, sharding, tokenizer
from rljax.optimizer import OptimizerConfig
from rljax.sample import SamplingParams
from rljax.sampler import requests as asked
from rljax.sampler.engine import Engine, EngineConfig
from rljax.sampler.scheduler import Request, Scheduler
from rljax.policy import LossConfig
from rljax.trainer import Trainer

CASES = {row["id"]: row for row in cases("sampler")}
MIXED = {0: {}, 1: {"temperature": 0.0}, 2: {"top_k": 3}, 3: {"temperature": 0.5}, 4: {"top_p": 0.8}, 5: {},
         6: {"min_p": 0.1, "temperature": 1.5}, 7: {"temperature": 0.0}, 8: {"top_k": 2, "top_p": 0.9}, 9: {}}


def case(name):
    """The rows of this id, none where the shared folder is missing."""
    return pytest.mark.parametrize("row", [CASES[name]] if name in CASES else [], ids=lambda row: row["id"])


def batch_of(count, start=0, new=10):
    """Requests of many lengths and knobs: 1 token, a bucket filled exactly, one more than that."""
    lengths = (5, 1, 8, 9, 16, 17, 2, 31, 12, 3)
    return [request(start + i, lengths[i % 10], new, **MIXED[i % 10]) for i in range(count)]


@functools.cache
def reference():
    """20 requests, more than twice the slots, drawn together."""
    return draw(batch_of(20))


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(10))
def test_alone_and_in_a_full_batch_are_bitwise_the_same(index):
    same(draw([batch_of(20)[index]])[0], reference()[index])


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_any_order_and_slot_are_bitwise_the_same(order):
    requests = batch_of(20)
    shuffled = requests[::-1] if order == "reversed" else np.random.default_rng(0).permutation(20).tolist()
    if order == "shuffled":
        shuffled = [requests[i] for i in shuffled]
    draw(shuffled)
    for one, other in zip(requests, reference(), strict=True):
        same(one, other)


@pytest.mark.parametrize("slot", range(8))
def test_each_slot_gives_the_same(slot):
    scheduler = Scheduler(tiny.engine())
    fillers = [request(100 + i, new=30, temperature=0.0) for i in range(slot)]
    mine = batch_of(4)[3]
    scheduler.submit([*fillers, mine])
    while any(one is mine for one in [*scheduler.slots, *scheduler.queue]):
        scheduler.step(tiny.weights())
        assert mine.end_reason or scheduler.slots[slot] is mine
    same(mine, reference()[3])


def test_what_a_slot_held_before_leaves_no_trace():
    """Stale keys of a longer sequence, and a filter that is no longer on."""
    scheduler = Scheduler(tiny.engine())
    draw([request(200 + i, 31, 17, top_k=2) for i in range(8)], scheduler=scheduler)
    for one, other in zip(draw(batch_of(20), scheduler=scheduler), reference(), strict=True):
        same(one, other)


@pytest.mark.parametrize("dispatches", [0, 1, 2, 3])
def test_abort_and_resume_are_bitwise_the_same(dispatches):
    scheduler = Scheduler(tiny.engine())
    requests = batch_of(20)
    scheduler.submit(requests)
    for _ in range(dispatches + 1):  # the last one is not collected
        scheduler.step(tiny.weights())
    partial = {r.uid: (list(r.tokens), list(r.logprobs)) for r in scheduler.abort()}
    assert len(partial) <= 20 and (dispatches == 0) == all(not tokens for tokens, _ in partial.values())
    open_ones = [r for r in requests if r.end_reason == "abort"]
    draw(open_ones[::-1], scheduler=scheduler)
    for one, other in zip(requests, reference(), strict=True):
        same(one, other)
    for uid, (tokens, logprobs) in partial.items():
        assert requests[uid].tokens[: len(tokens)] == tokens and requests[uid].logprobs[: len(tokens)] == logprobs


def test_drawn_tokens_as_part_of_the_context_go_on_alike():
    """Their keys and values then come from prefill, whose products round differently: the last bits may move."""
    for whole, again in zip(reference()[:10], batch_of(10), strict=True):
        part = min(5, len(whole.tokens) - 1)
        if part < 1 or len(again.context) + part > 32:
            continue
        again.context += whole.tokens[:part]
        again.params = dataclasses.replace(again.params, max_new_tokens=10 - part)
        draw([again])
        assert again.tokens == whole.tokens[part:]
        np.testing.assert_allclose(again.logprobs, whole.logprobs[part:], atol=1e-5)


def test_forced_tokens_get_their_log_probs():
    for whole in reference()[:10]:
        again = dataclasses.replace(whole, logprobs=[], params=dataclasses.replace(
            whole.params, max_new_tokens=len(whole.tokens), temperature=whole.params.temperature or 1.0, top_k=1))
        draw([again])
        same(dataclasses.replace(again, end_reason=whole.end_reason), whole)
        assert again.end_reason == "length"


@case("SMP-009")
def test_greedy_decode_resumed_in_the_middle(row):
    whole = draw([request(1, new=20, temperature=0.0)])[0]
    for half in (0, 1, 10, len(whole.tokens) - 1):
        again = request(1, new=20, temperature=0.0)
        again.tokens, again.logprobs = whole.tokens[:half], whole.logprobs[:half]
        draw([again])
        assert again.tokens == whole.tokens
        np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=row["expected"]["logprobs_atol"])


def test_a_fair_coin_gives_distinct_samples():
    """NUM-058: the samples of one prompt have keys of their own, and every token its own."""
    logits = np.full((tiny.VOCAB, tiny.VOCAB), -200.0, np.float32)
    logits[:, [10, 11]] = 0.0
    coin = tiny.table(logits)
    requests = draw([Request(uid, [9, 10], SamplingParams(16)) for uid in range(64)], coin)
    flips = np.asarray([r.tokens for r in requests])
    np.testing.assert_allclose([r.logprobs for r in requests], math.log(0.5), atol=1e-5)
    assert flips.shape == (64, 16) and set(flips.flat) == {10, 11}
    for start in range(0, 64, 8):
        assert len({tuple(row) for row in flips[start : start + 8]}) >= 7
    assert 0.4 < (flips == 10).mean() < 0.6
    repeated = (flips[:, 1:] == flips[:, :-1]).mean()
    assert 0.4 < repeated < 0.6, "one position's draw says nothing of the next"
    with jax.debug_key_reuse(True):
        seeds = jax.vmap(lambda uid: jax.random.fold_in(jax.random.key(5), uid))(np.arange(3))
        assert jax.vmap(jax.random.uniform)(seeds).shape == (3,)


# --- golden models and the trainer -----------------------------------------------------------------------------------


@functools.cache
def golden_engine(name):
    cfg, params = loaded(name)
    shape = EngineConfig(slots=4, cache_len=40, prompt_buckets=(17,), prefill_rows=2, steps_per_dispatch=12,
                         stop_ids=(), vocab_known=cfg.vocab_size, kernel=tiny.kernel())
    engine = Engine(cfg, shape, tiny.one_device())
    return engine, engine.weights(params)


@case("SMP-010")
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_the_golden_tokens(name, row):
    """Every golden token follows from a full forward of transformers, step by step."""
    shared("golden")
    engine, weights = golden_engine(name)
    data = golden(name)
    greedy = SamplingParams(12, temperature=0.0)
    requests = [Request(i, ids.tolist(), greedy) for i, ids in enumerate(data["input_ids"])]
    draw(requests, weights, Scheduler(engine))
    assert [r.tokens for r in requests] == data["greedy_ids"].tolist()


def trainer_scores(cfg, params, requests, temperature):
    """The trainer's log-probs of each request's tokens, from packed rows."""
    trainer = Trainer(cfg, tiny.one_device(), LossConfig(temperature=temperature), OptimizerConfig(lr=0.0))
    items = []
    for r in requests:
        count = len(r.tokens)
        zeros = np.zeros(count, np.float32)
        items.append(packing.PackItem(np.asarray(r.context + r.tokens), len(r.context), np.ones(count, np.int32),
                                      zeros, zeros, zeros, zeros, np.asarray(r.logprobs, np.float32)))
    batches = packing.pack(items, buckets=(96,), max_tokens_per_device=192, data_shards=1)
    worst = 0.0
    for batch in batches:
        logp, _ = trainer.score(params, batch)
        trained = np.asarray(batch.loss_mask) > 0
        worst = max(worst, np.abs(np.asarray(logp) - np.asarray(batch.rollout_logprobs))[trained].max())
    assert sum(int(np.asarray(b.loss_mask).sum()) for b in batches) == sum(len(r.tokens) for r in requests)
    return worst


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_text", "mistral", "smollm3", "qwen3_moe", "llama_rope3"])
def test_log_probs_equal_the_trainers(name):
    """What the sampler records for its own draws (windows, soft caps, layers without RoPE, experts) is what the trainer
    scores, to 1e-4 in float32."""
    cfg, params = loaded(name)
    engine, weights = golden_engine(name)
    prompts = golden(name)["input_ids"].tolist()
    requests = [Request(10 + i, prompts[i % 3][: 17 - 4 * i], SamplingParams(20, temperature=0.8)) for i in range(4)]
    draw(requests, weights, Scheduler(engine))
    assert trainer_scores(cfg, params, requests, 0.8) < 1e-4


def test_log_probs_under_filters_and_a_padded_vocabulary_equal_the_trainers():
    requests = draw([request(i, 6, 12, temperature=0.7, **knobs) for i, knobs in
                     enumerate([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])])
    assert all(max(r.tokens) < tiny.KNOWN for r in requests)
    assert trainer_scores(tiny.CONFIG, tiny.master(), requests, 0.7) < 1e-4


@case("SMP-020")
def test_prompts_prefilled_together_equal_each_alone(row):
    prompts = [*row["input"]["prompts"], [9] * 8, [11, 12]]
    together = draw([Request(i, p, SamplingParams(1, temperature=0.0)) for i, p in enumerate(prompts)])
    for i, p in enumerate(prompts):
        alone = draw([Request(i, p, SamplingParams(1, temperature=0.0))])[0]
        assert alone.tokens == together[i].tokens
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=row["expected"]["next_token_logits_atol"])


def test_buckets_agree():
    """The same prompt through another bucket differs in rounding only."""
    small = tiny.engine()
    large = Engine(tiny.CONFIG, dataclasses.replace(tiny.QUICK, prompt_buckets=(64,)), tiny.one_device())
    one = draw([request(0, 7)], scheduler=Scheduler(small))[0]
    other = draw([request(0, 7)], scheduler=Scheduler(large))[0]  # a bucket longer than the cache
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


# --- where a response ends -------------------------------------------------------------------------------------------


@case("SMP-003")
def test_any_of_the_stop_ids_ends_a_response(row):
    stream = row["input"]["stream"]
    result = draw([Request(0, [5, 19], SamplingParams(10))], tiny.chain(19, *stream))[0]
    assert result.tokens == row["expected"]["response_tokens"] and result.end_reason == "stop"
    assert len(result.logprobs) == len(result.tokens) and result.text is None
    assert set(row["expected"]["stop_ids"]) <= set(tiny.STOP_IDS)


@case("SMP-024")
def test_the_end_id_may_be_0(row):
    result = draw([Request(0, [19], SamplingParams(10))], tiny.chain(19, *row["input"]["stream"]))[0]
    assert result.tokens == row["expected"]["response_tokens"] and result.end_reason == "stop"


@case("SMP-019")
def test_the_limit_ends_a_response(row):
    limit = row["input"]["max_response_len"]
    stream = range(20, 20 + row["input"]["stream_len"])
    result = draw([Request(0, [19], SamplingParams(limit))], tiny.chain(19, *stream))[0]
    assert result.end_reason == "length" and len(result.tokens) == row["expected"]["response_len"]


def test_the_end_token_as_the_last_one_allowed_is_a_stop():
    params = tiny.chain(19, 20, 21, 1)
    ends = [draw([Request(0, [19], SamplingParams(n))], params)[0].end_reason for n in (2, 3, 4)]
    assert ends == ["length", "stop", "stop"]
    assert draw([Request(0, [19], SamplingParams(1))], params)[0].tokens == [20]


@case("SMP-016")
@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}], ids=str)
def test_padded_rows_are_never_drawn(knobs, row):
    inside = row["input"]
    assert inside["tokenizer_len"] <= inside["argmax"] < inside["head_rows"]
    logits = np.zeros((tiny.VOCAB, tiny.VOCAB), np.float32)
    logits[:, tiny.KNOWN + 3] = 300.0
    logits[:, 42] = 5.0
    results = draw([Request(i, [9], SamplingParams(12, **knobs)) for i in range(8)], tiny.table(logits))
    tokens = [token for r in results for token in r.tokens]
    assert max(tokens) < tiny.KNOWN and 42 in tokens
    if knobs.get("temperature") != 0.0 and results[0].tokens[0] == 42:
        np.testing.assert_allclose(results[0].logprobs[0], -295.0, rtol=1e-3)


def stopping_scheduler(tok):
    return Scheduler(tiny.engine(), functools.partial(tokenizer.find_stop, tok))


@pytest.mark.parametrize("stop, text, kept", [
    (("x",), "4 x", "4 "), ((" x", "x"), "4 x", "4"), ((":Us",), "4:Us", "4"), (("zzz",), None, None)])
def test_stop_strings(stop, text, kept):
    tok = types.SimpleNamespace(**{"special_tokens": frozenset(), "decode": lambda ids, skip=True: "".join(
        {20: "4", 21: " ", 22: "x", 23: ":", 24: "Us"}.get(i, "?") for i in ids)})
    names = {"4": 20, " ": 21, "x": 22, ":": 23}
    stream = [20, 23, 24, 30] if text == "4:Us" else [names[c] for c in "4 x"] + [30]
    params = tiny.chain(19, *stream)
    for limit in (len(stream) - 1, len(stream), 12):  # with the first, stop string and limit meet
        result = draw([Request(0, [19], SamplingParams(limit, stop=stop))], params, stopping_scheduler(tok))[0]
        if text is None:
            assert result.end_reason == "length" and result.text is None and len(result.tokens) == limit
        else:
            assert (result.end_reason, result.text, result.tokens) == ("stop", kept, stream[:-1])
            assert len(result.logprobs) == len(result.tokens)


@case("SMP-028")
def test_stop_string_of_a_base_model(row, tmp_path):
    inside, expected = row["input"], row["expected"]
    alphabet = "".join(sorted(set(inside["text"])))
    tokenizer.character_tokenizer("#@$%&" + alphabet, tmp_path)
    tok = tokenizer.load(tmp_path)
    ids = tok.encode(inside["text"])
    scheduler = Scheduler(Scripted({0: ids}), functools.partial(tokenizer.find_stop, tok))
    results = draw([Request(0, [5], SamplingParams(len(ids) + 5, stop=tuple(inside["stop"])))], {}, scheduler)[0]
    assert results.end_reason == "stop" and results.text == expected["text_for_reward"]
    ended = tok.decode(results.tokens)
    assert ended.endswith(inside["stop"][0]) and inside["text"].startswith(ended)
    assert not tok.decode(results.tokens[:-1]).endswith(inside["stop"][0])
    assert len(results.logprobs) == len(results.tokens)


def test_a_stop_string_over_the_border_of_a_resumed_part(tmp_path):
    tokenizer.character_tokenizer("abcd", tmp_path)
    tok = tokenizer.load(tmp_path)
    ids = tok.encode("abcdabcdabcddcba")
    scheduler = Scheduler(Scripted({0: ids}), functools.partial(tokenizer.find_stop, tok))
    mine = Request(0, [5], SamplingParams(16, stop=("dab", "cddc")))
    mine.tokens, mine.logprobs = ids[:4], [-1.0] * 4
    draw([mine], {}, scheduler)
    assert (mine.end_reason, mine.text, mine.tokens) == ("stop", "abc", ids[:6]) and mine.logprobs[:4] == [-1.0] * 4


def test_stop_string_over_tokens_of_a_real_tokenizer():
    folder = pathlib.Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
    if not folder.exists():
        pytest.skip(f"{folder} is missing: launch/fetch_smollm2.sh makes it")
    tok = tokenizer.load(folder)
    ids = tok.encode("The answer is 12.\n\nUser: what else?")
    stop = "12.\n\nUs"  # begins and ends inside of tokens
    scheduler = Scheduler(Scripted({0: ids}), functools.partial(tokenizer.find_stop, tok))
    result = draw([Request(0, [5], SamplingParams(40, stop=(stop,)))], {}, scheduler)[0]
    assert result.end_reason == "stop" and result.text == "The answer is "
    assert result.tokens == ids[: len(result.tokens)] and stop in tok.decode(result.tokens)
    assert stop not in tok.decode(result.tokens[:-1])


# --- scheduling ------------------------------------------------------------------------------------------------------


def test_more_requests_than_slots_all_end_and_nothing_stays():
    scheduler = Scheduler(tiny.engine())
    requests = draw(batch_of(27), scheduler=scheduler)
    assert all(r.end_reason in ("stop", "length") for r in requests)
    assert all(len(r.tokens) == len(r.logprobs) <= 10 for r in requests)
    assert scheduler.busy == 0 and not any(scheduler.slots) and not scheduler.queue
    tables = scheduler.tables
    assert (len(tables.own_pool), len(tables.prompt_pool)) == tiny.engine().pages
    assert (scheduler.tables.own < 0).all() and (scheduler.tables.prompt < 0).all()
    counts = scheduler.take_counts()
    assert counts["drawn"] == sum(len(r.tokens) for r in requests) <= counts["slot_steps"]
    assert scheduler.take_counts()["drawn"] == 0 and scheduler.step(tiny.weights()) == []


def test_a_group_shares_its_prompt():
    scheduler = Scheduler(tiny.engine())
    context = [10, 11, 12, 13]
    group = draw([Request(uid, list(context), SamplingParams(8)) for uid in range(4)], scheduler=scheduler)
    assert scheduler.take_counts()["shared_tokens"] == 3 * 4
    assert len({tuple(r.tokens) for r in group}) == 4
    same(draw([Request(2, context, SamplingParams(8))])[0], group[2])


def test_abort_of_some():
    scheduler = Scheduler(tiny.engine())
    requests = [request(i, new=30, temperature=0.0) for i in range(12)]
    scheduler.submit(requests)
    scheduler.step(tiny.weights())
    scheduler.step(tiny.weights())
    gone = scheduler.abort([10, 3, 99])
    assert [r.uid for r in gone] == [3, 10] and all(r.end_reason == "abort" for r in gone)
    assert len(gone[0].tokens) == 4 and gone[1].tokens == []
    assert scheduler.busy == 10
    while scheduler.busy:
        scheduler.step(tiny.weights())
    assert sum(r.end_reason != "abort" for r in requests) == 10 and scheduler.abort() == []


@pytest.mark.parametrize("change, message", [
    ({"context": []}, r"request 3: 0 context tokens and max_new_tokens 10"),
    ({"params": SamplingParams(0)}, r"5 context tokens and max_new_tokens 0"),
    ({"params": SamplingParams(44)}, r"5 context \+ 44 new tokens exceed the cache of 48"),
    ({"context": [9] * 33}, r"request 3: a context of 33 tokens is longer than the largest prompt bucket, 32"),
    ({"params": SamplingParams(5, stop=("x",))}, r"request 3 has stop strings, but the scheduler has no tokenizer"),
    ({"context": [9, 128]}, r"token 128 is none of the model's 128"),
    ({"context": [-1]}, r"token -1 is none of the model's 128"),
    ({"params": SamplingParams(5, temperature=-1.0)}, r"temperature -1.0"),
    ({"params": SamplingParams(5, temperature=1e-9)}, r"temperature 1e-09"),
    ({"params": SamplingParams(5, temperature=math.nan)}, r"temperature nan"),
    ({"params": SamplingParams(5, temperature=math.inf)}, r"temperature inf"),
    ({"params": SamplingParams(5, top_p=0.0)}, r"top_p 0.0 must be above 0"),
    ({"params": SamplingParams(5, top_p=1.5)}, r"top_p 1.5"),
    ({"params": SamplingParams(5, min_p=-0.1)}, r"min_p -0.1"),
    ({"params": SamplingParams(5, top_k=-2)}, r"top_k -2"),
    ({"params": SamplingParams(5, min_new_tokens=6)}, r"min_new_tokens 6 is not from 0 to max_new_tokens 5"),
    ({"params": SamplingParams(5, logit_bias=((3, math.nan),))}, r"logit_bias takes up to 32 different tokens"),
    ({"params": SamplingParams(5, logit_bias=((3, 1.0), (3, 2.0)))}, r"logit_bias takes up to 32 different tokens"),
    ({"params": SamplingParams(5, logit_bias=((128, 1.0),))}, r"token 128 is none of the model's 128"),
    ({"params": SamplingParams(5, top_logprobs=1)}, r"top_logprobs 1 is not from 0 to the engine's 0"),
    ({"params": SamplingParams(5, top_k=2**31)}, r"top_k 2147483648"),
    ({"uid": 2**32}, r"request 4294967296: a uid is between 0 and 4294967295"),
    ({"uid": 1}, r"request 1: another with this uid is in flight"),
    ({"tokens": [9, 9], "logprobs": [0.0] * 3}, r"3 log-probs for 2 tokens"),
    ({"tokens": [9, 9], "stale": 2}, r"request 3: stale 2, but 0 log-probs"),
    ({"tokens": [9] * 11}, r"11 tokens, and max_new_tokens 10"),
])
def test_a_bad_request_is_refused_and_none_of_its_batch_stays(change, message):
    scheduler = Scheduler(tiny.engine())
    scheduler.submit([request(1)])
    with pytest.raises(ValueError, match=message):
        scheduler.submit([request(2), dataclasses.replace(request(3), **change)])
    assert [r.uid for r in scheduler.queue] == [1]


def test_a_uid_may_come_again_once_it_has_ended():
    scheduler = Scheduler(tiny.engine())
    one, other = draw([request(4)], scheduler=scheduler)[0], draw([request(4)], scheduler=scheduler)[0]
    same(one, other)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.submit([request(5), request(5)])


def test_no_program_is_compiled_after_warm_up(monkeypatch):
    """Filters, greedy, stop strings, biases, abort, resume, any number of requests and new weights."""
    monkeypatch.setattr(asked, "CHUNK_STEPS", 1)
    engine = Engine(tiny.CONFIG, dataclasses.replace(tiny.SHAPE, prefill_chunk=16, resumes=True), tiny.one_device())
    weights = engine.weights(tiny.master())
    weights = engine.weights(tiny.master(), weights)
    later = tiny.master(1)  # before the listener: initialisation compiles small programs of its own
    count = engine.warmup(weights)
    # Zeros of 2 sizes, decoding, prefill of 8 and 16, 2 for 32, 3 x 2 to insert; 2 to resume, 2 to insert that.
    assert count == engine.programs == 17
    scheduler = Scheduler(engine, lambda tokens, stop, start: (start + 1, ""))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **details: compiled.append(name) if name.endswith("backend_compile_duration") else None)
    requests = batch_of(20) + [request(40 + i, new=9, stop=("x",)) for i in range(3)]
    requests += [request(50, new=5, min_new_tokens=3, logit_bias=((9, 2.0),))]
    resumed = dataclasses.replace(request(60, new=30), tokens=[9] * 25, logprobs=[-1.0] * 25, stale=25)
    requests.append(resumed)
    scheduler.submit(requests)
    scheduler.step(weights)
    scheduler.submit(scheduler.abort())
    weights = engine.weights(later, weights)
    while scheduler.busy:
        scheduler.step(weights)
    assert compiled == [] and engine.programs == count and resumed.prefilled == 24
    jax.jit(lambda x: x + tiny.VOCAB)(np.ones(3))
    assert compiled, "the listener must be able to see a compilation"


def test_new_weights_take_the_memory_of_the_old_ones():
    old = tiny.engine().weights(tiny.master())
    new = tiny.engine().weights(tiny.master(1), old)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(tiny.weights(1)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_tokens_are_what_was_drawn_and_never_made_again_from_text():
    """SMP-014: pieces that the tokenizer would merge stay two tokens with two log-probs."""
    result = draw([Request(0, [5], SamplingParams(2))], {}, Scheduler(Scripted({0: [7, 8]})))[0]
    assert result.tokens == [7, 8] and len(result.logprobs) == 2


# --- what a request may ask for -------------------------------------------------------------------------------------


def test_no_stop_id_comes_before_the_least_length():
    params = tiny.chain(19, 20, 1)  # writes 20, the end token, and then itself again and again
    ends = [draw([Request(0, [19], SamplingParams(8, min_new_tokens=n))], params)[0] for n in (0, 1, 2, 5)]
    assert [(r.end_reason, len(r.tokens)) for r in ends[:2]] == [("stop", 2)] * 2
    for r, least in zip(ends[2:], (2, 5), strict=True):
        assert not set(r.tokens[:least]) & set(tiny.STOP_IDS) and len(r.tokens) > least
    strings = Request(0, [19], SamplingParams(8, min_new_tokens=4, stop=("x",)))
    find = lambda tokens, stop, start: (start + 1, "") if len(tokens) > start else None  # noqa: E731
    draw([strings], tiny.chain(19, 20, 21), Scheduler(tiny.engine(), find))
    assert len(strings.tokens) == 5 and strings.end_reason == "stop"


def test_a_bias_moves_the_draw_but_not_the_recorded_log_prob():
    logits = np.zeros((tiny.VOCAB, tiny.VOCAB), np.float32)
    plain = draw([Request(0, [9], SamplingParams(16))], tiny.table(logits))[0]
    only = SamplingParams(16, logit_bias=((42, 100.0),))
    biased = draw([Request(0, [9], only), *[Request(i, [9], SamplingParams(16)) for i in (1, 2)]], tiny.table(logits))
    assert biased[0].tokens == [42] * 16
    np.testing.assert_allclose(biased[0].logprobs, -math.log(tiny.VOCAB), atol=1e-5)
    never = SamplingParams(16, logit_bias=tuple((token, -100.0) for token in set(plain.tokens)))
    assert not set(draw([Request(0, [9], never)], tiny.table(logits))[0].tokens) & set(plain.tokens)
    greedy = SamplingParams(3, temperature=0.0, logit_bias=((50, 1.0),))
    assert draw([Request(0, [9], greedy)], tiny.table(logits))[0].tokens == [50] * 3
    same(draw([Request(1, [9], SamplingParams(16))], tiny.table(logits))[0], biased[1])


@functools.cache
def telling():
    return Engine(tiny.CONFIG, dataclasses.replace(tiny.SHAPE, alternatives=5, parts=1), tiny.one_device())


def test_likeliest_tokens_and_log_probs_of_the_prompt():
    requests = [request(0, 9, 10, top_logprobs=5, prompt_logprobs=True), request(1, 5, 10),
                request(2, 6, 10, temperature=0.0, top_logprobs=2)]
    scheduler = Scheduler(telling())
    draw(requests, scheduler=scheduler)
    for r, plain in zip(requests, draw([request(0, 9), request(1), request(2, 6, temperature=0.0)]), strict=True):
        assert r.tokens == plain.tokens and r.prompt_logprobs is None or r.uid == 0
        np.testing.assert_allclose(r.logprobs, plain.logprobs, atol=1e-6)
    assert [len(r.top) for r in requests] == [len(requests[0].tokens), 0, len(requests[2].tokens)]
    for tokens, logp, top in zip(requests[0].tokens, requests[0].logprobs, requests[0].top, strict=True):
        assert len(top) == 5 and [p for _, p in top] == sorted((p for _, p in top), reverse=True)
        assert dict(top).get(tokens, logp) == pytest.approx(logp, abs=1e-6) and logp <= top[0][1] + 1e-6
    assert [top[0] for top in requests[2].top] == [
        (token, pytest.approx(logp, abs=1e-6)) for token, logp in zip(requests[2].tokens, requests[2].logprobs)]
    whole = Request(5, requests[0].context[:1], SamplingParams(8), tokens=requests[0].context[1:])
    draw([whole])
    assert requests[0].prompt_logprobs[0] == 0.0
    np.testing.assert_allclose(requests[0].prompt_logprobs[1:], whole.logprobs, atol=1e-5)
    again = dataclasses.replace(requests[0], tokens=requests[0].tokens[:5], logprobs=requests[0].logprobs[:5],
                                top=requests[0].top[:5])
    assert draw([again], scheduler=scheduler)[0].top == requests[0].top


# --- mesh ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def meshed():
    mesh = sharding.make_mesh(2, 2, 2)
    trainer = Trainer(tiny.CONFIG, mesh, LossConfig(), OptimizerConfig(lr=0.0))
    engine = Engine(tiny.CONFIG, tiny.SHAPE, mesh)
    return engine, engine.weights(jax.device_put(tiny.master(), trainer.shardings))


def test_eight_devices_agree_with_one(meshed):
    """Forced tokens, since a draw may flip between layouts; greedy tokens are drawn."""
    engine, weights = meshed
    forced = [dataclasses.replace(r, logprobs=[], params=SamplingParams(len(r.tokens), r.params.temperature))
              for r in reference()[:10]]
    draw(forced, weights, Scheduler(engine))
    for one, other in zip(forced, reference()[:10], strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=2e-6)  # the largest are near -6
    greedy = [request(i, new=10, temperature=0.0) for i in range(8)]
    alone = draw([request(i, new=10, temperature=0.0) for i in range(8)])
    draw(greedy, weights, Scheduler(engine))
    assert [r.tokens for r in greedy] == [r.tokens for r in alone]


def test_eight_devices_in_any_order_are_bitwise_the_same(meshed):
    engine, weights = meshed
    one, other = batch_of(12), batch_of(12)
    draw(one, weights, Scheduler(engine))
    draw(other[::-1], weights, Scheduler(engine))
    for a, b in zip(one, other, strict=True):
        same(a, b)
    for leaf in jax.tree.leaves(weights):
        assert "fsdp" not in str(leaf.sharding.spec), "decoding must not gather weights"


def test_what_is_resumed_on_eight_devices_agrees(monkeypatch):
    monkeypatch.setattr(asked, "CHUNK_STEPS", 1)
    shape = dataclasses.replace(tiny.SHAPE, prefill_chunk=16, resumes=True)
    engine = Engine(tiny.CONFIG, shape, sharding.make_mesh(2, 2, 2))
    weights, whole = engine.weights(tiny.master()), request(1, new=30, temperature=0.0, min_new_tokens=30)
    draw([whole], weights, Scheduler(engine))
    part = dataclasses.replace(whole, tokens=whole.tokens[:25], logprobs=whole.logprobs[:25], stale=25)
    draw([part], weights, Scheduler(engine))
    assert part.prefilled == 24 and part.tokens == whole.tokens
    np.testing.assert_allclose(part.logprobs, whole.logprobs, atol=1e-5)


def test_slots_that_the_mesh_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="slots 6 and prefill rows 4 must be multiples of the mesh's 4"):
        Engine(tiny.CONFIG, dataclasses.replace(tiny.SHAPE, slots=6), sharding.make_mesh(2, 2, 2))


def test_rows_of_a_prefill_program_follow_from_the_chunk():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    made = Engine(tiny.CONFIG, dataclasses.replace(tiny.SHAPE, prefill_chunk=40), mesh)
    assert [made.rows(bucket) for bucket in (8, 16, 32, 64)] == [4, 2, 1, 0]
