"""Rollout and evaluation: what a sample gets, its metrics, named sets, and what an interruption leaves."""

from __future__ import annotations

import concurrent.futures
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import sampler_helpers as tiny
from sampler_helpers import Scripted
from shared_data import cases

from rljax import tokenizer
from rljax.data import PromptSource
from rljax.evaluation import EvalSet, evaluate, named_metrics
from rljax.metrics import Timers, masked_mean, nan_mean, pass_at_k, repeats
from rljax.rewards.pool import RewardResult
from rljax.gather import make_group
from rljax.rollout import Interrupted, Rollout, from_labels, remaining_budget, summarize
from rljax.sample import ABORTED, COMPLETED, PENDING, TRUNCATED, Sample, SamplingParams
from rljax.sampler.scheduler import Scheduler

CASES = {row["id"]: row for area in ("sampler", "data", "numerics") for row in cases(area)}
CHARACTERS = "".join(chr(33 + i) for i in range(80))


def case(*names):
    """Rows of these ids, none where the shared folder is missing."""
    rows = [CASES[name] for name in names if name in CASES]
    return pytest.mark.parametrize("row", rows, ids=lambda row: row["id"])


def close(value, row):
    expected = row["expected"]
    np.testing.assert_allclose(value, expected["value"], rtol=expected["rtol"], atol=expected["atol"])


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    tokenizer.character_tokenizer(CHARACTERS, folder)
    return tokenizer.load(folder)


class Pool:
    """Scores at once with `score(sample) -> float | None`."""

    def __init__(self, score=lambda sample: float(len(sample.response_tokens) % 2)):
        self.score, self.seen = score, []

    def submit(self, sample):
        sample.check()
        self.seen.append(sample.uid)
        future = concurrent.futures.Future()
        reward = self.score(sample)
        future.set_result(RewardResult(reward, {} if reward is None else {"half": reward / 2}))
        return future


def rollout(tok, pool=None, scheduler=None, stopping=lambda: False):
    return Rollout(scheduler or Scheduler(tiny.engine()), tok, pool or Pool(), Timers(), stopping)


def prompts(count, start=0):
    drawn = [np.random.default_rng(i).integers(8, 80, 3 + i).tolist() for i in range(count)]
    return [Sample(uid=start + i, group=start + i, prompt_tokens=tokens) for i, tokens in enumerate(drawn)]


def scored(rewards, /, group=0, **fields):
    """Samples of one group with these rewards."""
    base = {"response_tokens": [5, 6], "logprobs": [-1.0, -3.0], "loss_mask": [1, 1], "versions": [0, 0],
            "status": COMPLETED, "end_reason": "stop"}
    return [Sample(uid=10 * group + i, group=group, reward=r, **(base | fields)) for i, r in enumerate(rewards)]


# --- collect ---------------------------------------------------------------------------------------------------------


def test_collect_fills_every_field(tok):
    pool, samples = Pool(), prompts(12)
    rollout(tok, pool).collect(tiny.weights(), samples, SamplingParams(6), version=3)
    assert sorted(pool.seen) == list(range(12))
    for sample in samples:
        sample.check()
        count = len(sample.response_tokens)
        assert 1 <= count <= 6 and sample.loss_mask == [1] * count and sample.versions == [3] * count
        assert (sample.status, sample.end_reason) in {(COMPLETED, "stop"), (TRUNCATED, "length")}
        assert (sample.status == TRUNCATED) == (sample.response_tokens[-1] not in tiny.STOP_IDS)
        assert sample.text == tok.decode(sample.response_tokens)
        assert sample.reward == count % 2 and sample.rewards == {"half": sample.reward / 2}


@case("SMP-005")
def test_the_end_token_is_trained(tok, row):
    response, expected = row["input"]["response"], row["expected"]
    assert row["input"]["eos"] in tiny.STOP_IDS
    (sample,) = samples = [Sample(uid=0, group=0, prompt_tokens=[9])]
    rollout(tok).collect(tiny.chain(9, *response), samples, SamplingParams(8), 0)
    assert sample.response_tokens == response and sample.loss_mask == expected["loss_mask"]
    assert sample.status == COMPLETED and expected["reward_position"] == len(sample.loss_mask) - 1


