"""Reward curves of one or several runs, from their metrics.jsonl."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

REWARD = "rollout/raw_reward"
OTHER = re.compile(r"-(truncated_ratio|pass@\d+)$")  # figures of an evaluation set beside its reward


def read(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; a last line cut short by a crash or still being written is left out.

    Raises ValueError naming file and line where another line is not JSON, or the file is missing.
    """
    path = pathlib.Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path}: no such file: {run_dir} is not the directory of a run that wrote metrics")
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
    return rows


def series(rows: Sequence[dict[str, Any]], axis: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric where it is there and a number."""
    points = [(row[f"{axis}/step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def eval_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Metrics that hold the mean reward of an evaluation set: `eval/sums`, not `eval/sums-truncated_ratio`."""
    found = {name for row in rows for name in row if name.startswith("eval/") and name.count("/") == 1}
    return sorted(name for name in found - {"eval/step"} if not OTHER.search(name))


def first_and_last(run_dir: pathlib.Path) -> tuple[dict[str, float], dict[str, float]]:
    """First and last mean reward of training, as `reward`, and of each evaluation set, as `eval/{name}`."""
    rows = read(run_dir)
    curves = {"reward": series(rows, "rollout", REWARD)[1]}
    curves |= {name: series(rows, "eval", name)[1] for name in eval_names(rows)}
    return ({key: values[0] for key, values in curves.items() if values},
            {key: values[-1] for key, values in curves.items() if values})  # fmt: skip


def reward_curve(run_dirs: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """Draw reward over rollouts and the evaluations between them, of all runs in one figure, into the file `out`.

    The ending of `out` names the format. Raises ValueError where a run has nothing to draw.
    """
    from matplotlib.figure import Figure  # seconds to import, so only where a figure is drawn; needs no display

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, run_dir in enumerate(map(pathlib.Path, run_dirs)):
        rows, color = read(run_dir), f"C{index % 10}"
        steps, rewards = series(rows, "rollout", REWARD)
        sets = eval_names(rows)
        if not steps and not sets:
            raise ValueError(f"{run_dir}/metrics.jsonl: {len(rows)} rows, none with {REWARD} or an evaluation")
        label = run_dir.resolve().name
        if steps:
            axes.plot([step + 1 for step in steps], rewards, color=color, alpha=0.8, label=f"{label}: training")
        for name, marker in zip(sets, "os^Dv<>ph*" * len(sets)):
            axes.plot(*series(rows, "eval", name), color=color, marker=marker, linestyle="--", label=f"{label}: {name}")
    axes.set(xlabel="rollouts", ylabel="mean reward", title="Reward during training")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
