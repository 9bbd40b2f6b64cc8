"""Whole runs with partial rollouts, filters and replays: resumed and replayed ones equal the first bit for bit."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading

import jax
import pytest
import run_helpers as runs

from rljax import assemble, checkpoint, harvest, loop, models
from rljax import config as configs
from rljax.sample import Sample

VARIED = """
import time

def odd(group):
    return sum(len(s.response_tokens) for s in group) % 3 > 0

def faulty(sample):
    if sample.uid % 61 == 3:
        time.sleep(60)
    if sample.uid % 7 == 1:
        raise KeyError(sample.uid)
    return None if sample.uid % 11 == 2 else (sum(sample.response_tokens) % 5) / 4

def even(group):
    return len(group[0].response_tokens) % 2 == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = runs.workspace(tmp_path_factory.mktemp("harvest"))
    cfg = models.load_config(str(folder / "model"))
    models.save(folder / "weights", cfg, models.init(cfg, jax.random.key(3)), tokenizer_from=folder / "model")
    (folder / "choosers.py").write_text(VARIED, encoding="utf-8")
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """`run(name, *knobs, rollouts=4)`: in this process; the run's directory, and the loop."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    small = ["rollout.num_rollouts=4", "rollout.max_response_len=8", "eval.interval=0", "model.init=load",
             "model.path=weights", "sampler.slots=6", "train.global_batch_size=0", "checkpoint.save_interval=1"]

    def call(name, *knobs, stop_after=None):
        config = configs.load("small.py", [*small, f"log.dir={name}", *knobs])
        configs.validate(config, 1)
        start = assemble.starting_checkpoint(config, folder / name)
        parts = assemble.build(config)
        with assemble.reward_pool(config) as pool:
            made = loop.Loop(config, folder / name, parts, pool, lambda: False, start)
            made.parts.num_rollouts = stop_after or made.parts.num_rollouts
            made.run()
        return folder / name, made

    return call


PARTIAL = ("rollout.partial=true", "rollout.over_sampling_batch_size=7", "rollout.dynamic_filter=choosers:odd",
           "rollout.mask_offpolicy_in_partial=true", "rollout.max_version_lag=2")


def test_partial_rollouts_with_a_filter_resume_bit_for_bit(run):
    whole, made = run("whole", *PARTIAL)
    run("cut", *PARTIAL, stop_after=2)
    cut, _ = run("cut", *PARTIAL)
    rows, again = ([r for r in runs.metrics(one) if "rollout/step" in r] for one in (whole, cut))
    assert rows == again and len(rows) == 4
    left, right = runs.saved_state(whole), runs.saved_state(cut)
    assert all(values.tobytes() == right[name].tobytes() for name, values in left.items())
    assert any(row["rollout/dynamic_filter/drop_choosers:odd"] for row in rows
               if "rollout/dynamic_filter/drop_choosers:odd" in row)
    assert any(row["rollout/offpolicy_tokens_frac"] > 0 for row in rows[1:])
    assert max(row["rollout/max_version_lag"] for row in rows) in (1, 2)
    host = checkpoint.read_host(checkpoint.newest(whole))
    assert host["prompts"]["waiting"] and made.prompts.state() == host["prompts"]
    assert rows[-1]["rollout/buffered_groups"] == len(host["prompts"]["waiting"])


def test_without_partial_what_is_left_is_drawn_again_under_the_same_uid(run):
    directory, made = run("fresh", "rollout.over_sampling_batch_size=7", "log.samples=100")
    records = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    uids = [record["uid"] for record in records]
    assert len(set(uids)) == len(uids) == 4 * 16
    waiting = [sample for group in made.prompts.waiting for sample in group]
    assert waiting and not any(sample.response_tokens for sample in waiting)
    assert {sample.uid for sample in waiting} | set(uids) == set(range(made.prompts.groups * 4))


def test_a_saved_rollout_gives_the_same_update(run, folder):
    first, _ = run("first", "debug.save_rollouts=saved", "rollout.sample_filter=choosers:even")
    second, _ = run("second", "debug.load_rollouts=saved", "debug.train_only=true")
    left, right = runs.saved_state(first), runs.saved_state(second)
    assert all(values.tobytes() == right[name].tobytes() for name, values in left.items())
    trained = [[row for row in runs.metrics(one) if "train/step" in row] for one in (first, second)]
    assert trained[0] == trained[1] != []
    assert any(row.get("rollout/sample_filter/dropped") for row in runs.metrics(first))
    drawn, _ = run("drawn", "debug.rollout_only=true", "debug.save_rollouts=drawn-only")
    rows = runs.metrics(drawn)
    assert len([row for row in rows if "rollout/step" in row]) == 4 and not any("train/step" in row for row in rows)
    one, other = (folder / name / "rollout-000000.jsonl" for name in ("saved", "drawn-only"))
    tokens = [[json.loads(line)["response_tokens"] for line in file.read_text().splitlines()] for file in (one, other)]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_faults_over_two_hundred_rollouts(run, folder, monkeypatch):
    """Workers are killed, rewards hang, raise and return nothing, groups are interrupted: every prompt is accounted
    for exactly once, nothing leaks, and the run equals its own replay."""
    draw, kills, marks = random.Random(5), [0], []
    loop_start = harvest.Harvest.next

    def beset(self, params, number):
        workers = [one for one in self.rollout.pool._workers if one.ready]
        if workers and draw.random() < 0.3:
            os.kill(draw.choice(workers).process.pid, signal.SIGKILL)
            kills[0] += 1
        found = loop_start(self, params, number)
        scheduler = self.rollout.scheduler
        assert not scheduler.busy and not any(scheduler.slots)
        marks.append((len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                      threading.active_count(), len(self.rollout.pool._workers)))
        return found

    monkeypatch.setattr(harvest.Harvest, "next", beset)
    knobs = (*PARTIAL, "rollout.num_rollouts=200", "checkpoint.save_interval=0", "log.samples=0", "reward.workers=2",
             "log.interval=1000")
    first, made = run("beset", *knobs, "debug.save_rollouts=beset-saved", "reward.type=choosers:faulty",
                      "reward.timeout_s=0.3")
    monkeypatch.setattr(harvest.Harvest, "next", loop_start)
    uids = [json.loads(line)["uid"] for file in sorted((folder / "beset-saved").iterdir())
            for line in file.read_text().splitlines()]
    waiting = [sample.uid for group in made.prompts.waiting for sample in group]
    drops = sum(row.get("rollout/dynamic_filter/drop_choosers:odd", 0) for row in runs.metrics(first))
    assert len(set(uids + waiting)) == len(uids + waiting)
    assert len(uids + waiting) + 4 * drops == 4 * made.prompts.groups
    assert kills[0] > 30 and made.pool.errors > 50 and made.pool.timeouts > 10
    early, late = marks[20], marks[-1]
    assert late[0] <= early[0] + 4 and late[2] <= early[2] and late[3] <= 2
    assert late[1] < early[1] * 1.15  # the high-water mark of memory
    second, _ = run("beset-again", *knobs, "debug.load_rollouts=beset-saved", "debug.train_only=true")
    trained = [[row for row in runs.metrics(one) if "train/step" in row] for one in (first, second)]
    assert trained[0] == trained[1] and len(trained[0]) > 150


def test_too_few_that_pass_are_trained_and_said(run, caplog):
    run("few", "rollout.dynamic_filter=not_all_right", "rollout.max_filter_rounds=1", "rollout.num_rollouts=1",
        "reward.type=plugin:reward")
    assert "groups passed" not in caplog.text  # all rewards are below 1
    run("none", "rollout.dynamic_filter=not_all_wrong", "rollout.max_filter_rounds=2", "rollout.num_rollouts=1")
    assert "only 0 of 4 groups passed rollout.dynamic_filter = not_all_wrong after 8 were tried" in caplog.text


def test_files_that_are_none(run, folder):
    with pytest.raises(ValueError, match="'nowhere': 4 of the run's 4 rollouts have no file there, the first"):
        run("bad", "debug.load_rollouts=nowhere", "debug.train_only=true")
    file = folder / "broken" / "rollout-000003.jsonl"
    harvest.save(file, [Sample(uid=1, group=0, prompt="é\u2028\ud83d", prompt_tokens=[3])])
    assert harvest.load(file, 98) == [Sample(uid=1, group=0, prompt="é\u2028\ud83d", prompt_tokens=[3])]
    for line, named in (("{", "line 2"), ('{"uid": 1, "colour": 2}', "colour"), ("[]", "expected an object"),
                        ('{"uid": 1, "group": 0, "response_tokens": [1]}', "logprobs has 0 entries"),
                        ('{"uid": 1, "group": 0}', "prompt_tokens is empty"),
                        ('{"uid": 1, "group": 0, "prompt_tokens": [98]}', "has 98, and the model has 98"),
                        ('{"uid": 1, "group": 0, "prompt_tokens": [9], "reward": "1"}', "reward is '1'")):
        file.write_text(file.read_text(encoding="utf-8").split("\n")[0] + f"\n{line}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=named) as error:
            harvest.load(file, 98)
        assert str(file) in str(error.value)
    with pytest.raises(FileNotFoundError):
        harvest.load(folder / "broken" / "rollout-000004.jsonl", 98)
