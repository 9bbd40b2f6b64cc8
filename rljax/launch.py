"""Train: `python -m rljax.launch --config grpo_qwen.py --config.optim.lr=2e-6`.

--config NAME            a file of the working directory or of configs/, with :variant (default quickstart.py)
--config.SECTION.KEY=V   one knob
--print_config           show the resolved config and stop
--explain [METRIC]       what a metric means and where it is healthy; alone: their names
--warmup                 compile the sampler's programs, so that the run finds them in the compilation cache, and stop

A run whose log.dir exists goes on from its newest checkpoint. SIGTERM or Ctrl-C saves and ends; Ctrl-C again ends at
once. Exit status: 0 done or saved on request, 1 failed while running, 2 bad input, 130 ended by a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from rljax import config as configs
from rljax import metric_names

if TYPE_CHECKING:
    from rljax.loop import Loop

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say at every start that torch is missing


def main(argv: list[str]) -> int:
    """Do what the arguments say; returns the exit status (see the module's text)."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rljax").setLevel(logging.INFO)
    # orbax logs a failed save about ten times, with stacks; `checkpoint.Checkpoints` reports it once.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        config, name = _config([argument for argument in argv if argument != "--warmup"])
    except ValueError as error:
        return _fail(error, 2)
    if config is None:
        return 0
    return warmup(config) if "--warmup" in argv else run(config, name)


def _config(argv: list[str]) -> tuple[ConfigDict | None, str]:
    """The config that the arguments ask for and the name of its file; None where they ask for a text, now printed."""
    name, overrides, rest = configs.parse(argv)
    if "--help" in rest or "-h" in rest:
        print(__doc__.strip())
    elif rest[:1] == ["--explain"] and len(rest) == 2:
        print(metric_names.explain(rest[1]))
    elif rest == ["--explain"]:
        print("\n".join(metric_names.METRICS))
    elif rest == ["--print_config"]:
        print(configs.resolved(configs.load(name, overrides)), end="")
    elif rest:
        raise ValueError(f"unknown arguments {' '.join(rest)}; knobs are set by --config.SECTION.KEY=VALUE, and --help "
                         f"shows the rest")
    else:
        return configs.load(name, overrides), pathlib.Path(name.rpartition("/")[2].partition(":")[0]).stem
    return None, name


def _fail(error: Exception | str, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


def warmup(config: ConfigDict) -> int:
    """Compile the sampler's programs for this config and say how many; returns the exit status."""
    import jax

    from rljax import assemble, weights

    started = time.monotonic()
    try:
        _compilation_cache(jax)
        configs.validate(config, jax.device_count())
        parts = assemble.build(config)
        drawing = parts.engine.weights(weights.initial_params(config, parts.trainer))
        count = parts.engine.warmup(drawing)
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    print(f"{count} programs of the sampler, {time.monotonic() - started:.0f} s; those that took "
          f"{jax.config.jax_persistent_cache_min_compile_time_secs:g} s or more are in "
          f"{jax.config.jax_compilation_cache_dir}")
    return 0


def run(config: ConfigDict, name: str) -> int:
    """Check everything, then train; returns the exit status."""
    with contextlib.ExitStack() as stack:
        try:
            training = prepare(config, name, stack, stack.enter_context(Stop()))
        except (ValueError, OSError) as error:
            return _fail(error, 2)
        from rljax import loop

        started = time.monotonic()
        try:
            training.run()
        except loop.NonFinite as error:
            return _fail(error, 1)
        except ValueError as error:
            if not _ours(error):
                raise  # of the user's function: its author needs the stack
            return _fail(error, 1)
        except OSError as error:
            return _fail(f"{error}; once that is mended, the same command with "
                         f"--config.log.dir={training.run_dir} goes on", 1)
        _closing(config, name, training, time.monotonic() - started)
    return 0


def _ours(error: BaseException) -> bool:
    """Whether the error was raised by this package, so that its message says all."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return pathlib.Path(last).is_relative_to(pathlib.Path(__file__).parent)


def prepare(config: ConfigDict, name: str, stack: contextlib.ExitStack, stopping: Callable[[], bool]) -> Loop:
    """The run, ready to start; `stack` ends its reward workers. ValueError or OSError for bad input."""
    import jax  # after the arguments are known to be good: it takes seconds

    from rljax import assemble, loop

    pool = stack.enter_context(assemble.reward_pool(config))  # before there are devices and their threads
    _compilation_cache(jax)
    configs.validate(config, jax.device_count())
    run_dir = pathlib.Path(config.log.dir.format(config=name, time=time.strftime("%Y%m%d-%H%M%S"))).expanduser()
    start = assemble.starting_checkpoint(config, run_dir)
    parts = assemble.build(config)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"log.dir = {str(run_dir)!r}: cannot be made: {error}") from error
    training = loop.Loop(config, run_dir, parts, pool, stopping, start)
    written = run_dir / "config.json.tmp"
    written.write_text(configs.resolved(config), encoding="utf-8")
    os.replace(written, run_dir / "config.json")  # last: bad input must not leave a directory that refuses the next try
    return training


class Stop:
    """Whether SIGTERM or Ctrl-C has asked the run to save and end; Ctrl-C after that ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.asked

    def _ask(self, number: int, _: object) -> None:
        again, self.asked = self.asked, True  # before the words: their reader may send the next signal at once
        if again and number == signal.SIGINT:
            os.write(2, b"\x1b[?25h" * os.isatty(2) + b"error: ended at once, without saving\n")
            os._exit(130)  # an exception raised inside a finaliser would be lost; reward workers die with this process
        if not again:  # not print: the signal may have come inside one
            os.write(2, b"\nasked to stop: saving and ending; Ctrl-C (again) ends at once\n")


def _compilation_cache(jax) -> None:
    """Programs compiled once are found again by the next run, unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/rljax/xla").expanduser()))


def _closing(config: ConfigDict, name: str, training: Loop, seconds: float) -> None:
    """The curve, the table of what came out, and what to try next."""
    from rljax import assemble, metrics, plots

    run_dir, done = training.run_dir, training.progress.rollouts
    rows = [("after", f"{done} of {training.parts.num_rollouts} rollouts, {seconds:.0f} s")]
    first, last = plots.first_and_last(run_dir) if config.log.jsonl else ({}, {})
    rows += [(key, f"{first[key]:.3f} -> {last[key]:.3f}") for key in first]
    if training.pool.errors or training.pool.timeouts:
        rows.append(("fallback scores", f"{training.pool.errors} reward errors, {training.pool.timeouts} timeouts"))
    if first:
        plots.reward_curve([run_dir], run_dir / "reward.png")
        rows.append(("reward curve", str(run_dir / "reward.png")))
    rows.append(("checkpoint", str(assemble.checkpoint_dir(config, run_dir) / str(done))))
    if config.log.samples:
        rows.append(("samples", str(run_dir / "samples.jsonl")))
    if config.log.tensorboard:
        folder = os.environ.get("TENSORBOARD_DIR") or run_dir / "tensorboard"
        rows.append(("TensorBoard", f"{folder} (pip install tensorboard; tensorboard --logdir ...)"))
    if not training.finished:
        rows.append(("to go on", f"the same command with --config.log.dir={run_dir}"))
    elif config.log.jsonl:
        python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd()) else "python"
        rows.append(("another seed", f"{python} -m rljax.launch --config {run_dir / 'config.json'} "
                                     f"--config.log.dir={run_dir}-2 --config.train.seed={config.train.seed + 1} "
                                     f"--config.data.seed={config.data.seed + 1}"))
        rows.append(("compare", f"{python} -m rljax.report {run_dir} ANOTHER --out runs/curves.png"))
    print(metrics.summary(rows))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is saved: a late request to stop changes nothing
    if status == 1:  # everything is closed; the threads of a writer whose disk is full would add their stacks
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
