"""What the benchmarks share: contestants in processes of their own, memory marks, and the table. Standard library only.

A contestant is the benchmark's own script started with `--worker NAME`. It reads one JSON line with the work, loads,
warms up, answers one JSON line, and from then on runs the work once for every line: a JSON object with what this run
does differently, mostly nothing. So the contestants can take turns: on a shared machine the ratio of neighbouring runs
means more than the speed of either.
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
PEERS = {  # the environment of each: what is installed, and the modules that must be found
    "torch": (("torch==2.13.0", "transformers==5.24.0", "safetensors"), ("torch", "transformers", "safetensors")),
    "tunix": (("google-tunix==0.1.7", "jax==0.10.2"), ("tunix", "qwix", "jax")),
}
MIB = 1024**2
# Variables of workers in rljax's environment.
OURS = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO), "TRANSFORMERS_VERBOSITY": "error"}
THEIRS = {"JAX_PLATFORMS": "cpu"}  # of peers
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def parser(description: str, peers: Sequence[str] = ("torch",)) -> argparse.ArgumentParser:
    """The options that all benchmarks have, with an environment for each of `peers`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=_folder, default=str(REPO / "models" / "SmolLM2-135M-Instruct"),
                         help="Hugging Face folder (default: what launch/fetch_smollm2.sh makes)")
    for peer in peers:
        options.add_argument(f"--{peer}-env", type=pathlib.Path, default=REPO / f".venv-{peer}",
                             help=f"environment of this peer, made if missing with {', '.join(PEERS[peer][0])}")
    options.add_argument("--repeats", type=int, default=5, help="measured runs of each contestant, taking turns")
    options.add_argument("--seed", type=int, default=0, help="of the work's tokens and lengths")
    options.add_argument("--huge-pages", action="store_true",
                         help="all contestants: glibc asks for huge pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1)")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    return options


def _folder(path: str) -> pathlib.Path:
    if not (pathlib.Path(path) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} holds no config.json; launch/fetch_smollm2.sh makes the default")
    return pathlib.Path(path)


def peer_python(peer: str, folder: pathlib.Path) -> str:
    """The Python of a peer's environment, which is made and filled where it is missing or incomplete."""
    packages, modules = PEERS[peer]
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
    check = f"from importlib.util import find_spec as f; assert all(map(f, {modules}))"
    if subprocess.run([python, "-c", check], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)


class Contestant:
    """One worker process: started, warmed up, then run once at a time."""

    def __init__(self, name: str, script: str, work: dict[str, Any], options: argparse.Namespace):
        """`name` is a peer or a worker of rljax's and, after a colon, what it does differently (`torch:sorted`)."""
        self.name, self.runs = name, []
        python, variables, peer = sys.executable, OURS, name.partition(":")[0]
        if peer in PEERS:
            python, variables = peer_python(peer, getattr(options, f"{peer}_env")), THEIRS
        variables = {**os.environ, **variables, **(HUGE_PAGES if options.huge_pages else {})}
        self.process = subprocess.Popen([python, script, "--worker", name], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=variables)
        self.ready = self._ask(json.dumps(work))

    def run(self, **how: Any) -> dict[str, Any]:
        """One run, with the arguments `how` of the worker's."""
        return self._ask(json.dumps(how))

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
            contestant.runs.append(contestant.run())
            print(f"run {repeat + 1}: {contestant.name} {contestant.runs[-1]['seconds']:.2f} s", file=sys.stderr)


def serve(prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[..., dict[str, Any]]]]) -> None:
    """The worker's side: `prepare(work)` loads and warms up, and returns what to report of that and the run."""
    # Libraries print to standard output too: keep the real one for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    report, run = prepare(json.loads(sys.stdin.readline()))
    print(json.dumps(report), file=answers, flush=True)
    for line in sys.stdin:
        how = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        result = run(**how)
        took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        print(json.dumps({**took, "peak": peak_memory(), **result}), file=answers, flush=True)


def count_compilations() -> list[float]:
    """Seconds of each program that JAX compiles in this process from here on, growing."""
    import jax

    seconds: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


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


def print_results(title: str, unit: str, contestants: Sequence[Contestant],
                  extra: dict[str, Callable[[Contestant], str]]) -> None:
    """A Markdown table of medians, the ratios of the first contestant to the others, and the settings.

    A run's `tokens` are counted, in `unit`; extra: further columns, by heading.
    """
    header = ["", f"{unit}/s", "seconds", "CPU seconds", "peak MiB over loaded", "load s", "compile, warm-up s", *extra]
    print(f"{title}; medians of {len(contestants[0].runs)} turns; {machine()}\n")
    print("| " + " | ".join(header) + " |\n| --- |" + " ---: |" * (len(header) - 1))
    for contestant in contestants:
        ready = contestant.ready
        cells = [f"{contestant.rate():.0f}", f"{contestant.median('seconds'):.2f}", f"{contestant.median('cpu'):.1f}",
                 f"{_peak(contestant) / MIB:.0f}", f"{ready['load']:.1f}", f"{ready['warm']:.1f}",
                 *(cell(contestant) for cell in extra.values())]
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
