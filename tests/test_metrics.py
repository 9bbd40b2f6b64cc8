"""The record: registry, files and their cutting back, TensorBoard, console, statistics, curves and the report."""

from __future__ import annotations

import json
import math
import struct
import sys
import types

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event

from rljax import metric_names, metrics, plots, report
from shared_data import cases

WRITTEN = """
rollout/response_len/mean rollout/response_len/median rollout/response_len/max rollout/response_len/min
rollout/truncated_ratio rollout/repetition_frac rollout/zero_std/count_0.0 rollout/zero_std/count_1 rollout/raw_reward
rollout/rewards rollout/reward/format rollout/log_probs rollout/ref_log_probs rollout/rollout_log_probs rollout/kl
rollout/entropy rollout/advantages rollout/passrate/pass@1 rollout/passrate/pass@16 rollout/reward_errors
rollout/reward_timeouts eval/sums eval/sums-truncated_ratio eval/sums-pass@4 eval/sums/response_len/mean
eval/aime-2024/passrate/pass@2 train/loss train/pg_loss train/kl_loss train/entropy_loss train/pg_clipfrac train/ppo_kl
train/train_rollout_logprob_abs_diff train/train_rollout_logprob_abs_diff_max train/grad_norm train/lr
train/nonfinite_skips perf/rollout_time perf/reward_wait_time perf/score_time perf/train_time perf/sync_time
perf/save_time perf/step_time perf/rollout_tokens_per_device_per_sec perf/rollout_effective_tokens_per_device_per_sec
perf/train_tokens_per_device_per_sec perf/train_effective_tokens_per_device_per_sec perf/slot_utilization
perf/sync_bytes perf/preempted
perf/prefix_shared_tokens perf/packing_efficiency perf/tflops_per_device perf/mfu perf/compiles perf/device_memory_peak
eval/sums-maj@4 eval/sums/passrate/maj@4 rollout/dynamic_filter/drop_reward_std rollout/sample_filter/dropped
rollout/buffer_filter/dropped rollout/buffered_groups rollout/restarted_samples rollout/offpolicy_tokens_frac
rollout/max_version_lag train/missing_rollout_logprobs rollout/teacher_log_probs rollout/values
rollout/returns rollout/extra/turns
rollout/dcpo/confidence rollout/dcpo/calibration_error rollout/dcpo/brier rollout/dcpo/ece
rollout/dcpo/missing_confidence train/tis train/tis_clipfrac train/tis_abs train/opsm_clipfrac train/extra/entropy_gap
train/value_loss train/value_clipfrac train/critic_grad_norm train/critic_lr train/critic_nonfinite_skips
train/explained_variance
eval/sums/dcpo/ece
""".split()


def recorder(run_dir, **options):
    return metrics.Recorder(run_dir, **{"tensorboard": False, "total": 4, **options})