@case("SMP-001")
def test_masks_come_from_lengths(tok, row):
    """A padding id that is also the end id: the real end token stays trained, and padding is no part of a sample."""
    args, inside = row["input"]["args"], row["input"]
    response = inside["completion"][: args["length"]]
    (sample,) = samples = [Sample(uid=0, group=0, prompt_tokens=list(inside["prompt"]))]
    scheduler = Scheduler(Scripted({0: response}, stop_ids=(inside["eos"],)))
    rollout(tok, scheduler=scheduler).collect({}, samples, SamplingParams(args["width"]), 0)
    padded = sample.loss_mask + [0] * (args["width"] - len(sample.response_tokens))
    close(padded, row)
    assert len(sample.prompt_tokens) == len(row["expected"]["prompt_mask"])


@case("SMP-014")
def test_trained_tokens_are_the_sampled_ones(tok, row):
    inside = row["input"]
    pieces = dict(enumerate(inside["sampled"], 20))

    class Merging:
        def decode(self, ids, skip_special=True):
            return "".join(pieces[i] for i in ids)

        def encode(self, text):
            raise AssertionError("text must not become tokens again")

    samples = [Sample(uid=0, group=0, prompt_tokens=[9])]
    scheduler = Scheduler(Scripted({0: list(pieces)}))
    Rollout(scheduler, Merging(), Pool(), Timers()).collect({}, samples, SamplingParams(len(pieces)), 0)
    assert samples[0].text == inside["text"] and samples[0].response_tokens == list(pieces)
    assert len(samples[0].logprobs) == row["expected"]["logprobs_len"]


@case("SMP-011")
def test_what_is_left_of_both_limits(row):
    close(remaining_budget(**row["input"]["args"]), row)
    assert remaining_budget(100, 64, 1000, 60) == 36 and remaining_budget(100, 0, 1000, 60) == 100


@case("SMP-012")
def test_a_resumed_sample_keeps_its_first_part(tok, row):
    first, second = row["input"]["part1"], row["input"]["part2"]
    count = len(first["tokens"])
    stop = len(first["tokens"] + second["tokens"])
    script = [*first["tokens"], *second["tokens"], 99]
    sample = Sample(uid=0, group=0, prompt_tokens=[9], response_tokens=list(first["tokens"]), status=ABORTED,
                    logprobs=list(map(float, first["logprobs"])), loss_mask=[1] * count,
                    versions=[first["version"]] * count)
    scheduler = Scheduler(Scripted({0: script}, stop_ids=()))
    rollout(tok, scheduler=scheduler).collect({}, [sample], SamplingParams(stop), second["version"])
    expected = row["expected"]
    assert sample.response_tokens == expected["response_tokens"]
    assert sample.logprobs == [*expected["logprobs"][:count], *[-0.5] * (stop - count)]
    assert sample.loss_mask == expected["loss_mask"] and sample.versions == expected["versions"]
    assert sample.status == TRUNCATED


def test_a_resumed_sample_goes_on_bitwise(tok):
    whole, again = prompts(6), prompts(6)
    rollout(tok).collect(tiny.weights(), whole, SamplingParams(12), 0)
    for sample, full in zip(again, whole, strict=True):
        part = len(full.response_tokens) // 2
        sample.response_tokens, sample.logprobs = full.response_tokens[:part], full.logprobs[:part]
        sample.loss_mask, sample.versions = [0] * part, [7] * part  # masks of the first part stay as they are
    rollout(tok).collect(tiny.weights(), again, SamplingParams(12), 0)
    for sample, full in zip(again, whole, strict=True):
        part = len(full.response_tokens) // 2
        assert (sample.response_tokens, sample.logprobs) == (full.response_tokens, full.logprobs)
        assert sample.loss_mask == [0] * part + full.loss_mask[part:] and sample.versions[:part] == [7] * part


