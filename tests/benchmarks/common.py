"""What the benchmarks share: contestants in processes of their own, memory marks, and the table. Standard library only.

A contestant is the benchmark's own script started with `--worker NAME`. It reads one JSON line with the work, loads,
warms up, answers one JSON line, and from then on runs the work once for every line "go". So the contestants can take
turns: on a shared machine the ratio of neighbouring runs means more than the speed of either.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from typing import Any

REPO = pathlib.Path(__file__).resolve().parents[2]
PEER_PACKAGES = ("torch==2.13.0", "transformers==5.24.0", "safetensors")
MIB = 1024**2
OURS = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)}  # variables of rljax's workers


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=pathlib.Path, default=REPO / "models" / "SmolLM2-135M-Instruct",
                         help="Hugging Face folder (default: what launch/fetch_smollm2.sh makes)")
    options.add_argument("--torch-env", type=pathlib.Path, default=REPO / ".venv-torch",
                         help=f"environment of the peer, made if missing with {', '.join(PEER_PACKAGES)}")
    options.add_argument("--repeats", type=int, default=5, help="measured runs of each contestant, taking turns")
    options.add_argument("--seed", type=int, default=0, help="of the work's tokens and lengths")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    return options


def peer_python(folder: pathlib.Path) -> str:
    """The Python of the peer's environment, which is made and filled where it is missing or incomplete."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
    check = "import torch, transformers, safetensors"
    if subprocess.run([python, "-c", check], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
    return str(python)


class Contestant:
    """One worker process: started, warmed up, then run once at a time."""

    def __init__(self, name: str, script: str, work: dict[str, Any], python: str = sys.executable,
                 variables: dict[str, str] | None = None):
        """`name` is the worker and, after a colon, what it is told to do differently (`torch:sorted`)."""
        self.name, self.runs = name, []
        command = [python, script, "--worker", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **(variables or {})})
        self.ready = self._ask(json.dumps(work))

    def run(self) -> dict[str, Any]:
        """One measured run, kept in `runs`."""
        self.runs.append(self._ask("go"))
        return self.runs[-1]

    def median(self, key: str) -> float:
        """Median of `key` over the runs."""
        return statistics.median(run[key] for run in self.runs)

    def close(self) -> None:
        """End of input ends the worker."""
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}: see its messages above")
        return json.loads(answer)


def take_turns(contestants: Sequence[Contestant], repeats: int) -> None:
    """A, B, A, B, ...: `repeats` runs of each."""
    for repeat in range(repeats):
        for contestant in contestants:
            run = contestant.run()
            print(f"run {repeat + 1}: {contestant.name} {run['seconds']:.2f} s", file=sys.stderr)


def serve(prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> None:
    """The worker's side: `prepare(work)` loads and warms up, and returns what to report of that and the run."""
    # Libraries print to standard output too: keep the real one for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    report, run = prepare(json.loads(sys.stdin.readline()))
    print(json.dumps(report), file=answers, flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        result = run()
        took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        print(json.dumps({**took, "peak": peak_memory(), **result}), file=answers, flush=True)


def mark_memory() -> int:
    """Bytes resident now; the high-water mark starts again from here, so that a spike of loading hides nothing."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """The process's high-water mark in bytes."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def ratio(first: Contestant, second: Contestant, key: str = "rate") -> str:
    """Median and range over the turns of first / second."""
    ratios = sorted(a[key] / b[key] for a, b in zip(first.runs, second.runs))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """What the numbers were made on."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{len(os.sched_getaffinity(0))} cores of {model}, load {os.getloadavg()[0]:.1f} at the end"
