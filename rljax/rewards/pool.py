"""Rewards in processes that can be killed: a broken, slow or greedy verifier costs one fallback score, never a hang.

One thread of the parent owns everything: it starts the workers (the kernel kills a worker when that thread ends),
hands out samples, enforces the time limit and replaces workers. Nothing is forked, and no worker runs the user's
`__main__`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rljax.rewards import worker as protocol
from rljax.sample import Sample

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0  # a worker's imports; sympy takes 2 s on a slow core
_RESTART_PAUSE_S = 5.0  # after a worker that could not start once the pool was up
_PIPELINE = 8  # samples sent ahead to a worker whose last one was quick, which hides the parent's latency
_QUICK_S = 0.01


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What one sample got: `reward` None = not scored; `error` says why it is the fallback, else ""."""

    reward: float | None
    parts: dict[str, float]
    error: str = ""


@dataclasses.dataclass
class _Task:
    name: str  # for messages
    frame: bytes
    future: concurrent.futures.Future[Any]  # a RewardResult, or a list of them for a group
    size: int | None  # of the group; None = one sample


class _Worker:
    """One process, its socket, and the samples it holds in order; the first of these is being scored."""

    def __init__(self, pool: RewardPool) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            path = sys.path if os.getcwd() in sys.path or "" in sys.path else [*sys.path, os.getcwd()]
            arguments = (theirs.fileno(), (pool.function, *pool.also), pool.key, pool.memory_mb, os.getpid())
            code = f"import sys; sys.path[:] = {path!r}; from rljax.rewards import worker; worker.main(*{arguments!r})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                                  "RLJAX_REWARD_URL": pool.url},
                start_new_session=True,  # Ctrl-C is the parent's to handle, and kill() reaches the worker's children
            )
        self.socket.setblocking(False)
        self.ready = False
        self.tasks: collections.deque[_Task] = collections.deque()
        self.began = time.monotonic()  # of the first task, or of the start
        self.last_s = math.inf  # how long the last task took
        self.incoming, self.outgoing = bytearray(), bytearray()

    def room(self, waiting: int, workers: int) -> int:
        """How many more samples to send: its share of those waiting, ahead of need only where they are quick."""
        depth = min(_PIPELINE, math.ceil(waiting / workers)) if self.last_s < _QUICK_S else 1
        return depth - len(self.tasks) if self.ready else 0

    def send(self, task: _Task) -> None:
        if not self.tasks:
            self.began = time.monotonic()
        self.tasks.append(task)
        self.outgoing += task.frame

    def flush(self) -> None:
        """Send what the socket takes now: the parent must never wait for a worker."""
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return  # full, or dead; the latter shows as the end of what it sends

    def receive(self) -> tuple[list[tuple[Any, ...]], bool]:
        """The whole messages that have arrived, and whether the worker still lives."""
        alive = True
        try:
            while chunk := self.socket.recv(1 << 16):
                self.incoming += chunk
            alive = False
        except BlockingIOError:
            alive = True
        except ConnectionResetError:
            alive = False
        messages = []
        size = protocol.HEADER.size
        while len(self.incoming) >= size:
            end = size + protocol.HEADER.unpack_from(self.incoming)[0]
            if len(self.incoming) < end:
                break
            messages.append(pickle.loads(self.incoming[size:end]))
            del self.incoming[:end]
        return messages, alive

    def kill(self) -> int:
        """End the process and what it started; its exit status, negative for a signal."""
        self.socket.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended, and so has everything that it started
        return self.process.wait()


