"""The host side of sampling: requests wait in a queue, slots are refilled between dispatches.

`submit` takes requests, `step` runs one dispatch and returns what finished, `abort` takes requests out with what
they have drawn. Nothing here depends on time: the same requests in the same order give the same dispatches.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from rljax.sample import SamplingParams
from rljax.sampler.engine import Engine
from rljax.types import Params

FindStop = Callable[[Sequence[int], tuple[str, ...], int], "tuple[int, str] | None"]


@dataclasses.dataclass
class Request:
    """One sequence to continue: `context` is the prompt and what an earlier part already drew."""

    uid: int
    context: list[int]
    params: SamplingParams
    tokens: list[int] = dataclasses.field(default_factory=list)  # drawn here
    logprobs: list[float] = dataclasses.field(default_factory=list)  # nats
    end_reason: str = ""  # stop, length, abort; "" while it runs
    text: str | None = None  # what stands before the stop string that ended it


class Scheduler:
    """Continuous batching over one engine."""

    def __init__(self, engine: Engine, find_stop: FindStop | None = None):
        """`find_stop(tokens, stop, start)` finds a stop string that ends after `start` tokens: (tokens up to and with
        the one that completes it, text before it) or None."""
        self.engine, self.find_stop = engine, find_stop
        self.queue: collections.deque[Request] = collections.deque()
        self.slots: list[Request | None] = [None] * engine.config.slots
        self.state = engine.fresh_state()
        self.dispatches = self.drawn = self.slot_steps = self.shared_tokens = 0

    def submit(self, requests: Iterable[Request]) -> None:
        """Append to the queue. ValueError where a context is empty or does not fit with its new tokens."""
        for request in requests:
            total = len(request.context) + request.params.max_new_tokens
            if not request.context or request.params.max_new_tokens < 1:
                raise ValueError(f"request {request.uid}: {len(request.context)} context tokens and "
                                 f"max_new_tokens {request.params.max_new_tokens}; both must be at least 1")
            if total > self.engine.config.cache_len:
                raise ValueError(f"request {request.uid}: {len(request.context)} context + "
                                 f"{request.params.max_new_tokens} new tokens exceed the cache of "
                                 f"{self.engine.config.cache_len} (sampler.length_buckets)")
            if request.params.stop and self.find_stop is None:
                raise ValueError(f"request {request.uid} has stop strings, but the scheduler has no tokenizer")
            self.engine.bucket(len(request.context))
            self.queue.append(request)

    @property
    def busy(self) -> int:
        """Requests in slots or waiting."""
        return len(self.queue) + sum(slot is not None for slot in self.slots)

    def step(self, params: Params) -> list[Request]:
        """Refill free slots, run one dispatch, return the requests that ended, in slot order."""
        self._refill(params)
        if not any(self.slots):
            return []
        filtered = any(slot and _filters(slot.params) for slot in self.slots)
        self.state, *outputs = self.engine.generate(params, self.state, filtered)
        tokens, logprobs, counts = jax.device_get(outputs)
        self.dispatches += 1
        self.slot_steps += int(counts.max()) * len(self.slots)
        finished, stopped = [], []
        for index, request in enumerate(self.slots):
            if request is None:
                continue
            count = int(counts[index])
            self.drawn += count
            request.tokens.extend(tokens[index, :count].tolist())
            request.logprobs.extend(logprobs[index, :count].tolist())
            request.end_reason = self._end_reason(request, count)
            if request.end_reason:
                finished.append(request)
                self.slots[index] = None
                if not self._ended_on_device(request):
                    stopped.append(index)
        self._free(stopped)
        return finished

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call: tokens drawn, slots x steps, and context tokens that a group shared."""
        counts = {"drawn": self.drawn, "slot_steps": self.slot_steps, "shared_tokens": self.shared_tokens}
        self.drawn = self.slot_steps = self.shared_tokens = 0
        return counts

    def abort(self, uids: Iterable[int] | None = None) -> list[Request]:
        """Take requests (all by default) out of slots and queue, with what they have drawn."""
        wanted = None if uids is None else set(uids)
        taken, indices = [], []
        for index, request in enumerate(self.slots):
            if request and (wanted is None or request.uid in wanted):
                taken.append(request)
                indices.append(index)
                self.slots[index] = None
        self._free(indices)
        waiting = [r for r in self.queue if wanted is None or r.uid in wanted]
        self.queue = collections.deque(r for r in self.queue if wanted is not None and r.uid not in wanted)
        for request in taken + waiting:
            request.end_reason = "abort"
        return taken + waiting

    def _end_reason(self, request: Request, new: int) -> str:
        """Why the request ended ("" if it goes on). A stop string cuts what was drawn after it."""
        before = len(request.tokens) - new
        if request.params.stop and (found := self.find_stop(request.tokens, request.params.stop, before)):
            count, request.text = found
            del request.tokens[count:], request.logprobs[count:]
            return "stop"
        if request.tokens and request.tokens[-1] in self.engine.config.stop_ids:
            return "stop"
        return "length" if len(request.tokens) >= request.params.max_new_tokens else ""

    def _ended_on_device(self, request: Request) -> bool:
        """Whether the device knows that the slot is idle: it does not know of stop strings."""
        at_end = request.tokens[-1] in self.engine.config.stop_ids
        return at_end or len(request.tokens) >= request.params.max_new_tokens

    def _free(self, indices: list[int]) -> None:
        """Mark slots idle on the device, so that the early exit is not kept waiting."""
        if indices:
            keep = np.ones(len(self.slots), np.int32)
            keep[indices] = 0
            self.state = self.engine.keep(self.state, keep)

    def _refill(self, params: Params) -> None:
        """Fill free slots from the queue; requests with the same context share one prefill row."""
        free = [index for index, slot in enumerate(self.slots) if slot is None]
        entering: dict[int, dict[tuple[int, ...], list[tuple[int, Request]]]] = {}
        for index in free[: len(self.queue)]:
            request = self.queue.popleft()
            self.slots[index] = request
            by_context = entering.setdefault(self.engine.bucket(len(request.context)), {})
            by_context.setdefault(tuple(request.context), []).append((index, request))
        rows = self.engine.config.prefill_rows
        for _, by_context in sorted(entering.items()):
            contexts = list(by_context)
            for start in range(0, len(contexts), rows):
                part = contexts[start : start + rows]
                self._enter(params, part, [by_context[context] for context in part])

    def _enter(self, params: Params, contexts: list[tuple[int, ...]], members: list[list[tuple[int, Request]]]) -> None:
        """Prefill `contexts` and insert row r into the slots of members[r]."""
        count = len(self.slots)
        source, uids = np.full(count, -1, np.int32), np.zeros(count, np.uint32)
        slots = {name: np.zeros(count, np.int32) for name in ("tokens", "positions", "remaining", "top_k")}
        slots |= {name: np.zeros(count, np.float32) for name in ("temperature", "top_p", "min_p")}
        for row, entries in enumerate(members):
            self.shared_tokens += len(contexts[row]) * (len(entries) - 1)
            for index, request in entries:
                p = request.params
                source[index], uids[index] = row, request.uid
                slots["tokens"][index] = request.context[-1]
                slots["positions"][index] = len(request.context) - 1
                slots["remaining"][index] = p.max_new_tokens
                slots["temperature"][index], slots["top_k"][index] = p.temperature, p.top_k
                slots["top_p"][index], slots["min_p"][index] = p.top_p, p.min_p
        prefix = self.engine.prefill(params, contexts)
        self.state = self.engine.insert(self.state, prefix, source, uids, slots)


def _filters(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def complete(scheduler: Scheduler, params: Params, requests: Sequence[Request]) -> list[Request]:
    """Run `requests` to their ends, in their order."""
    scheduler.submit(requests)
    while scheduler.busy:
        scheduler.step(params)
    return list(requests)
