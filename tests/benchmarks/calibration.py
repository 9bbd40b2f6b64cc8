"""How well stated confidences fit the answers after GRPO and after DCPO, compared where both answer equally well.

Runs `--config` with the variants grpo and dcpo from the same weights, once a seed. Training makes answers better and
may change the confidences, so two runs are compared at evaluations of about the same accuracy: of all pairs (one
evaluation of each, after training began, accuracies between LOW and HIGH and at most NEAR apart) the nearest one of
each seed, and of equally near ones the latest. The table shows those; the diagram shows, for the first seed, how often
answers were right that came with a confidence, drawn anew from the weights exported at those evaluations.

    python -m rljax.launch --config sft_confidence_tiny.py --config.log.dir=runs/confidence
    python tests/benchmarks/calibration.py --model runs/confidence/hf/256 --out runs/calibration
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

REPO = pathlib.Path(__file__).resolve().parents[2]
ARMS = ("grpo", "dcpo")
LOW, HIGH, NEAR = 0.4, 0.9, 0.03  # accuracies, as shares
COLUMNS = {"accuracy": "", "ECE": "dcpo/ece", "Brier": "dcpo/brier", "mean confidence": "dcpo/confidence",
           "missing": "dcpo/missing_confidence"}  # heading -> metric below eval/NAME


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run: after how many rollouts, and the values of COLUMNS (None = not logged)."""

    step: int
    values: dict[str, float | None]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.values["accuracy"]


def evaluations(rows: Sequence[dict], name: str) -> list[Evaluation]:
    """The evaluations of the set `name` in the rows of metrics.jsonl."""
    keys = {heading: f"eval/{name}/{metric}" if metric else f"eval/{name}" for heading, metric in COLUMNS.items()}
    return [Evaluation(row["eval/step"], {heading: row.get(key) for heading, key in keys.items()})
            for row in rows if row.get(keys["accuracy"]) is not None]


def matched(left: Sequence[Evaluation], right: Sequence[Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    """Pairs of comparable evaluations, the nearest accuracies first, then the latest. Untrained weights are left out:
    they are the same in both arms."""
    pairs = [(one, other) for one in left for other in right
             if min(one.step, other.step) > 0 and LOW <= min(one.accuracy, other.accuracy)
             and max(one.accuracy, other.accuracy) <= HIGH and abs(one.accuracy - other.accuracy) <= NEAR]
    return sorted(pairs, key=lambda pair: (abs(pair[0].accuracy - pair[1].accuracy), -pair[0].step - pair[1].step))


def train(options: argparse.Namespace, arm: str, seed: int) -> pathlib.Path:
    """One run, or what is left of it; returns its directory."""
    folder = options.out / f"{arm}-{seed}"
    knobs = {"model.path": options.model, "rollout.num_rollouts": options.rollouts, "eval.interval": options.interval,
             "checkpoint.save_hf_interval": options.interval, "train.seed": seed, "data.seed": seed, "log.dir": folder}
    given = [f"--config.{key}={value}" for key, value in knobs.items() if value is not None]
    command = [sys.executable, "-m", "rljax.launch", "--config", f"{options.config}:{arm}", *given, *options.knobs]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True, env=_environment(), stdout=sys.stderr)
    return folder


def _environment() -> dict[str, str]:
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def draw_again(run: pathlib.Path, step: int) -> list[tuple[float | None, float]]:
    """(confidence, accuracy) of each evaluation sample, from the weights exported after `step` rollouts."""
    out = run / f"pairs-{step}.json"
    if not out.exists():
        command = [sys.executable, __file__, "--worker", str(run), str(step), str(out)]
        subprocess.run(command, check=True, env=_environment(), stdout=sys.stderr)
    return [tuple(pair) for pair in json.loads(out.read_text(encoding="utf-8"))]


def worker(run: pathlib.Path, step: int, out: pathlib.Path) -> None:
    """In a process of its own: evaluate the exported weights as the run did, with the same seeds."""
    from rljax import assemble, weights as start
    from rljax import config as configs
    from rljax.algorithms import dcpo
    from rljax.metrics import Timers
    from rljax.rollout import Rollout

    config = configs.load(str(run / "config.json"), [f"model.path={run / 'hf' / str(step)}"])
    with assemble.reward_pool(config) as pool:
        parts = assemble.build(config)
        weights = parts.engine.weights(start.initial_params(config, parts.trainer))
        samples = parts.eval_sets[0].samples()
        rollout = Rollout(parts.scheduler, parts.tokenizer, pool, Timers())
        rollout.collect(weights, samples, parts.eval_sets[0].sampling, 0)
    dcpo.post_process(samples, config)
    found = [sample.train_metadata["dcpo"] for sample in samples if sample.reward is not None]
    out.write_text(json.dumps([(one["confidence"], one["accuracy"]) for one in found]), encoding="utf-8")


def table(rows: Sequence[tuple[int, str, Evaluation]]) -> str:
    """Markdown: one line for each seed and arm, and the means of each arm."""
    headings = ["seed", "arm", "rollouts", *COLUMNS]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * 2 + " ---: |" * (len(headings) - 2)]
    for seed, arm, one in rows:
        lines.append("| " + " | ".join([str(seed), arm, str(one.step), *map(_cell, one.values.values())]) + " |")
    for arm in ARMS if len({seed for seed, _, _ in rows}) > 1 else ():
        columns = zip(*(one.values.values() for _, name, one in rows if name == arm), strict=True)
        means = [None if None in column else sum(column) / len(column) for column in columns]
        lines.append("| " + " | ".join(["mean", arm, "", *map(_cell, means)]) + " |")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def diagram(arms: dict[str, tuple[Evaluation, list[tuple[float | None, float]]]], out: pathlib.Path) -> None:
    """Reliability diagram of each arm: accuracy in each bin of confidence, and below it how many answers it holds."""
    from matplotlib.figure import Figure

    from rljax.algorithms import dcpo

    figure = Figure(figsize=(4 * len(arms), 4.6), layout="constrained")
    axes = figure.subplots(2, len(arms), squeeze=False, height_ratios=(3, 1), sharex=True, sharey="row")
    for column, (arm, (one, pairs)) in enumerate(arms.items()):
        stated = [pair for pair in pairs if pair[0] is not None]
        confidence, accuracy = zip(*stated, strict=True)
        count, mean, right = dcpo.reliability(confidence, accuracy)
        ece = dcpo.expected_calibration_error(confidence, accuracy)
        print(f"{arm} after {one.step} rollouts, drawn again: accuracy {sum(a for _, a in pairs) / len(pairs):.3f}, "
              f"ECE {ece:.3f}, {len(stated)} of {len(pairs)} with a confidence", file=sys.stderr)
        centres = [(index + 0.5) / len(count) for index in range(len(count))]
        upper, lower = axes[0][column], axes[1][column]
        upper.bar(centres, right, width=0.09, color=f"C{column}", alpha=0.5)
        upper.scatter(mean, right, s=10 + 300 * count / count.sum(), color=f"C{column}")  # few answers, a small dot
        upper.plot([0, 1], [0, 1], "--", color="gray")
        upper.set(title=f"{arm}, {one.step} rollouts: ECE {ece:.3f}", xlim=(0, 1), ylim=(0, 1))
        lower.bar(centres, count / count.sum(), width=0.09, color=f"C{column}")
        lower.set(xlabel="confidence")
    axes[0][0].set(ylabel="accuracy")
    axes[1][0].set(ylabel="share")
    figure.savefig(out, dpi=150)


