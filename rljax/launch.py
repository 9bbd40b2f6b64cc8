"""Train: `python -m rljax.launch --config grpo_qwen.py --config.optim.lr=2e-6`.

--config NAME            a file of the working directory or of configs/, with :variant (default quickstart.py)
--config.SECTION.KEY=V   one knob
--print_config           show the resolved config and stop
--explain METRIC         what a metric means and where it is healthy
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import time

from rljax import config as configs
from rljax import metric_names

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say at every start that torch is missing


def main(argv: list[str]) -> int:
    """Exit status: 0 done or stopped by SIGTERM with everything saved, 1 failed while running, 2 bad input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rljax").setLevel(logging.INFO)
    try:
        name, overrides, rest = configs.parse(argv)
        if "--help" in rest or "-h" in rest:
            print(__doc__.strip())
            return 0
        if rest[:1] == ["--explain"] and len(rest) == 2:
            print(metric_names.explain(rest[1]))
            return 0
        if rest not in ([], ["--print_config"]):
            raise ValueError(f"unknown arguments {' '.join(rest)}; see --help")
        config = configs.load(name, overrides)
        if rest:
            print(configs.resolved(config), end="")
            return 0
        return run(config, pathlib.Path(name.rpartition("/")[2].partition(":")[0]).stem)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(config, name: str) -> int:
    """Check everything, then train. ValueError for bad input, before any device work."""
    import jax  # after the arguments are known to be good: it takes seconds, and the devices

    from rljax import assemble, loop

    _compilation_cache(jax)
    configs.validate(config, jax.device_count())
    run_dir = _run_dir(config, name)
    stopping = loop.on_sigterm()
    parts = assemble.build(config)
    with assemble.reward_pool(config) as pool:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(configs.resolved(config), encoding="utf-8")
        started = time.monotonic()
        training = loop.Loop(config, run_dir, parts, pool, stopping)
        try:
            training.run()
        except (OSError, loop.NonFinite) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    _closing(config, run_dir, training, time.monotonic() - started)
    return 0


def _compilation_cache(jax) -> None:
    """Programs compiled once are found again by the next run, unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/rljax/xla").expanduser()))


def _run_dir(config, name: str) -> pathlib.Path:
    """log.dir with {config} and {time} filled in; a directory of another config is refused, naming each knob."""
    run_dir = pathlib.Path(config.log.dir.format(config=name, time=time.strftime("%Y%m%d-%H%M%S"))).expanduser()
    saved = run_dir / "config.json"
    if saved.exists():
        changed = configs.diff(json.loads(saved.read_text(encoding="utf-8")), config.to_dict())
        if changed:
            raise ValueError(f"{run_dir} is a run of another config; choose another log.dir, or set back:\n  "
                             + "\n  ".join(changed))
    return run_dir


def _closing(config, run_dir: pathlib.Path, training, seconds: float) -> None:
    """The curve, the table of what came out, and what to try next."""
    from rljax import metrics, plots

    curve = run_dir / "reward.png"
    rows = [("after", f"{training.progress.rollouts} of {training.parts.num_rollouts} rollouts, {seconds:.0f} s")]
    if config.log.jsonl:
        first, last = plots.first_and_last(run_dir)
        rows += [(key, f"{first[key]:.3f} -> {last[key]:.3f}") for key in first]
        plots.reward_curve([run_dir], curve)
        rows.append(("reward curve", str(curve)))
    rows += [
        ("checkpoint", str(training.checkpoints.directory / str(training.progress.rollouts))),
        ("samples", str(run_dir / "samples.jsonl")),
        ("TensorBoard", f"tensorboard --logdir {os.environ.get('TENSORBOARD_DIR') or run_dir / 'tensorboard'}"),
        ("next", f"python -m rljax.report {run_dir}"),
    ]
    print(metrics.summary(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
