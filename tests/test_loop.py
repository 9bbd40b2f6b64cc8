"""Real runs in processes of their own: exact resume, interruptions, and what is skipped or stopped."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time

import jax
import pytest
import run_helpers as runs

from rljax import assemble, checkpoint, launch, loop, models
from rljax import config as configs

BEGUN = "after 0 rollouts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return runs.workspace(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def whole(folder):
    """The uninterrupted run, and the seconds between its first line and its end."""
    process = runs.start(folder, "log.dir=whole")
    assert BEGUN in process.stdout.readline()
    begun = time.monotonic()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder / "whole", time.monotonic() - begun


def interrupt(folder, name, number, wait):
    """Start a run, send it a signal once `wait(run)` is True, or where it ends first; its exit status and stderr."""
    process = runs.start(folder, f"log.dir={name}")
    while process.poll() is None and not wait(folder / name):
        time.sleep(0.0005)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def after(seconds):
    """True `seconds` after the first row of metrics, or after a resumed run has cut them back."""
    sizes, begun = [], []

    def wait(run):
        file = run / "metrics.jsonl"
        sizes.append(file.stat().st_size if file.exists() else 0)
        if not begun and sizes[-1] != sizes[0]:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] >= seconds

    return wait


def being_saved(run):
    """True while a checkpoint is being written."""
    return any(checkpoint.UNFINISHED in path.name for path in (run / "checkpoints").glob("*"))


def test_uninterrupted(whole):
    run, _ = whole
    rows = runs.metrics(run)
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(1, 13))  # two in each rollout
    assert [row["rollout/step"] for row in rows if "rollout/step" in row] == list(range(6))
    assert [row["eval/step"] for row in rows if "eval/step" in row] == [0, 2, 4, 6]  # rollouts, not micro-batches
    assert len({row["train/grad_norm"] for row in rows if "train/step" in row}) == 12
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "6"]
    state = runs.saved_state(run)
    assert state["['policy']['step']"] == 12
    assert checkpoint.read_host(run / "checkpoints" / "6")["prompts"]["groups"] == 24
    perf = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    compiled = [row["perf/compiles"] for row in perf if "perf/compiles" in row]
    assert len(set(compiled[1:])) == 1  # nothing is compiled after the first rollout
    assert all(row["perf/tflops_per_device"] > 0 for row in perf if "rollout/step" in row)


def test_interrupted_in_every_way_and_resumed(folder, whole):
    """Killed before the first checkpoint, stopped at a random moment, killed while a checkpoint is being written."""
    run, seconds = whole
    name = "interrupted"
    status, err = interrupt(folder, name, signal.SIGKILL, after(0.02))
    assert status == -signal.SIGKILL, err
    assert checkpoint.newest(folder / name) is None
    moment = random.uniform(0, 0.5 * seconds)
    status, err = interrupt(folder, name, signal.SIGTERM, after(moment))
    assert status == 0, (moment, err)
    assert "Traceback" not in err
    status, err = interrupt(folder, name, signal.SIGKILL, being_saved)
    assert status in (-signal.SIGKILL, 0), (moment, err)
    again = runs.launch(folder, f"log.dir={name}")
    assert again.returncode == 0, (moment, again.stderr)
    runs.assert_equal_runs(run, folder / name)
    assert all(path.name.isdigit() for path in (folder / name / "checkpoints").iterdir())


@pytest.fixture
def in_process(folder, monkeypatch):
    """Run two rollouts with an evaluation and an export after each, in this process; True if they were finished.

    `stop(progress)` is asked while slots are busy; once True, the run is asked to stop.
    """
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    knobs = ["rollout.num_rollouts=2", "eval.interval=1", "checkpoint.save_hf_interval=2", "checkpoint.save_interval=5",
             "model.init=load", "model.path=weights"]

    def call(name, stop=lambda progress: False):
        config = configs.load("small.py", [*knobs, f"log.dir={name}"])
        training, asked = None, False

        def stopping():
            nonlocal asked
            asked = asked or (training.parts.scheduler.busy > 0 and stop(training.progress))
            return asked

        start = assemble.starting_checkpoint(config, folder / name)
        parts = assemble.build(config)
        with assemble.reward_pool(config) as pool:
            training = loop.Loop(config, folder / name, parts, pool, stopping, start)
            training.run()
        return training.finished

    return call


def test_stopped_at_every_stage(folder, in_process, caplog):
    """In the evaluation before training, in a rollout, in the last evaluation; then a finished run does nothing."""
    cfg = models.load_config(str(folder / "model"))
    models.save(folder / "weights", cfg, models.init(cfg, jax.random.key(3)), tokenizer_from=folder / "model")
    assert in_process("unstopped")
    assert not in_process("stages", lambda p: p.rollouts == 0 and p.evaluated == -1)
    assert checkpoint.newest(folder / "stages").name == "0"
    assert not in_process("stages", lambda p: p.rollouts == 1 and p.evaluated == 1)
    assert checkpoint.newest(folder / "stages").name == "1"
    assert in_process("stages", lambda p: p.rollouts == 2)
    assert not (folder / "stages" / "hf").exists()
    assert checkpoint.read_host(folder / "stages" / "checkpoints" / "2")["evaluated"] == 1
    caplog.clear()
    assert in_process("stages")
    runs.assert_equal_runs(folder / "unstopped", folder / "stages")
    weights = [folder / name / "hf" / "2" / "model.safetensors" for name in ("unstopped", "stages")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    host = checkpoint.read_host(folder / "stages" / "checkpoints" / "2")
    assert (host["evaluated"], host["exported"]) == (2, 2)
    before = weights[1].stat().st_mtime_ns, (folder / "stages" / "metrics.jsonl").stat().st_size
    assert in_process("stages")
    assert before == (weights[1].stat().st_mtime_ns, (folder / "stages" / "metrics.jsonl").stat().st_size)


def test_a_reward_that_never_works_ends_the_run(folder):
    done = runs.launch(folder, "log.dir=never", "reward.type=plugin:never", "eval.before_train=false")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: reward.type = plugin:never: all 16 rewards of the first rollout failed" in done.stderr
    assert "NameError" in done.stderr.splitlines()[-1]


def test_a_broken_estimator(folder, monkeypatch, capsys):
    """What the package finds wrong with its result is one line; what it raises itself keeps its stack."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    arguments = ["--config=small.py", "--config.eval.before_train=false"]
    assert launch.main([*arguments, "--config.log.dir=own", "--config.algo.advantage_estimator=plugin:too_short"]) == 1
    err = capsys.readouterr().err
    assert "error: algo.advantage_estimator returned shape (1,) for sample" in err and "Traceback" not in err
    with pytest.raises(ValueError, match="of my own"):
        launch.main([*arguments, "--config.log.dir=own2", "--config.algo.advantage_estimator=plugin:broken"])


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
def test_killed_at_random_moments(folder, whole, attempt):
    run, seconds = whole
    name = f"random{attempt}"
    moments = [random.uniform(0, seconds) for _ in range(2)]
    for moment, number in zip(moments, random.choices([signal.SIGKILL, signal.SIGTERM], k=2)):
        interrupt(folder, name, number, after(moment))
    again = runs.launch(folder, f"log.dir={name}")
    assert again.returncode == 0, (moments, again.stderr)
    runs.assert_equal_runs(run, folder / name)


