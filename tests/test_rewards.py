"""The reward pool with real processes: whatever a verifier does, one sample pays and the next is scored normally."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from rljax import rewards
from rljax.rewards import exact_match, worker
from rljax.rewards import format as shape
from rljax.rewards.pool import RewardPool
from rljax.sample import Sample

VERIFIERS = """
    import asyncio, os, pathlib, subprocess, sys, time
    import numpy as np

    async def kinds(sample):
        await asyncio.sleep(0)
        return kind(sample)

    def kind(sample):
        what = sample.text
        if what == "raise":
            raise KeyError("no such thing")
        if what == "exit":
            sys.exit(3)
        if what == "die":
            os._exit(7)
        if what == "hang":
            time.sleep(600)
        if what == "spin":
            while True:
                pass
        if what == "child":
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path(sample.metadata["pid"]).write_text(str(child.pid))
            child.wait()
        if what == "eat":
            return float(len([bytearray(1 << 20) for _ in range(4000)]))
        if what == "print":
            print("noise" * 1000)
            sys.stdout.flush()
            os.write(1, b"more noise")
            return 1
        return {
            "nan": float("nan"), "inf": float("inf"), "text": "1.0", "list": [1.0], "none": None, "true": True,
            "int": 2, "numpy": np.float32(0.5), "dict": {"reward": 1, "style": np.float64(0.25), "absent": None},
            "no key": {"style": 1.0}, "bad part": {"reward": 1.0, "style": float("inf")}, "unscored": {"reward": None},
            "where": float(os.getpid()), "platform": float(os.environ["JAX_PLATFORMS"] == "cpu"),
            "jax": float("jax" in sys.modules), "fine": 1.0,
        }[what]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("user")
    (path / "my_verifiers.py").write_text(textwrap.dedent(VERIFIERS))
    (path / "broken_verifiers.py").write_text("import no_such_package_here\n")
    (path / "fatal_verifiers.py").write_text("import os\nos._exit(5)\n")
    return path


