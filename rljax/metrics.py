"""Stage 7 of 7, the record: metrics.jsonl, samples.jsonl, TensorBoard, wandb and the console; timers; statistics.

Steps: `rollout/step` counts rollouts from 0; `train/step` is the number of updates done, `eval/step` that of the
rollouts trained on before the evaluation.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich import progress
from rich.console import Console

from rljax.metric_names import METRICS, check, explain

__all__ = [
    "METRICS", "Pending", "Recorder", "Timers", "explain", "masked_mean", "nan_mean", "pass_at_k", "summary",
]  # fmt: skip

AXES = ("rollout", "train", "eval")
FILES = {"metrics": "metrics.jsonl", "samples": "samples.jsonl"}
SHOWN = {  # metric -> its format on the console
    "rollout/raw_reward": "reward {:.3f}",
    "rollout/response_len/mean": "length {:.1f}",
    "perf/rollout_tokens_per_device_per_sec": "{:.0f} tok/s",
}
log = logging.getLogger("rljax")


def nan_mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN, float64; NaN where there is none."""
    array = np.asarray(values, np.float64)
    kept = array[~np.isnan(array)]
    return float(kept.mean()) if kept.size else math.nan


def masked_mean(values: Any, mask: Any) -> float:
    """Mean of `values` where `mask`, of the same shape, is not 0, float64; NaN where it is 0 everywhere."""
    kept = np.asarray(values, np.float64)[np.asarray(mask) != 0]
    return float(kept.mean()) if kept.size else math.nan