def main() -> None:
    """Run both arms for every seed, print the table, draw the diagram."""
    options = _options()
    from rljax.plots import read

    chosen, runs = [], {}
    for seed in options.seeds:
        found = {}
        for arm in ARMS:
            runs[seed, arm] = train(options, arm, seed)
            config = json.loads((runs[seed, arm] / "config.json").read_text(encoding="utf-8"))
            name = config["eval"]["data"][0].partition("=")[0]
            found[arm] = evaluations(read(runs[seed, arm]), name)
        pairs = matched(*(found[arm] for arm in ARMS))
        print(f"seed {seed}: {len(pairs)} comparable pairs of evaluations", file=sys.stderr)
        if pairs:
            chosen += [(seed, arm, one) for arm, one in zip(ARMS, pairs[0], strict=True)]
        else:
            print("\n".join(f"{arm}: {[(one.step, round(one.accuracy, 3)) for one in found[arm]]}" for arm in ARMS))
    if not chosen:
        sys.exit(f"no two evaluations with accuracies from {LOW} to {HIGH} within {NEAR} of each other")
    print(table(chosen))
    first = chosen[: len(ARMS)]
    picture = options.out / "reliability.png"
    diagram({arm: (one, draw_again(runs[seed, arm], one.step)) for seed, arm, one in first}, picture)
    print(f"\ndiagram: {picture}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the weights that both arms start from")
    parser.add_argument("--config", default="dcpo_tiny.py", help="a config with the variants grpo and dcpo")
    parser.add_argument("--rollouts", type=int, help="of each run (default: the config's)")
    parser.add_argument("--interval", type=int, help="rollouts between evaluations and exports (default: the config's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/calibration"), help="folder of the runs")
    parser.add_argument("knobs", nargs="*", metavar="--config.SECTION.KEY=VALUE", help="after --, for both arms")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    if sys.argv[1:2] == ["--worker"]:
        worker(pathlib.Path(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
    else:
        main()
