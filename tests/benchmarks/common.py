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
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=pathlib.Path, default=REPO / "models" / "SmolLM2-135M-Instruct",
                         help="Hugging Face folder (default: what launch/fetch_smollm2.sh makes)")
    options.add_argument("--torch-env", type=pathlib.Path, default=REPO / ".venv-torch",
                         help=f"environment of the peer, made if missing with {', '.join(PEER_PACKAGES)}")
    options.add_argument("--repeats", type=int, default=5, help="measured runs of each contestant, taking turns")
    options.add_argument("--seed", type=int, default=0, help="of the work's tokens and lengths")
    options.add_argument("--huge-pages", action="store_true",
                         help="all contestants: glibc asks for huge pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1)")
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

    def __init__(self, name: str, script: str, work: dict[str, Any], options: argparse.Namespace):
        """`name` is rljax or torch and, after a colon, what it is told to do differently (`torch:sorted`)."""
        self.name, self.runs = name, []
        python, variables = sys.executable, OURS
        if name != "rljax":
            python, variables = peer_python(options.torch_env), {}
        variables = {**os.environ, **variables, **(HUGE_PAGES if options.huge_pages else {})}
        self.process = subprocess.Popen([python, script, "--worker", name], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=variables)
        self.ready = self._ask(json.dumps(work))

    def run(self) -> dict[str, Any]:
        """One measured run, kept in `runs`."""
        self.runs.append(self._ask("go"))
        return self.runs[-1]

    def median(self, key: str) -> float:
        """Median of `key` over the runs."""
        return statistics.median(run[key] for run in self.runs)

    def rate(self) -> float:
        """Median tokens per second."""
        return statistics.median(run["tokens"] / run["seconds"] for run in self.runs)

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


def print_results(title: str, unit: str, contestants: Sequence[Contestant], **extra: str) -> None:
    """A Markdown table of medians, the ratios of the first contestant to the others, and the settings.

    A run's `tokens` are counted, in `unit`; extra: heading=key of the last run, shown with six digits.
    """
    header = ["", f"{unit}/s", "seconds", "CPU seconds", "peak MiB over loaded", "load s", "compile, warm-up s", *extra]
    print(f"{title}; medians of {len(contestants[0].runs)} turns; {machine()}\n")
    print("| " + " | ".join(header) + " |\n| --- |" + " ---: |" * (len(header) - 1))
    for contestant in contestants:
        ready, last = contestant.ready, contestant.runs[-1]
        cells = [f"{contestant.rate():.0f}", f"{contestant.median('seconds'):.2f}", f"{contestant.median('cpu'):.1f}",
                 f"{_peak(contestant) / MIB:.0f}", f"{ready['load']:.1f}", f"{ready['warm']:.1f}",
                 *(f"{last[key]:.6g}" for key in extra.values())]
        print("| " + " | ".join([contestant.name, *cells]) + " |")
    print()
    for other in contestants[1:]:
        ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(contestants[0].runs, other.runs))
        # Other load slows the contestants unequally (torch's threads wait for each other): the fastest runs had least.
        fastest = min(run["seconds"] for run in other.runs) / min(run["seconds"] for run in contestants[0].runs)
        print(f"{contestants[0].name} / {other.name}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
              f"{ratios[-1]:.2f}) in speed, {fastest:.2f} between the fastest runs, "
              f"{_peak(contestants[0]) / _peak(other):.2f} in peak memory")
    for contestant in contestants:
        print(f"{contestant.name}: {contestant.ready['settings']}")


def _peak(contestant: Contestant) -> int:
    return contestant.runs[-1]["peak"] - contestant.ready["resident"]


def machine() -> str:
    """What the numbers were made on."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, at the end a load average of {os.getloadavg()[0]:.1f}"