def repeats(tokens: Sequence[int], period: int = 32, times: int = 3) -> bool:
    """Whether the end of `tokens` is one stretch of at most `period` tokens `times` times over, 12 tokens or more."""
    for size in range(1, min(period, len(tokens) // times) + 1):
        span = max(size * times, 12)
        tail = tokens[-span:]
        if len(tail) == span and all(tail[i] == tail[i + size] for i in range(span - size)):
            return True
    return False


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - prod over i = n-c+1..n of (1 - k/i).

    1 if n - c < k. Raises ValueError unless 0 <= c <= n and 1 <= k <= n. Source: Chen et al. 2021,
    arXiv:2107.03374.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k}: needs 1 <= k <= n and 0 <= c <= n, got n = {n} and c = {c}")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1, dtype=np.float64)))


class Timers:
    """Wall-clock seconds by name, summed until `pop`: `with timers("rollout_time"): ...`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `perf/{name}`, also where an exception leaves it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[f"perf/{name}"] += time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """Seconds since the last `pop`, by metric name."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


class Pending:
    """Device values logged one step late, so that fetching them never waits for the step just dispatched."""

    def __init__(self, log_values: Callable[[str, int, dict[str, Any]], None]) -> None:
        self._log = log_values
        self._waiting: tuple[str, int, dict[str, Any]] | None = None

    def push(self, axis: str, step: int, values: Mapping[str, Any]) -> None:
        """Log what was pushed before and keep `values`, a tree of scalars on device or host."""
        for value in jax.tree.leaves(values):
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self.flush()
        self._waiting = (axis, step, dict(values))

    def flush(self) -> None:
        """Log what waits; call before a checkpoint and at the end."""
        if self._waiting is not None:
            axis, step, values = self._waiting
            self._waiting = None
            self._log(axis, step, jax.tree.map(float, jax.device_get(values)))


class Recorder:
    """Writes metrics and samples of one run, and shows its progress.

    `run_dir` None records nothing: for all processes but the first. `resume` is a `position()` out of a
    checkpoint: what was written after it is cut off; None starts the files anew. `total` is the number of rollouts,
    `interval` how many pass between two lines on the console.
    """

    def __init__(self, run_dir: pathlib.Path | None, *, tensorboard: bool = True, jsonl: bool = True,
                 wandb: bool = False, project: str = "rljax", experiment: str = "", resume: dict | None = None,
                 total: int = 0, interval: int = 1) -> None:  # fmt: skip
        self._run_dir, self._files = run_dir, {}
        self._writers, self._wandb, self._console = {}, None, None
        self._steps = {axis: -1 for axis in AXES}
        if run_dir is None:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        experiment = experiment or run_dir.name
        self.cut_back(resume or {})
        self._files = {
            kind: open(run_dir / name, "ab") for kind, name in FILES.items() if jsonl or kind == "samples"
        }
        if tensorboard:
            self._writers = _tensorboard(run_dir, project, experiment, self._steps)
        if wandb:
            self._wandb = _wandb(run_dir, project, experiment, (resume or {}).get("wandb"))
        self._console = _Progress(total, interval, self._steps["rollout"] + 1)

    def log(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Record `values`, by metric name, under `{axis}/step`; axis is rollout (with perf/), train or eval.

        A name that is not registered or not of this axis raises ValueError. What is not finite is null in
        metrics.jsonl, since JSON has no such numbers, and a gap in TensorBoard.
        """
        check(axis, list(values))
        if self._run_dir is None:
            return
        self._steps[axis] = max(step, self._steps[axis])
        values = {name: float(value) for name, value in values.items()}
        self._write("metrics", {f"{axis}/step": step, **values})
        for name, value in values.items() if axis in self._writers else ():
            if math.isfinite(value):
                self._writers[axis].add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({f"{axis}/step": step, **values})
        if axis != "train":
            self._console.show(axis, step, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append responses of the rollout `step` to samples.jsonl, one JSON object a line."""
        for row in rows:
            self._write("samples", {"rollout/step": step, **row})

    def _write(self, kind: str, row: dict[str, Any]) -> None:
        if kind in self._files:
            text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"
            # Half of a surrogate pair has no UTF-8 form; the replacement is how JSON writes it.
            self._files[kind].write(text.encode("utf-8", "backslashreplace"))
            self._files[kind].flush()

    def position(self) -> dict[str, Any]:
        """Where the record stands, plain JSON for the checkpoint; everything before it is on the disk by then."""
        for file in self._files.values():
            os.fsync(file.fileno())
        for writer in self._writers.values():
            writer.flush()
        sizes = {kind: file.tell() for kind, file in self._files.items()}
        return {**sizes, "steps": dict(self._steps), **({"wandb": self._wandb.id} if self._wandb else {})}

    def cut_back(self, position: Mapping[str, Any]) -> None:
        """Cut metrics.jsonl and samples.jsonl back to `position`; an empty one empties them."""
        for kind, name in FILES.items():
            path, size = self._run_dir / name, position.get(kind, 0)
            if not path.exists():
                continue
            if path.stat().st_size < size:
                log.warning("%s has %d bytes, fewer than the checkpoint's %d: rows are missing",
                            path, path.stat().st_size, size)  # fmt: skip
            else:
                os.truncate(path, size)
        self._steps.update(position.get("steps", {}))

    def close(self) -> None:
        """Flush and close everything; the record can be read afterwards."""
        if self._run_dir is not None:
            self.position()
            self._console.close()
        for file in (*self._files.values(), *self._writers.values()):
            file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """`value` as JSON has it: numpy scalars as numbers, what is not finite as null, unknown objects as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _tensorboard(run_dir: pathlib.Path, project: str, experiment: str, steps: dict[str, int]) -> dict[str, Any]:
    """One writer for each axis of steps, in a folder of its own: a purge is by step and meets a whole folder.

    Events from the step after the last recorded one on are hidden: all, where a run starts anew in its directory.
    """
    import tensorboardX  # heavy, and not needed where log.tensorboard is off

    root = os.environ.get("TENSORBOARD_DIR", "")
    folder = pathlib.Path(root) / project / experiment if root else run_dir / "tensorboard"
    # Event files are named by the second, and a second writer of one second would overwrite the first one's.
    suffix = f".{time.time_ns()}"
    return {
        axis: tensorboardX.SummaryWriter(str(folder / axis), purge_step=steps[axis] + 1, filename_suffix=suffix)
        for axis in AXES
    }


def _wandb(run_dir: pathlib.Path, project: str, experiment: str, run_id: str | None) -> Any:
    """A wandb run whose metrics go by their own steps; `run_id` continues one."""
    import wandb  # an optional extra

    run = wandb.init(project=project, name=experiment, dir=str(run_dir), id=run_id, resume="allow")
    for axis in AXES:
        for prefix in (axis, "perf") if axis == "rollout" else (axis,):
            run.define_metric(f"{prefix}/*", step_metric=f"{axis}/step")
    return run


class _Progress:
    """A live bar on a terminal, one line per rollout elsewhere."""

    def __init__(self, total: int, interval: int, done: int) -> None:
        self._total, self._interval, self._first, self._start = total, interval, done, time.monotonic()
        self._bar = None
        if sys.stdout.isatty():
            columns = (progress.TextColumn("rollout"), progress.MofNCompleteColumn(), progress.BarColumn(),
                       progress.TextColumn("{task.fields[text]}"), progress.TimeElapsedColumn(),
                       progress.TextColumn("eta"), progress.TimeRemainingColumn())  # fmt: skip
            self._bar = progress.Progress(*columns, console=Console(), speed_estimate_period=600)
            self._task = self._bar.add_task("rollout", total=total, completed=done, text="compiling")
            self._bar.start()

    def show(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Show a rollout's figures, or those of an evaluation."""
        if axis == "eval":
            sets = [name for name in values if name.count("/") == 1]
            means = [f"{name} {values[name]:.3f}" for name in sets if not any(name.startswith(f"{s}-") for s in sets)]
            self._print(f"after {step} rollouts: {'  '.join(means)}")
            return
        text = "  ".join(form.format(values[name]) for name, form in SHOWN.items() if name in values)
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, text=text)
        elif (step + 1) % self._interval == 0 or step + 1 == self._total:
            self._print(f"rollout {step + 1}/{self._total}  {text}  eta {self._eta(step + 1)}")

    def _eta(self, done: int) -> datetime.timedelta:
        per_rollout = (time.monotonic() - self._start) / max(done - self._first, 1)
        return datetime.timedelta(seconds=round(per_rollout * max(self._total - done, 0)))

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()


def summary(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts, all with as many cells, as lines with aligned columns: the table that closes a run."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
