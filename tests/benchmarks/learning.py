"""Learning curves: every estimator and surrogate on the built-in model's sums, same rollouts, samples and seeds.

Each arm is the quickstart with a few knobs changed, run in a process of its own, evaluated on the 1,024 held-out sums
before, every 10 rollouts and after. The table has the held-out accuracy at the start, at the end and at its best, the
seconds of a run, and for a critic the explained variance while the training reward lies between 0.3 and 0.8: its mean,
and that of its last ten rollouts. Values are made before their rollout is trained on, so they have not seen it.
Arms whose runs are finished under --out are not run again.

    python tests/benchmarks/learning.py --out runs/learning [--arms "grpo;ppo"] [--seeds 0,1,2] [--rollouts 60]
        [--teacher FOLDER]       # opd's: a Hugging Face folder, such as the quickstart's export
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

ESTIMATOR, SURROGATE = "algo.advantage_estimator", "algo.surrogate"
CRITIC = {"optim.critic_lr": 1e-3, "algo.normalize_advantages": True}
ARMS: dict[str, dict[str, object]] = {
    "grpo": {},
    "dr_grpo": {"algo.normalize_std": False, "algo.loss_aggregation": "constant"},
    "rloo": {ESTIMATOR: "rloo"},
    "reinforce": {ESTIMATOR: "reinforce"},
    "reinforce_plus_plus": {ESTIMATOR: "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {ESTIMATOR: "reinforce_plus_plus_baseline"},
    "ppo": {ESTIMATOR: "ppo", **CRITIC},
    "ppo, sums and products": {ESTIMATOR: "ppo", **CRITIC},
    "opd": {ESTIMATOR: "opd", "algo.opd_kl_coef": 1.0},
    "grpo, gspo": {SURROGATE: "gspo", "algo.eps_clip": 0.05, "algo.eps_clip_high": 0.05},
    "grpo, cispo": {SURROGATE: "cispo"},
    "grpo, reinforce": {SURROGATE: "reinforce"},
}


def run(arm: str, seed: int, options: argparse.Namespace) -> pathlib.Path:
    """One run, or the finished one that is there; its directory."""
    folder = options.out / f"{arm.replace(', ', '-')}-{seed}"
    done = folder / "seconds"
    if done.exists():
        return folder
    knobs = {"log.dir": folder, "train.seed": seed, "data.seed": 42 + seed, "rollout.num_rollouts": options.rollouts,
             "eval.interval": 10, "checkpoint.save_interval": 0, **ARMS[arm]}
    if arm == "ppo, sums and products":
        knobs["data.prompt_data"] = f"builtin:sums/train.jsonl + {products(options.out)}"
    if arm == "opd":
        knobs["model.teacher_path"] = options.teacher
    command = [sys.executable, "-m", "rljax.launch", "--config", "quickstart.py"]
    begun = time.monotonic()
    subprocess.run([*command, *(f"--config.{name}={value}" for name, value in knobs.items())], check=True,
                   stdout=subprocess.DEVNULL)
    done.write_text(str(time.monotonic() - begun))
    return folder


def products(out: pathlib.Path) -> pathlib.Path:
    """4,000 products of two-digit numbers, which the model never learns: beside sums a prompt tells much of its reward,
    where sums alone tell next to nothing before the answer is drawn."""
    draw, file = random.Random(3), out / "products.jsonl"
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(4000)]
    out.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": f"{a}*{b}=", "label": str(a * b)}) + "\n" for a, b in pairs))
    return file


def summary(folder: pathlib.Path) -> dict[str, float]:
    """Start, end and best held-out accuracy, seconds, and the explained variance where there is one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/sums"] for row in rows if "eval/step" in row]
    values = {"start": accuracy[0], "end": accuracy[-1], "best": max(accuracy),
              "seconds": float((folder / "seconds").read_text())}
    explained, waiting = [], []
    for row in rows:
        waiting += [row["train/explained_variance"]] if "train/explained_variance" in row else []
        if "rollout/step" in row:
            explained += waiting if 0.3 <= row["rollout/raw_reward"] <= 0.8 else []
            waiting = []
    if explained:
        values |= {"explained": statistics.mean(explained), "explained_last": statistics.mean(explained[-20:])}
    return values


def main() -> None:
    """Run what is missing, then print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=pathlib.Path, required=True)
    options.add_argument("--arms", default=";".join(ARMS), help="names of arms, separated by semicolons")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--rollouts", type=int, default=60)
    options.add_argument("--teacher", default="")
    options = options.parse_args()
    arms = [arm for arm in options.arms.split(";") if arm != "opd" or options.teacher]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    # Seed by seed, so that an early end leaves every arm with a curve.
    folders = {(arm, seed): run(arm, seed, options) for seed in seeds for arm in arms}
    print("| arm | held-out at the start | at the end | at its best | seconds | explained variance |")
    print("|---|---|---|---|---|---|")
    for arm in arms:
        found = [summary(folders[arm, seed]) for seed in seeds]
        cells = [", ".join(f"{one[key]:.3f}" for one in found) for key in ("start", "end", "best")]
        explained = ", ".join(
            f"{one['explained']:.2f} ({one['explained_last']:.2f})" for one in found if "explained" in one
        )
        seconds = statistics.median(one["seconds"] for one in found)
        print(f"| {arm} | {' | '.join(cells)} | {seconds:.0f} | {explained} |")


if __name__ == "__main__":
    main()