class RewardPool:
    """Scores samples with the reward `function` (a built-in name or `package.module:function`) in `workers` processes.

    workers 0 = the CPU count, at most 8; timeout_s counts from when a worker begins a sample; memory_mb limits each
    worker's data (heap and anonymous maps); fallback is the score of a sample whose function raised, hung, returned
    no finite number or killed its worker; key names the part of a dict result that trains; url is that of the reward
    `remote`; also names rewards that rows ask for by their `rm_type`, so that a bad name is found at once. ValueError where no worker
    can start: an unknown function, an import that fails, a limit below what the imports need.

    Counters: `errors` (fallbacks for another reason than time), `timeouts`, `restarts` (workers replaced).
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int = 0,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        fallback: float = 0.0,
        key: str = "reward",
        url: str = "",
        also: Sequence[str] = (),
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"reward.{name} is {value}, but must be above 0")
        if workers < 0:
            raise ValueError(f"reward.workers is {workers}, but must be 0 (auto) or more")
        self.function, self.timeout_s, self.memory_mb, self.key = function, timeout_s, memory_mb, key
        self.fallback, self.url, self.also = float(fallback), url, tuple(also)
        self.size = workers or min(os.cpu_count() or 1, 8)
        self.errors = self.timeouts = self.restarts = 0
        self._reasons: collections.Counter[str] = collections.Counter()  # of fallbacks; not every one is logged
        self._waiting: collections.deque[_Task] = collections.deque()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._closing = False
        self._retry_at = 0.0  # no worker is started before this time
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._lock = threading.Lock()  # of submit against close
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    @property
    def worst(self) -> str:
        """The most frequent reason of a fallback, "" without any."""
        return self._reasons.most_common(1)[0][0] if self._reasons else ""

    def submit(self, sample: Sample) -> concurrent.futures.Future[RewardResult]:
        """Score one sample, which is copied now; `metadata["rm_type"]` may name another reward for it.

        The future, which cannot be cancelled, gets a result or, if the pool is closed first, RuntimeError.
        """
        return self._submit(f"sample {sample.uid}", sample, None)

    def submit_group(self, samples: list[Sample]) -> concurrent.futures.Future[list[RewardResult]]:
        """Score a group at once: the function gets the list, and returns one result for each."""
        return self._submit(f"group {samples[0].group}", samples, len(samples))

    def _submit(self, name: str, content: Any, size: int | None) -> concurrent.futures.Future[Any]:
        task = _Task(name, protocol.frame(content), concurrent.futures.Future(), size)
        task.future.set_running_or_notify_cancel()
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward pool is closed")
            self._waiting.append(task)
        self._wake()
        return task.future

    def score(self, samples: list[Sample]) -> None:
        """Fill `reward` and `rewards` of every sample; which worker finishes when makes no difference."""
        futures = [self.submit(sample) for sample in samples]
        for sample, future in zip(samples, futures, strict=True):
            result = future.result()
            sample.reward, sample.rewards = result.reward, dict(result.parts)

    def close(self) -> None:
        """Kill the workers; a future without a result gets RuntimeError. May be called twice."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"x")
        except (BlockingIOError, OSError):
            return  # woken often enough already, or closed

    # Everything below runs in the pool's own thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._fill()
                self._assign()
                for key, events in self._selector.select(self._patience()):
                    if key.data is None:
                        self._drain_wakeups()
                    elif key.data in self._workers:  # not replaced a moment ago
                        self._attend(key.data, events)
                self._expire()
        finally:
            self._shut()

    def _shut(self) -> None:
        with self._lock:
            self._closing = True
        for one in self._workers:
            one.kill()
            self._waiting.extend(one.tasks)
        for task in self._waiting:
            task.future.set_exception(RuntimeError(f"the reward pool closed before {task.name} was scored"))
        if not self._started.done():
            self._started.set_exception(RuntimeError("the reward pool's thread ended before a worker was started"))
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _drain_wakeups(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                continue
        except BlockingIOError:
            return

    def _fill(self) -> None:
        """Start the workers that are missing."""
        if time.monotonic() < self._retry_at:
            return
        while len(self._workers) < self.size:
            try:
                one = _Worker(self)
            except OSError as error:  # no more processes, memory or file handles
                return self._no_start(f"{type(error).__name__}: {error}")
            self._workers.append(one)
            self._selector.register(one.socket, selectors.EVENT_READ, one)
        return None

    def _assign(self) -> None:
        for one in self._workers:
            while self._waiting and one.room(len(self._waiting), self.size) > 0:
                one.send(self._waiting.popleft())
            self._flush(one)

    def _flush(self, one: _Worker) -> None:
        one.flush()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.outgoing else 0)
        self._selector.modify(one.socket, wanted, one)

    def _deadline(self, one: _Worker) -> float:
        if not one.ready:
            return one.began + _START_TIMEOUT_S
        return one.began + self.timeout_s if one.tasks else math.inf

    def _patience(self) -> float | None:
        """Seconds until something must be done without being told."""
        until = min((self._deadline(one) for one in self._workers), default=math.inf)
        if len(self._workers) < self.size:
            until = min(until, self._retry_at)
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _attend(self, one: _Worker, events: int) -> None:
        messages, alive = one.receive()
        for message in messages:
            if self._hear(one, *message):
                return
        if not alive:
            self._bury(one)
        elif events & selectors.EVENT_WRITE:
            self._flush(one)

    def _hear(self, one: _Worker, kind: str, *content: Any) -> bool:
        """Act on one message; True where the worker is gone afterwards."""
        now = time.monotonic()
        if kind == protocol.READY:
            one.ready = True
            if not self._started.done():
                self._started.set_result(None)
            return False
        if kind == protocol.UNUSABLE:
            self._remove(one)
            self._no_start(content[0])
            return True
        task = one.tasks.popleft()
        one.last_s, one.began = now - one.began, now
        if kind == protocol.SCORED:
            found = content[0]
            task.future.set_result(RewardResult(*found) if task.size is None else [RewardResult(*one) for one in found])
            return False
        self.errors += task.size or 1
        self._fall_back(task, content[0])
        if kind == protocol.SPOILED:
            self._replace(one)
        return kind == protocol.SPOILED

    def _expire(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._workers if self._deadline(one) <= now]:
            self._attend(one, 0)  # the result may have come in the meantime
            if one not in self._workers or self._deadline(one) > time.monotonic():
                continue
            if one.ready:
                task = one.tasks.popleft()
                self.timeouts += task.size or 1
                self._fall_back(task, f"no result within {self.timeout_s:g} s")
                self._replace(one)
            else:
                self._remove(one)
                self._no_start(f"no sign of life after {_START_TIMEOUT_S:g} s of importing")

    def _fall_back(self, task: _Task, reason: str) -> None:
        self._reasons[reason] += 1
        count = self._reasons[reason]
        if count <= 3 or count in (10, 100) or count % 1000 == 0:
            often = f" (the {count}th time)" if count > 3 else ""
            log.warning("reward of %s: %s; it gets the fallback %g%s", task.name, reason, self.fallback, often)
        result = RewardResult(self.fallback, {}, reason)
        task.future.set_result(result if task.size is None else [result] * task.size)

    def _remove(self, one: _Worker) -> int:
        """Kill a worker, whose exit status is returned; the samples that it had not begun go back to the front."""
        self._selector.unregister(one.socket)
        self._workers.remove(one)
        self._waiting.extendleft(reversed(one.tasks))
        return one.kill()

    def _replace(self, one: _Worker) -> None:
        self._remove(one)
        self.restarts += 1

    def _bury(self, one: _Worker) -> None:
        """Take leave of a worker that ended by itself: the sample that it was scoring is to blame."""
        task = one.tasks.popleft() if one.tasks else None
        status = self._remove(one)
        reason = f"its worker died ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
        if not one.ready:
            return self._no_start(reason)
        self.restarts += 1
        if task is not None:
            self.errors += task.size or 1
            self._fall_back(task, reason)
        return None

    def _no_start(self, reason: str) -> None:
        """A worker could not start: the constructor raises; later the waiting samples fall back if no other is left."""
        self._retry_at = time.monotonic() + _RESTART_PAUSE_S
        if not self._started.done():
            self._started.set_exception(ValueError(f"no reward worker can start: {reason}"))
            return
        log.warning("a reward worker cannot start: %s", reason)
        while self._waiting and not self._workers:
            self.errors += self._waiting[0].size or 1
            self._fall_back(self._waiting.popleft(), "no worker is left and none can start")