def lines(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def events(folder):
    """Events of a folder's files in order of writing."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (size,) = struct.unpack("<Q", data[start : start + 8])
            found.append(Event.FromString(data[start + 12 : start + 12 + size]))
            start += 16 + size
    return found


# Registry


@pytest.mark.parametrize("name", WRITTEN)
def test_written_metrics_are_explained(name):
    text = metrics.explain(name)
    meaning, healthy = text.split("\n")
    assert meaning.startswith(f"{name}: ") and len(meaning) > len(name) + 10
    assert healthy.startswith("healthy: ") and len(healthy) > len("healthy: ")
    axis = "rollout" if name.startswith("perf/") else name.partition("/")[0]
    metric_names.check(axis, [name])


def test_the_registry_holds_nothing_else():
    assert {metric_names.find(name) for name in WRITTEN} == set(metrics.METRICS)


def test_the_most_special_entry_explains():
    assert "at least one of k" in metrics.explain("eval/sums-pass@4")
    assert metric_names.find("eval/sums/response_len/mean") == "rollout/response_len/mean"


@pytest.mark.parametrize("name, near", [
    ("train/pg_clip_frac", "train/pg_clipfrac"), ("rollout/raw_rewards", "rollout/raw_reward"),
    ("eval/sums/nonsense", ""), ("nonsense", ""), ("rollout/reward/", "rollout/reward"), ("", ""),
])  # fmt: skip
def test_unknown_metrics_name_the_nearest(name, near):
    with pytest.raises(ValueError, match="unknown metric") as caught:
        metrics.explain(name)
    assert repr(name) in str(caught.value) and near in str(caught.value)


# Files


def test_rows_are_json_with_their_step(tmp_path):
    with recorder(tmp_path / "run") as record:
        record.log("rollout", 0, {"rollout/raw_reward": 0.1 + 0.2, "perf/step_time": 1})
        record.log("train", 1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": jnp.float32(0.5)})
        record.log("eval", 1, {"eval/sums": 0.5})
    assert lines(tmp_path / "run" / "metrics.jsonl") == [
        {"rollout/step": 0, "rollout/raw_reward": 0.1 + 0.2, "perf/step_time": 1.0},
        {"train/step": 1, "train/loss": None, "train/grad_norm": None, "train/lr": 0.5},
        {"eval/step": 1, "eval/sums": 0.5},
    ]


@pytest.mark.parametrize("axis, name", [
    ("train", "train/new_thing"), ("train", "rollout/raw_reward"), ("rollout", "train/loss"), ("eval", "perf/mfu"),
])  # fmt: skip
def test_unregistered_names_are_refused(tmp_path, axis, name):
    with recorder(tmp_path) as record, pytest.raises(ValueError, match=name):
        record.log(axis, 0, {name: 1.0})


def test_samples_of_any_text(tmp_path):
    row = {"text": "a\u2028b\nc\ud800é", "reward": math.nan, "logprobs": [-0.5, -math.inf], "label": {"a": None}}
    with recorder(tmp_path) as record:
        record.samples(3, [row, {"text": "second", "reward": jnp.float32(0.5).item(), "other": {1}}])
    first, second = lines(tmp_path / "samples.jsonl")
    assert first == {"rollout/step": 3, **row, "reward": None, "logprobs": [-0.5, None]}
    assert second["other"] == "{1}" and second["reward"] == 0.5


def test_resume_cuts_back(tmp_path):
    with recorder(tmp_path) as record:
        record.log("rollout", 0, {"rollout/raw_reward": 0.25})
        record.samples(0, [{"text": "a"}])
        position = json.loads(json.dumps(record.position()))
        kept = [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")]
        record.log("rollout", 1, {"rollout/raw_reward": 0.5})
        record.samples(1, [{"text": "b"}])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"rollout/st')  # killed in the middle of a row
    with recorder(tmp_path, resume=position) as record:
        assert [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")] == kept
        record.log("rollout", 1, {"rollout/raw_reward": 0.75})
        assert record.position()["steps"] == {"rollout": 1, "train": -1, "eval": -1}
    assert [row["rollout/raw_reward"] for row in lines(tmp_path / "metrics.jsonl")] == [0.25, 0.75]
    with recorder(tmp_path):  # no checkpoint: the run begins anew
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_rows_can_be_read_while_the_run_goes_on(tmp_path):
    with recorder(tmp_path) as record:
        record.log("rollout", 0, {"rollout/raw_reward": 0.25})
        assert len(lines(tmp_path / "metrics.jsonl")) == 1
        assert record.position()["metrics"] == (tmp_path / "metrics.jsonl").stat().st_size > 0


def test_files_shorter_than_the_checkpoint_are_not_padded(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"rollout/step": 0}\n')
    with recorder(tmp_path, resume={"metrics": 500, "samples": 0, "steps": {"rollout": 9}}):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"rollout/step": 0}\n'
    assert "20 bytes" in caplog.text and "500" in caplog.text


def test_what_is_switched_off_is_not_written(tmp_path):
    with recorder(tmp_path / "a", jsonl=False) as record:
        record.log("rollout", 0, {"rollout/raw_reward": 0.25})
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["samples.jsonl"]
    with recorder(None, tensorboard=True) as record:  # another process of the run
        record.log("rollout", 0, {"rollout/raw_reward": 0.25})
        record.samples(0, [{"text": "a"}])
        assert record.position()["steps"]["rollout"] == -1


def test_tensorboard_is_purged_from_the_checkpoint_on(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with recorder(tmp_path, tensorboard=True) as record:
        record.log("rollout", 0, {"rollout/raw_reward": 0.25, "rollout/kl": math.nan})
        record.log("train", 0, {"train/loss": 1.0})
        record.log("train", 1, {"train/loss": 2.0})
        position = record.position()
        record.log("train", 2, {"train/loss": 3.0})
    with recorder(tmp_path, tensorboard=True, resume=position) as record:
        record.log("train", 2, {"train/loss": 4.0})
    found = events(tmp_path / "tensorboard" / "train")
    starts = [event.step for event in found if event.WhichOneof("what") == "session_log"]
    assert starts == [0, 2]
    values = [(event.step, v.tag, v.simple_value) for event in found for v in event.summary.value]
    assert values == [(0, "train/loss", 1.0), (1, "train/loss", 2.0), (2, "train/loss", 3.0), (2, "train/loss", 4.0)]
    tags = [v.tag for event in events(tmp_path / "tensorboard" / "rollout") for v in event.summary.value]
    assert tags == ["rollout/raw_reward"]


def test_tensorboard_dir_is_honoured(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    with recorder(tmp_path / "run", tensorboard=True, project="p", experiment="e") as record:
        record.log("eval", 0, {"eval/sums": 1.0})
    assert events(tmp_path / "tb" / "p" / "e" / "eval")[-1].summary.value[0].simple_value == 1.0
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_wandb(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        id="abc", define_metric=lambda name, step_metric: calls.append((name, step_metric)), log=calls.append,
        finish=lambda: calls.append("finish"),
    )  # fmt: skip
    module = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with recorder(tmp_path, wandb=True, project="p", experiment="e", resume={"wandb": "old"}) as record:
        record.log("train", 2, {"train/loss": 3.0})
        assert record.position()["wandb"] == "abc"
    assert calls[0] == {"project": "p", "name": "e", "dir": str(tmp_path), "id": "old", "resume": "allow"}
    assert ("perf/*", "rollout/step") in calls and ("train/*", "train/step") in calls
    assert calls[-2:] == [{"train/step": 2, "train/loss": 3.0}, "finish"]


# Console, timers, late fetching


def test_one_line_per_rollout_where_there_is_no_terminal(tmp_path, capsys):
    with recorder(tmp_path, interval=2, total=5) as record:
        for step in range(5):
            record.log("rollout", step, {"rollout/raw_reward": 0.25, "rollout/response_len/mean": 7.0,
                                         "perf/rollout_tokens_per_device_per_sec": 1234.4})  # fmt: skip
        record.log("eval", 5, {"eval/sums": 0.5, "eval/sums/truncated_ratio": 0.125})
    shown = capsys.readouterr().out.split("\n")
    assert [line.split()[1] for line in shown[:3]] == ["2/5", "4/5", "5/5"]
    assert all(part in shown[0] for part in ("reward 0.250", "length 7.0", "1234 tok/s", "eta 0:00:0"))
    assert shown[3] == "after 5 rollouts: eval/sums 0.500"


def test_a_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    with recorder(tmp_path, resume={"steps": {"rollout": 1}}) as record:
        record.log("rollout", 2, {"rollout/raw_reward": 0.25})
        record.log("eval", 3, {"eval/sums": 0.5})
    shown = capsys.readouterr().out
    assert "3/4" in shown and "reward 0.250" in shown and "eval/sums 0.500" in shown


def test_the_closing_table():
    text = metrics.summary([("reward", "0.3", "0.9"), ("samples", "here", "")])
    assert text == "reward   0.3   0.9\nsamples  here"


def test_timers_add_up_and_start_over(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    timers = metrics.Timers()
    with timers("train_time"):
        pass
    with pytest.raises(KeyError), timers("train_time"):
        raise KeyError
    with timers("save_time"):
        pass
    assert timers.pop() == {"perf/train_time": 3.0, "perf/save_time": 5.0}
    assert timers.pop() == {}


def test_device_values_arrive_one_step_late():
    seen = []
    pending = metrics.Pending(lambda *row: seen.append(row))
    pending.push("train", 0, {"train/loss": jnp.float32(0.5), "train/lr": 1})
    assert seen == []
    pending.push("train", 1, {"train/loss": jnp.float32(0.25)})
    assert seen == [("train", 0, {"train/loss": 0.5, "train/lr": 1.0})]
    assert all(type(value) is float for value in seen[0][2].values())
    pending.flush()
    pending.flush()
    assert seen[1:] == [("train", 1, {"train/loss": 0.25})]


# Statistics


@pytest.mark.parametrize("case", [c for area in ("numerics", "reliability") for c in cases(area)
                                  if c["input"].get("quantity") in ("nan_mean", "masked_mean")],
                         ids=lambda case: case["id"])  # fmt: skip
def test_means_of_the_cases(case):
    args = json.loads(json.dumps(case["input"]["args"]).replace('"NaN"', "NaN").replace('"inf"', "Infinity"))
    expected = case["expected"]
    value = getattr(metrics, case["input"]["quantity"])(**args)
    assert value == pytest.approx(expected["value"], rel=expected["rtol"], abs=expected["atol"])


def test_means_of_nothing_are_nan():
    assert math.isnan(metrics.nan_mean([])) and math.isnan(metrics.nan_mean([math.nan]))
    assert math.isnan(metrics.masked_mean([1.0], [0]))
    assert metrics.masked_mean([1.0, math.nan, math.inf, 2.0], [1, 0, 0, 1]) == 1.5


def test_pass_at_k():
    expected = [0.25, 0.4643, 0.7857, 1.0]
    assert [metrics.pass_at_k(8, 2, k) for k in (1, 2, 4, 8)] == pytest.approx(expected, abs=5e-5)
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                exact = 1 - math.comb(n - c, k) / math.comb(n, k)
                assert metrics.pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-12)
    assert metrics.pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-9)
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match=f"n = {n} and c = {c}"):
            metrics.pass_at_k(n, c, k)


# Curves and the report


@pytest.fixture
def runs(tmp_path):
    for name, start in (("first", 0.25), ("second", 0.5)):
        with recorder(tmp_path / name) as record:
            record.log("eval", 0, {"eval/sums": 0.1, "eval/sums-truncated_ratio": 0.0, "eval/sums-pass@2": 0.3})
            for step in range(3):
                record.log("rollout", step, {"rollout/raw_reward": start + step / 8, "perf/step_time": 60.0})
            record.log("eval", 3, {"eval/sums": 0.9, "eval/sums-truncated_ratio": 0.0, "eval/sums-pass@2": 1.0})
    return [tmp_path / "first", tmp_path / "second"]


def test_the_figure_holds_every_run(runs, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    kept = []
    saved = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (kept.append(self), saved(self, *args, **kw)))
    plots.reward_curve(runs, tmp_path / "plots" / "curves.png")
    assert (tmp_path / "plots" / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    axes = kept[0].axes[0]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert drawn == {
        "first: training": ([1, 2, 3], [0.25, 0.375, 0.5]), "first: eval/sums": ([0, 3], [0.1, 0.9]),
        "second: training": ([1, 2, 3], [0.5, 0.625, 0.75]), "second: eval/sums": ([0, 3], [0.1, 0.9]),
    }  # fmt: skip
    assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title() and axes.get_legend() is not None


def test_first_and_last(runs):
    first, last = plots.first_and_last(runs[1])
    assert first == {"reward": 0.5, "eval/sums": 0.1} and last == {"reward": 0.75, "eval/sums": 0.9}


def test_the_report(runs, tmp_path, capsys):
    report.main([*map(str, runs), "--out", str(tmp_path / "curves.png")])
    shown = capsys.readouterr().out.split("\n")
    assert shown[0].split() == ["run", "rollouts", "reward", "evaluation", "minutes"]
    assert shown[1].split() == "first 3 0.250 -> 0.500 sums 0.100 -> 0.900 3.0".split()
    assert shown[2].split()[:3] == ["second", "3", "0.500"]
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_running_or_broken_run(runs, tmp_path):
    path = runs[0] / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"rollout/st')
    assert len(plots.read(runs[0])) == 5
    path.write_bytes(b"{}\nnot json\n" + whole)
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: not JSON"):
        report.describe(runs[0])
    with pytest.raises(ValueError, match="no such file"):
        plots.reward_curve([tmp_path / "none"], tmp_path / "x.png")
    path.write_bytes(b'{"train/step": 0}\n')
    with pytest.raises(ValueError, match="1 rows, none with rollout/raw_reward"):
        plots.reward_curve([runs[0]], tmp_path / "x.png")
    assert report.describe(runs[0])[1:] == ("0", "-", "-", "0.0")
