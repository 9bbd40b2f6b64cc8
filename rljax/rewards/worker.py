"""One reward worker: a process that scores the samples it is sent until its socket closes. Started by `pool.py`.

Frames in both directions are a 4-byte big-endian length and that many bytes of pickle. The socket is the worker's
own, so what a user's function prints cannot get into it, and only plain values go back to the parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import inspect
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rljax import rewards

HEADER = struct.Struct("!I")
READY, UNUSABLE, SCORED, FAILED, SPOILED = "ready", "unusable", "scored", "failed", "spoiled"
_PR_SET_PDEATHSIG = 1


def frame(message: Any) -> bytes:
    """One message as it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def normalize(result: Any, key: str) -> tuple[float | None, dict[str, float]]:
    """(training reward, named parts) of what a reward function returned; None = not scored.

    TypeError or ValueError for anything but None, a finite number, or a dict of these that holds `key`.
    """
    if not isinstance(result, dict):
        return _number(result, "the reward"), {}
    if key not in result:
        raise ValueError(f"the reward's dict has no key {key!r}, only {sorted(map(str, result))}")
    if bad := [name for name in map(str, result) if not name.isprintable() or not name]:
        raise ValueError(f"the reward's dict has the key {bad[0]!r}, which cannot name a metric")
    parts = {str(name): _number(value, f"part {name!r}") for name, value in result.items()}
    return parts[key], {name: value for name, value in parts.items() if value is not None}


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
        value = value.item()  # a numpy scalar, or an array without axes
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} is of type {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {float(value)}, not finite")
    return float(value)


def main(descriptor: int, names: tuple[str, ...], key: str, memory_mb: int, parent: int) -> None:
    """Serve the socket `descriptor` with the first reward of `names`, the others being there for rows that ask for
    them; never returns while the parent lives."""
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    os.set_inheritable(descriptor, False)  # a process that the user's function starts must not hold the socket open
    with socket.socket(fileno=descriptor) as connection:
        try:
            function = [_by_type(name) for name in names][0]
        except ValueError as error:
            connection.sendall(frame((UNUSABLE, str(error))))
            return
        connection.sendall(frame((READY,)))
        _serve(connection, function, key)


def _serve(connection: socket.socket, function: Callable[..., Any], key: str) -> None:
    own = os.getpid()
    with asyncio.Runner() as runner, connection.makefile("rb") as stream:
        while header := stream.read(HEADER.size):
            body = stream.read(HEADER.unpack(header)[0])
            reply = _score(function, body, key, runner)
            if os.getpid() != own:  # a child that the user's function forked and that came back: not the one to answer
                os._exit(0)
            connection.sendall(frame(reply))


def _score(function: Callable[..., Any], body: bytes, key: str, runner: asyncio.Runner) -> tuple[Any, ...]:
    try:
        samples = pickle.loads(body)
        if isinstance(samples, list):
            results = _call(function, samples, runner)
            if not isinstance(results, (list, tuple)) or len(results) != len(samples):
                raise ValueError(f"a group of {len(samples)} samples needs a list of as many rewards")
            return SCORED, [normalize(result, key) for result in results]
        if kind := samples.metadata.get("rm_type"):
            function = _by_type(kind)
        return SCORED, normalize(_call(function, samples, runner), key)
    except MemoryError as error:
        error.__traceback__ = None  # its frames hold what filled the memory, and the reply needs some
        gc.collect()
        return SPOILED, f"MemoryError {error}".strip()
    except BaseException as error:  # the boundary to the user's function: sys.exit() costs one sample too
        return FAILED, _describe(error)


def _call(function: Callable[..., Any], given: Any, runner: asyncio.Runner) -> Any:
    result = function(given)
    return runner.run(_awaited(result)) if inspect.isawaitable(result) else result


@functools.cache
def _by_type(kind: Any) -> Callable[..., Any]:
    """The reward that a row's own `metadata.rm_type` names."""
    return rewards.find(str(kind))


async def _awaited(result: Any) -> Any:
    return await result


def _describe(error: BaseException) -> str:
    """One line: type, message and the place it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500] + place


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the parent's thread that started it ends, even inside C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the request was in place
