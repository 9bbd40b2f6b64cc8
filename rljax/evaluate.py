"""Evaluation alone, from the command line:

    python -m rljax.evaluate --config grpo_qwen.py --checkpoint runs/mine [--out FOLDER] [--config.SECTION.KEY=VALUE]

evaluates the sets of eval.data under the newest checkpoint of a run (or one checkpoint's folder; without --checkpoint
the weights of model.path), prints the metrics as JSON, and with --out writes them and every sample there. Without
--config the config is that of the checkpoint's run.
"""

from __future__ import annotations

import json
import logging
import pathlib
import sys

import jax
from ml_collections import ConfigDict

from rljax import assemble, checkpoint, evaluation, weights
from rljax import config as configs
from rljax.metrics import Timers
from rljax.rollout import Rollout


def main(argv: list[str]) -> int:
    """Evaluate as the arguments say; the exit status, 2 for bad input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        name, overrides, rest = configs.parse(argv)
        options = dict(zip(rest[::2], rest[1::2], strict=False))
        if len(rest) % 2 or not options.keys() <= {"--checkpoint", "--out"}:
            raise ValueError(f"unknown arguments {' '.join(rest)}; there are --config NAME, --checkpoint PATH, --out "
                             f"FOLDER and --config.SECTION.KEY=VALUE")
        path = options.get("--checkpoint", "")
        if path and not any(one.partition("=")[0] == "--config" for one in argv):
            name = _own_config(pathlib.Path(path).expanduser()) or name
        config = configs.load(name, overrides)
        config.eval.interval = config.eval.interval or 1
        values = _evaluate_alone(config, path, options.get("--out", ""))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(values, indent=1))
    return 0


def _own_config(path: pathlib.Path) -> str | None:
    """The config of the run that a checkpoint, or the folder of its run, belongs to."""
    found = [folder / "config.json" for folder in (path, path.parent, path.parent.parent)]
    return next((str(file) for file in found if file.is_file()), None)


def _evaluate_alone(config: ConfigDict, path: str, out: str) -> dict[str, float]:
    """The metrics of all sets under the weights that `path` says."""
    folder = checkpoint.newest(pathlib.Path(path).expanduser()) if path else None
    if path and folder is None:
        raise ValueError(f"--checkpoint {path}: there is no whole checkpoint in it")
    with assemble.reward_pool(config) as pool:
        configs.validate(config, jax.device_count())
        parts = assemble.build(config)
        if folder is None:
            params, step = weights.initial_params(config, parts.trainer), 0
        else:
            params, step = weights.restored_params(parts, folder), checkpoint.read_host(folder)["rollouts"]
        rollout = Rollout(parts.scheduler, parts.tokenizer, pool, Timers(), post_process=parts.post_process,
                          group_rewards=config.reward.group)
        place = pathlib.Path(out).expanduser() if out else None
        values = evaluation.evaluate(rollout, parts.engine.weights(params), parts.eval_sets, step, place)
    if place is not None:
        (place / f"metrics-{step:06d}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