def test_second_interrupt_ends_at_once(folder):
    process = runs.start(folder, "log.dir=hurry", "reward.type=plugin:slow", "eval.before_train=false")
    while not (folder / "scoring").exists():
        time.sleep(0.01)
    time.sleep(1.5)  # the last responses are drawn; 16 rewards of 5 s are being waited for
    tasks = f"/proc/{process.pid}/task"
    children = [pid for task in os.listdir(tasks) for pid in open(f"{tasks}/{task}/children").read().split()]
    assert children
    process.send_signal(signal.SIGINT)
    assert "asked to stop" in "".join(process.stderr.readline() for _ in range(2))  # the first is blank
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "error: ended at once, without saving"
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while any(map(_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_finished_run_does_nothing(folder, whole, capsys, monkeypatch):
    run, _ = whole
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    again = runs.launch(folder, "log.dir=whole")
    assert again.returncode == 0, again.stderr
    assert "all 6 rollouts are done already" in again.stderr

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    arguments = ["--config=small.py", "--config.log.dir=whole", "--config.rollout.num_rollouts=7"]
    assert launch.main([*arguments, "--config.algo.eps_clip=0.3", "--config.optim.lr=1e-3"]) == 2
    error = capsys.readouterr().err
    assert "algo.eps_clip: 0.2 in the run, 0.3 now" in error
    assert "num_rollouts:" not in error and "optim.lr:" not in error
    assert launch.main([*arguments, "--config.checkpoint.load=none"]) == 2
    assert "checkpoint.load = none" in capsys.readouterr().err
    assert {name: (run / name).read_bytes() for name in before} == before


def test_longer_run_from_an_old_checkpoint(folder, whole):
    run, _ = whole
    longer = runs.launch(folder, "log.dir=longer", f"checkpoint.load={run}", "rollout.num_rollouts=7", "optim.lr=1e-3")
    assert longer.returncode == 0, longer.stderr
    rows = runs.metrics(folder / "longer")
    assert [row["rollout/step"] for row in rows if "rollout/step" in row] == [6]
    assert [row["train/lr"] for row in rows if "train/step" in row] == pytest.approx([1e-3] * 2)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"4", "6"}  # the old run is left as it was


def test_rewards_that_are_missing(folder):
    done = runs.launch(folder, "log.dir=missing", "reward.type=plugin:nothing_at_first", "rollout.num_rollouts=2",
                       "eval.interval=0", "eval.data=", "log.tensorboard=False")
    assert done.returncode == 0, done.stderr
    assert "rollout 1: none of its 16 samples has a reward" in done.stderr
    rows = runs.metrics(folder / "missing")
    assert [row["train/step"] for row in rows if "train/step" in row] == [1, 2]  # 12 or 13 samples by 8
    assert "rollout/raw_reward" not in rows[0]


def test_gradients_that_are_not_finite(folder):
    done = runs.launch(folder, "log.dir=broken", "optim.lr=1e30", "optim.max_nonfinite=3", "checkpoint.save_interval=1")
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "3 updates of the policy in a row" in errors[0]
    assert "optim.max_nonfinite 3" in errors[0]
    assert "Traceback" not in done.stderr
    skips = [row["train/nonfinite_skips"] for row in runs.metrics(folder / "broken") if "train/step" in row]
    assert skips[-3:] == [1, 2, 3]


def test_full_disk(folder, tmp_path):
    """A file system of 500 kB holds one checkpoint of about 150 kB and what writing it needs besides, not all of them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs more rights")
    arguments = (f"checkpoint.dir={disk}", "checkpoint.save_interval=1", "checkpoint.keep=9")
    try:
        done = runs.launch(folder, "log.dir=full", *arguments)
        assert done.returncode == 1, done.stderr
        # The writers of tensorstore that are still at work may add stacks of their own.
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        assert f"saving a checkpoint in {disk} failed: No space left on device" in errors[0]
        newest = int(re.search(rf"the newest whole one is {disk}/(\d+)", errors[0])[1])
        assert len([row for row in runs.metrics(folder / "full") if "rollout/step" in row]) > newest
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        done = runs.launch(folder, "log.dir=full", *arguments)
        assert done.returncode == 0, done.stderr
        assert f"going on after {newest} rollouts from {disk / str(newest)}" in done.stderr
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