def test_only_what_other_weights_drew_is_stale(tok, monkeypatch):
    scheduler, submitted = Scheduler(tiny.engine()), []
    submit = scheduler.submit
    monkeypatch.setattr(scheduler, "submit", lambda requests: submitted.extend(requests) or submit(requests))
    samples = prompts(3)
    for sample, versions in zip(samples, ([], [3, 3], [2, 2, 3]), strict=True):
        count = len(versions)
        sample.response_tokens, sample.logprobs = [9] * count, [-1.0] * count
        sample.loss_mask, sample.versions = [1] * count, versions
    rollout(tok, scheduler=scheduler).collect(tiny.weights(), samples, SamplingParams(6), 3)
    assert [request.stale for request in submitted] == [0, 0, 2]


def test_the_caches_limit_truncates(tok):
    (sample,) = samples = [Sample(uid=0, group=0, prompt_tokens=[9] * 30)]
    rollout(tok).collect(tiny.chain(9, 9), samples, SamplingParams(40), 0)
    assert (len(sample.response_tokens), sample.status) == (tiny.SHAPE.cache_len - 30, TRUNCATED)


@case("SMP-028")
def test_the_reward_sees_the_text_before_the_stop_string(tmp_path, row):
    inside, expected = row["input"], row["expected"]
    tokenizer.character_tokenizer("#@$%&" + "".join(sorted(set(inside["text"]))), tmp_path)
    tok, seen = tokenizer.load(tmp_path), []
    ids = tok.encode(inside["text"])
    scheduler = Scheduler(Scripted({0: ids}, stop_ids=()), lambda *args: tokenizer.find_stop(tok, *args))
    samples = [Sample(uid=0, group=0, prompt_tokens=[9])]
    pool = Pool(lambda sample: seen.append(sample.text))
    rollout(tok, pool, scheduler).collect({}, samples, SamplingParams(len(ids), stop=tuple(inside["stop"])), 0)
    assert seen == [expected["text_for_reward"]] and samples[0].status == expected["status"]
    assert tok.decode(samples[0].response_tokens).endswith(inside["stop"][0])
    assert samples[0].reward is None


def test_an_interruption_leaves_no_request(tok):
    asked = iter([False, False, True])
    scheduler = Scheduler(tiny.engine())
    samples = prompts(20)
    stopped = rollout(tok, scheduler=scheduler, stopping=lambda: next(asked))
    with pytest.raises(Interrupted):
        stopped.collect(tiny.weights(), samples, SamplingParams(30), 0)
    assert scheduler.busy == 0 and scheduler.chunks == []
    again, fresh = prompts(20), prompts(20)
    rollout(tok, scheduler=scheduler).collect(tiny.weights(), again, SamplingParams(6), 0)
    rollout(tok).collect(tiny.weights(), fresh, SamplingParams(6), 0)
    assert again == fresh


def test_an_error_leaves_no_request(tok):
    scheduler = Scheduler(tiny.engine())

    def broken(sample):
        raise RuntimeError("the pool is closed")

    with pytest.raises(RuntimeError, match="closed"):
        rollout(tok, Pool(broken), scheduler).collect(tiny.weights(), prompts(20), SamplingParams(5), 0)
    assert scheduler.busy == 0
    with pytest.raises(ValueError, match="longer than the largest prompt bucket, 32"):
        rollout(tok, scheduler=scheduler).collect(
            tiny.weights(), [*prompts(2), Sample(uid=5, prompt_tokens=[9] * 40)], SamplingParams(5), 0)
    assert scheduler.busy == 0


# --- groups and labels -----------------------------------------------------------------------------------------------


