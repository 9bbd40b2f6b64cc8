"""Compare finished or running runs: `python -m rljax.report RUN [RUN ...] --out curves.png`."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from rljax.metrics import summary
from rljax.plots import REWARD, first_and_last, read, reward_curve, series

HEADER = ("run", "rollouts", "reward", "evaluation", "minutes")


def describe(run_dir: pathlib.Path) -> tuple[str, ...]:
    """One row below HEADER: rollouts, first and last reward, first and last of each evaluation, time of the rollouts.

    Raises ValueError where the run's metrics.jsonl is missing or broken.
    """
    rows = read(run_dir)
    steps = series(rows, "rollout", REWARD)[0]
    seconds = sum(series(rows, "rollout", "perf/step_time")[1])
    first, last = first_and_last(run_dir)
    change = {key: f"{first[key]:.3f} -> {last[key]:.3f}" for key in first}
    reward = change.pop("reward", "-")
    sets = "; ".join(f"{key.removeprefix('eval/')} {text}" for key, text in change.items()) or "-"
    return run_dir.resolve().name, str(steps[-1] + 1 if steps else 0), reward, sets, f"{seconds / 60:.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and draw the figure."""
    parser = argparse.ArgumentParser(prog="python -m rljax.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="file of the figure, such as curves.png")
    args = parser.parse_args(argv)
    print(summary([HEADER, *map(describe, args.runs)]))
    if args.out is not None:
        reward_curve(args.runs, args.out)
        print(f"figure: {args.out}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
