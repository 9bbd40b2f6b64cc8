"""Evaluation alone and with knobs of each set; per-sample files; the majority vote."""

from __future__ import annotations

import json

import pytest
import run_helpers as runs

from rljax import evaluate, evaluation, harvest
from rljax.sample import Sample


def answered(*pairs, group=0):
    return [Sample(uid=i, group=group, text=text, reward=reward) for i, (text, reward) in enumerate(pairs)]


def test_majority():
    one = answered(("\\boxed{4}", 1.0), ("The answer is 4", 1.0), ("5", 0.0))
    two = answered(("7", 0.0), ("7", 0.0), ("8", 1.0), group=1)
    tie = answered(("yes", 0.0), ("no", 1.0), group=2)
    assert [evaluation.majority(group) for group in (one, two, tie)] == [1, 0, 0]
    assert evaluation.majority([*one, *two]) == 0.5
    assert evaluation.majority(answered(("a", None))) is None and evaluation.majority([]) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with two sets, one of them with knobs of its own."""
    folder = runs.workspace(tmp_path_factory.mktemp("evaluate"))
    done = runs.launch(folder, "log.dir=run", "rollout.num_rollouts=2", f"eval.overrides={OVERRIDES}",
                       f"eval.data={SETS}")
    assert done.returncode == 0, done.stderr
    return folder


SETS = "plain=builtin:sums/heldout.jsonl@[0:4],own=builtin:sums/heldout.jsonl@[4:7]"
OVERRIDES = '{"own": {"n_samples": 4, "temperature": 0.5, "max_response_len": 3, "reward": "random"}}'


def test_sets_with_knobs_of_their_own(trained):
    plain, own = (harvest.load(trained / "run" / "eval" / f"{name}-000002.jsonl", 98) for name in ("plain", "own"))
    assert (len(plain), len(own)) == (4, 12) and max(len(sample.response_tokens) for sample in own) == 3
    assert {sample.reward for sample in own} <= {0.0, 1.0} and own[0].metadata["rm_type"] == "random"
    last = [row for row in runs.metrics(trained / "run") if "eval/step" in row][-1]
    assert {"eval/own-maj@4", "eval/own-pass@4", "eval/plain-pass@1"} <= last.keys() and "eval/plain-maj@1" not in last


def test_alone_it_gives_what_the_run_recorded(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.syspath_prepend(str(trained))
    knobs = ["--config", "small.py", f"--config.eval.data={SETS}", f"--config.eval.overrides={OVERRIDES}",
             "--config.mesh.data=8", "--config.mesh.fsdp=1", "--config.sampler.slots=16"]
    assert evaluate.main([*knobs, "--checkpoint", "run", "--out", str(tmp_path)]) == 0
    values = json.loads(capsys.readouterr().out)
    recorded = [row for row in runs.metrics(trained / "run") if "eval/step" in row][-1]
    assert values.keys() == recorded.keys() - {"eval/step"}
    # The run was on one device; on eight, a draw may flip.
    assert values["eval/own-truncated_ratio"] == pytest.approx(recorded["eval/own-truncated_ratio"], abs=0.5)
    assert json.loads((tmp_path / "metrics-000002.json").read_text()) == values
    assert len(harvest.load(tmp_path / "own-000002.jsonl", 98)) == 12
    mesh = ["--config.mesh.data=8", "--config.mesh.fsdp=1", "--config.sampler.slots=16"]
    assert evaluate.main(["--checkpoint", "run/checkpoints/2", *mesh]) == 0  # the run's own config
    assert json.loads(capsys.readouterr().out) == values


@pytest.mark.parametrize(("arguments", "words"), [
    (["--checkpoint", "nowhere"], "no whole checkpoint"), (["--chekpoint", "x"], "unknown arguments"),
    (["--out"], "unknown arguments"), (["--config.eval.data="], "eval.data names 0 sets"),
])  # fmt: skip
def test_bad_arguments(trained, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(trained)
    assert evaluate.main(["--config", "small.py", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error:") and words in err and err.count("error:") == 1