@pytest.fixture(autouse=True)
def inside(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # the user's folder is found as the working directory


@pytest.fixture
def pool(inside: None) -> Iterator[RewardPool]:
    with RewardPool("my_verifiers:kind", workers=1, timeout_s=1.0, memory_mb=200, fallback=-1.0) as opened:
        yield opened


def scored(pool: RewardPool, *kinds: str) -> list[float | None]:
    samples = [Sample(uid=index, text=kind) for index, kind in enumerate(kinds)]
    pool.score(samples)
    return [sample.reward for sample in samples]


def test_values(pool: RewardPool) -> None:
    assert scored(pool, "fine", "none", "true", "int", "numpy", "unscored") == [1.0, None, 1.0, 2.0, 0.5, None]
    assert (pool.errors, pool.timeouts, pool.restarts) == (0, 0, 0)


def test_dict_trains_one_part_and_logs_all(pool: RewardPool) -> None:
    sample = Sample(uid=1, text="dict")
    pool.score([sample])
    assert (sample.reward, sample.rewards) == (1.0, {"reward": 1.0, "style": 0.25})


@pytest.mark.parametrize("kind", ["raise", "exit", "nan", "inf", "text", "list", "no key", "bad part"])
def test_error_costs_one_fallback(pool: RewardPool, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert scored(pool, "fine", kind, "fine") == [1.0, -1.0, 1.0]
    assert (pool.errors, pool.timeouts, pool.restarts) == (1, 0, 0)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("reward of sample 1:")


@pytest.mark.parametrize(
    ("kind", "errors", "timeouts"), [("die", 1, 0), ("eat", 1, 0), ("hang", 0, 1), ("spin", 0, 1)], ids=str
)
def test_worker_is_replaced(
    pool: RewardPool, kind: str, errors: int, timeouts: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = scored(pool, "where")
    with caplog.at_level(logging.WARNING):
        assert scored(pool, *["fine"] * 12, kind, *["fine"] * 12) == [1.0] * 12 + [-1.0] + [1.0] * 12
    assert (pool.errors, pool.timeouts, pool.restarts) == (errors, timeouts, 1)
    assert [message.partition(":")[0] for message in caplog.messages] == ["reward of sample 12"]
    assert scored(pool, "where") != first


def test_async_function() -> None:
    with RewardPool("my_verifiers:kinds", workers=1, timeout_s=1.0, fallback=-1.0) as pool:
        assert scored(pool, "fine", "raise", "none", "die", "hang", "dict") == [1.0, -1.0, None, -1.0, -1.0, 1.0]
        assert (pool.errors, pool.timeouts, pool.restarts) == (2, 1, 2)


def test_time_limit_counts_from_the_beginning_of_the_sample(folder: pathlib.Path) -> None:
    (folder / "slow_verifiers.py").write_text(
        "import time\ntime.sleep(1)\ndef nap(sample):\n    time.sleep(0.2)\n    return 1\n"
    )
    with RewardPool("slow_verifiers:nap", workers=1, timeout_s=0.6) as pool:
        assert scored(pool, *"abcdef") == [1.0] * 6
        assert pool.timeouts == 0


def test_what_a_hung_verifier_started_ends_with_it(pool: RewardPool, tmp_path: pathlib.Path) -> None:
    note = tmp_path / "pid"
    pool.score([Sample(uid=1, text="child", metadata={"pid": str(note)})])
    assert pool.timeouts == 1 and gone(int(note.read_text()))


def test_printing_does_not_reach_the_protocol(pool: RewardPool) -> None:
    assert scored(pool, "print", "fine") == [1.0, 1.0]


def test_workers_import_no_jax(pool: RewardPool) -> None:
    assert scored(pool, "platform", "jax") == [1.0, 0.0]


def test_order_does_not_matter(folder: pathlib.Path) -> None:
    with RewardPool("exact_match", workers=3) as pool:
        samples = [Sample(uid=uid, text=str(uid % 5), label=uid % 3) for uid in range(300)]
        pool.score(samples[::-1])
        assert [sample.reward for sample in samples] == [float(uid % 5 == uid % 3) for uid in range(300)]
        assert all(sample.rewards == {} for sample in samples)


def test_large_samples_to_a_hung_worker_do_not_block_the_parent(pool: RewardPool) -> None:
    big = [Sample(uid=uid, text="hang" if uid == 8 else "fine", prompt="x" * 3_000_000) for uid in range(12)]
    pool.score(big)
    assert [sample.reward for sample in big] == [1.0] * 8 + [-1.0] + [1.0] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_reward", "exact_match, f1, format, gsm8k, math"),
        ("my_verifiers:absent", "no function 'absent', only.*kind"),
        ("broken_verifiers:f", "No module named 'no_such_package_here'"),
        ("absent_module:f", "No module named 'absent_module'"),
        ("fatal_verifiers:f", "exit status 5"),
        ("pool", "exact_match"),
    ],
)
def test_worker_that_cannot_start_raises_at_construction(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardPool(name, workers=1)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="timeout_s is 0"):
        RewardPool("exact_match", timeout_s=0)
    with pytest.raises(ValueError, match="workers is -1"):
        RewardPool("exact_match", workers=-1)


def test_a_pool_whose_worker_cannot_come_back_falls_back(folder: pathlib.Path) -> None:
    source = folder / "fading_verifiers.py"
    source.write_text("import os\ndef f(sample):\n    os._exit(1) if sample.text == 'die' else None\n    return 1\n")
    with RewardPool("fading_verifiers:f", workers=1, fallback=-1.0) as pool:
        source.write_text("import no_such_package_here\n")
        assert scored(pool, "fine", "die", "fine", "fine") == [1.0, -1.0, -1.0, -1.0]
        assert pool.errors == 3


def test_close_fails_what_waits_and_leaves_no_handles(folder: pathlib.Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = RewardPool("my_verifiers:kind", workers=2)
    futures = [pool.submit(Sample(uid=uid, text="hang")) for uid in range(5)]
    assert not futures[0].cancel()
    pool.close()
    pool.close()
    for future in futures:
        with pytest.raises(RuntimeError, match="closed before sample"):
            future.result(timeout=0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(Sample())
    assert len(os.listdir("/proc/self/fd")) == before


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends in time; one that only waits for its parent to take note has ended."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


SCRIPT = """
import os, sys, time
sys.path[:] = {path!r}
print("started", flush=True)  # a worker that ran this script again would print it again
from rljax.rewards.pool import RewardPool
from rljax.sample import Sample
pool = RewardPool("my_verifiers:kind", workers=2)
idle = Sample(uid=0, text="where")
pool.score([idle])
for uid in (1, 2):
    pool.submit(Sample(uid=uid, text="spin"))
time.sleep(0.3)
print(*(one.process.pid for one in pool._workers), flush=True)
time.sleep(600)
"""


def test_workers_end_with_a_killed_parent_and_do_not_run_its_main(folder: pathlib.Path) -> None:
    script = folder / "no_guard.py"
    script.write_text(SCRIPT.format(path=sys.path))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(gone(pid, 0.05) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_importing_rewards_imports_no_jax() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from rljax import rewards;"
        "[rewards.find(name) for name in rewards.names()]; import rljax.rewards.pool; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_the_verifiers() -> None:
    assert {"exact_match", "format", "gsm8k", "math"} <= set(rewards.names())
    assert not {"pool", "worker"} & set(rewards.names())
    assert rewards.find("exact_match") is exact_match.reward


def test_normalize_names_the_part() -> None:
    with pytest.raises(ValueError, match="part 'a' is nan"):
        worker.normalize({"reward": 1, "a": float("nan")}, "reward")
    with pytest.raises(TypeError, match="of type str"):
        worker.normalize("1", "reward")


@pytest.mark.parametrize(
    ("text", "label", "right"),
    [
        (" 5 ", 5, 1), ("5", 5.0, 1), ("5.0", "5", 1), ("05", 5, 1), ("-5", 5, 0), ("6", 5, 0), ("five", "five ", 1),
        ("Five", "five", 0), ("", None, 1), ("None", None, 0), ("b", ["a", "b"], 1), ("c", ["a", "b"], 0),
        ("1e999999999", "1e999999998", 0),
    ],
)  # fmt: skip
def test_exact_match(text: str, label: object, right: float) -> None:
    assert exact_match.reward(Sample(text=text, label=label)) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1), ("<think>a</think>4", 0), ("I am not sure.", 0), ("", 0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0), ("<think>a</think><answer>4</answer> so", 0),
    ],
)  # fmt: skip
def test_format(text: str, right: float) -> None:
    assert shape.reward(Sample(text=text)) == right


def test_format_takes_an_expression_from_the_metadata() -> None:
    assert shape.reward(Sample(text="a\n\\boxed{4}", metadata={"format": r".*\\boxed\{.+\}"})) == 1
    assert shape.reward(Sample(text="4", metadata={"format": r".*\\boxed\{.+\}"})) == 0