def test_a_group_shares_nothing():
    prompt = Sample(prompt=[{"role": "user", "content": "x"}], label="4", metadata={"a": [1]}, prompt_tokens=[1, 2])
    group = make_group(prompt, 7, 3)
    assert [s.uid for s in group] == [21, 22, 23] and {s.group for s in group} == {7}
    for name in ("prompt", "metadata", "prompt_tokens", "response_tokens", "rewards"):
        assert len({id(getattr(s, name)) for s in group}) == 3 and getattr(group[0], name) == getattr(prompt, name)
    group[0].metadata["a"].append(2)
    assert prompt.metadata == group[1].metadata == {"a": [1]} and prompt.prompt_tokens == [1, 2]


def test_labels_become_responses(tok):
    samples = [Sample(uid=i, group=i, prompt="1+1=", label=label) for i, label in enumerate(["2", "", "42"])]
    from_labels(samples, tok)
    end = tok.hf.eos_token_id
    assert [s.response_tokens for s in samples] == [[*tok.encode(label), end] for label in ("2", "", "42")]
    for sample in samples:
        sample.check()
        assert sample.status == COMPLETED and set(sample.loss_mask) == {1} and sample.reward is None
    values = summarize(samples)
    assert "rollout_log_probs" not in values and "raw_reward" not in values and values["response_len/max"] == 3
    with pytest.raises(ValueError, match="supervised data needs text labels; the prompt '1.1=' has 2"):
        from_labels([Sample(prompt="1+1=", label=2)], tok)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_summarize():
    samples = scored([1.0, 0.0, None], response_tokens=[5, 6], rewards={"half": 0.5})
    samples += scored([1.0], group=1, response_tokens=[5], logprobs=[-9.0], loss_mask=[0], status=TRUNCATED)
    values = summarize(samples)
    assert values["raw_reward"] == pytest.approx(2 / 3), "a sample without a reward is left out"
    assert values["truncated_ratio"] == 0.25 and values["reward/half"] == 0.5
    assert [values[f"response_len/{k}"] for k in ("mean", "median", "max", "min")] == [1.75, 2.0, 2.0, 1.0]
    assert values["rollout_log_probs"] == -2.0, "masked tokens are left out"
    assert all(type(value) is float for value in values.values())


def test_summarize_without_rewards_or_samples():
    values = summarize(scored([None, None]))
    assert "raw_reward" not in values and not any(name.startswith(("passrate", "zero_std")) for name in values)
    assert values["rollout_log_probs"] == -2.0 and all(map(math.isfinite, values.values()))
    assert summarize([]) == {}


def test_groups_of_one_reward_are_counted():
    groups = [[0.0, -0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5], [None, 1.0, 1.0], [None, None], [0.25, 0.25]]
    values = summarize([s for i, rewards in enumerate(groups) for s in scored(rewards, group=i)])
    counts = {name: value for name, value in values.items() if name.startswith("zero_std")}
    assert counts == {"zero_std/count_0": 1.0, "zero_std/count_1": 2.0, "zero_std/count_0.25": 1.0}


@case("FCT-090", "FCT-091", "FCT-092", "FCT-093")
def test_pass_at_k_of_groups(row):
    args = row["input"]["args"]
    close(pass_at_k(**args), row)
    one = scored([1.0] * args["c"] + [0.0] * (args["n"] - args["c"]))
    close(summarize(one)[f"passrate/pass@{args['k']}"], row)


def test_pass_at_k_is_a_mean_over_groups_up_to_the_smallest():
    samples = scored([1.0, 0.0, 0.0, 0.0]) + scored([1.0, 2.0, 0.5, None], group=1) + scored([None], group=2)
    values = summarize(samples)
    rates = {name: value for name, value in values.items() if name.startswith("passrate")}
    assert rates == {"passrate/pass@1": pytest.approx((1 / 4 + 2 / 3) / 2), "passrate/pass@2": pytest.approx(0.75)}


@case("NUM-036")
def test_means_are_over_the_policys_own_tokens(row):
    args = row["input"]["args"]
    close(masked_mean(args["values"], args["mask"]), row)
    samples = scored([1.0], response_tokens=[5] * 2, logprobs=args["values"][0], loss_mask=args["mask"][0])
    close(summarize(samples)["rollout_log_probs"], row)


@case("NUM-034")
def test_rows_that_fill_a_shape_enter_no_mean(row):
    args = row["input"]["args"]
    per_row = [nll if tokens else math.nan for nll, tokens in zip(args["row_nll"], args["row_tokens"], strict=True)]
    close(math.exp(nan_mean(per_row)), row)


@pytest.mark.parametrize("tokens, expected", [
    ([7] * 12, True), ([7] * 11, False), ([1, 2, 3, 4] * 3, True), ([1, 2, 3, 4] * 2 + [1, 2, 3], False),
    ([9, 9] + [1, 2, 3, 4, 5] * 3, True), ([1, 2, 3, 4, 5] * 3 + [9], False), (list(range(32)) * 3, True),
    (list(range(33)) * 3, False), (list(range(100)), False), ([], False), ([5], False)])
def test_repeats(tokens, expected):
    assert repeats(tokens) is expected


# --- evaluation ------------------------------------------------------------------------------------------------------


def eval_set(tok, folder, name="sums", rows=5, n_samples=2, **knobs):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(rows)))
    source = PromptSource(str(path), tok, max_prompt_len=8, shuffle=False)
    return EvalSet(name, source, n_samples, SamplingParams(4, **knobs))


@case("DAT-004")
def test_the_mean_is_over_rows(row):
    """However the samples were batched, and with the last, smaller batch."""
    args = row["input"]["args"]
    assert sum(args["batch_sizes"]) == len(args["scores"])
    samples = [s for i, score in enumerate(args["scores"]) for s in scored([float(score)], group=i)]
    close(named_metrics("x", summarize(samples))["eval/x"], row)


def test_evaluation_is_the_same_every_time_and_names_its_metrics(tok, tmp_path):
    pool, sets = Pool(), [eval_set(tok, tmp_path), eval_set(tok, tmp_path, "more", 13, 1, temperature=0.0)]
    running = rollout(tok, pool)
    one = evaluate(running, tiny.weights(), sets, 0)
    first = list(pool.seen)
    sets[0].source.take(3)  # wherever the source stands
    assert evaluate(running, tiny.weights(), sets, 0) == one
    assert pool.seen == first * 2 and len(first) == 23 and min(first) >= 1 << 31 and max(first) < 1 << 32
    assert {"eval/sums", "eval/sums-truncated_ratio", "eval/sums-pass@1", "eval/sums-pass@2", "eval/more",
            "eval/sums/response_len/mean", "eval/sums/raw_reward", "eval/more-pass@1"} <= set(one)
    assert "eval/more-pass@2" not in one and one["eval/sums"] == one["eval/sums/raw_reward"]


def test_evaluation_without_any_reward_has_no_mean(tok, tmp_path):
    values = evaluate(rollout(tok, Pool(lambda sample: None)), tiny.weights(), [eval_set(tok, tmp_path)], 0)
    assert "eval/sums" not in values and "eval/sums-truncated_ratio" in values


def test_evaluation_does_not_disturb_training(tok, tmp_path):
    plain, between = rollout(tok), rollout(tok)
    one, other = [prompts(9), prompts(9, start=9)], [prompts(9), prompts(9, start=9)]
    for samples in one:
        plain.collect(tiny.weights(), samples, SamplingParams(8), 0)
    for samples in other:
        evaluate(between, tiny.weights(), [eval_set(tok, tmp_path, top_k=3)], 0)
        between.collect(tiny.weights(), samples, SamplingParams(8), 0)
    assert one == other
    assert all(sample.status != PENDING for samples in one for sample in samples)


def test_the_benchmark_of_the_host_runs():
    path = pathlib.Path(__file__).parent / "benchmarks" / "rollout.py"
    done = subprocess.run([sys.executable, path, "--samples", "128", "--slots", "16"], capture_output=True, text=True,
                          cwd=path.parents[2], check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("128 samples, ") and "slot utilisation: " in done.stdout
