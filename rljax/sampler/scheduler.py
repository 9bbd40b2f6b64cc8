"""The host side of sampling: requests wait in a queue, slots are refilled between dispatches.

`submit` takes requests, `step` runs one dispatch and returns what finished, `abort` takes requests out with what
they have drawn; an aborted request may be submitted again and goes on bit for bit as if it had never stopped.
Nothing here depends on time: the same requests in the same order give the same dispatches.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from rljax.sample import SamplingParams
from rljax.sampler.engine import Engine
from rljax.sampler.sampling import Knobs
from rljax.types import Params

FindStop = Callable[[Sequence[int], tuple[str, ...], int], "tuple[int, str] | None"]
LEAST_TEMPERATURE = 1e-6  # below it the quotient overflows float32; 0 is greedy
MOST_TOP_K = 2**31 - 1
MOST_UID = 2**32 - 1  # the random key folds in 32 bits


@dataclasses.dataclass
class Request:
    """One sequence: the prompt `context`, and `tokens` drawn so far, at most params.max_new_tokens.

    Tokens that are there on submission are taken over and fed to the model again, before new ones are drawn; where
    their log-probs are there they stay too, and those that are missing are filled in.
    """

    uid: int
    context: list[int]
    params: SamplingParams
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # nats
    end_reason: str = ""  # stop, length, abort; "" while it runs
    text: str | None = None  # what stands before the stop string that ended it
    taken: int = dataclasses.field(default=0, repr=False)  # tokens of this one that its slot has behind it


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
        """Append all to the queue, or none: ValueError, naming the request and the numbers, where a context is empty
        or does not fit with its new tokens, a knob is out of range, or the uid is in flight already."""
        requests = list(requests)
        uids = {request.uid for request in [*self.queue, *self.slots] if request}
        for request in requests:
            _check_request(request)
            self._check_fit(request)
            if request.uid in uids:
                raise ValueError(f"request {request.uid}: another with this uid is in flight; uids are unique")
            uids.add(request.uid)
        for request in requests:
            request.end_reason, request.text, request.taken = "", None, 0
        self.queue.extend(requests)

    def _check_fit(self, request: Request) -> None:
        context, new, cache = len(request.context), request.params.max_new_tokens, self.engine.config.cache_len
        if context + new > cache:
            raise ValueError(f"request {request.uid}: {context} context + {new} new tokens exceed the cache of {cache} "
                             f"(sampler.length_buckets)")
        if request.params.stop and self.find_stop is None:
            raise ValueError(f"request {request.uid} has stop strings, but the scheduler has no tokenizer")
        vocab = self.engine.cfg.vocab_size
        least, most = min(*request.context, *request.tokens, 0), max(*request.context, *request.tokens, 0)
        if least < 0 or most >= vocab:
            bad = least if least < 0 else most
            raise ValueError(f"request {request.uid}: token {bad} is none of the model's {vocab}")
        self.engine.bucket(context)

    @property
    def busy(self) -> int:
        """Requests in slots or waiting."""
        return len(self.queue) + sum(slot is not None for slot in self.slots)

    def step(self, params: Params) -> list[Request]:
        """Refill free slots, run one dispatch, return the requests that ended, in slot order."""
        self._refill(params)
        if not any(self.slots):
            return []
        self.state, *outputs = self.engine.generate(params, self.state, self._forced())
        tokens, logprobs, counts = (part.tolist() for part in jax.device_get(outputs))
        self.dispatches += 1
        self.slot_steps += max(counts) * len(self.slots)
        finished, stopped = [], []
        for index, request in enumerate(self.slots):
            if request is None:
                continue
            self._extend(request, tokens[index][: counts[index]], logprobs[index][: counts[index]])
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

    def _forced(self) -> np.ndarray | None:
        """The tokens of the next dispatch that requests have already, [S, steps], -1 elsewhere; None without any."""
        steps = self.engine.config.steps_per_dispatch
        forced = None
        for index, request in enumerate(self.slots):
            if request and request.taken < len(request.tokens):
                forced = np.full((len(self.slots), steps), -1, np.int32) if forced is None else forced
                known = request.tokens[request.taken : request.taken + steps]
                forced[index, : len(known)] = known
        return forced

    def _extend(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        """Add what a dispatch gave, less what the request had already, and say in `end_reason` if it ended."""
        before, start = len(request.tokens), request.taken
        request.tokens.extend(tokens[before - start :])
        request.logprobs.extend(logprobs[len(request.logprobs) - start :])
        request.taken += len(tokens)
        self.drawn += len(request.tokens) - before
        if len(request.tokens) > before:
            request.end_reason = self._end_reason(request, before)
        elif request.taken >= request.params.max_new_tokens:
            request.end_reason = "length"

    def _end_reason(self, request: Request, before: int) -> str:
        """Why the request ended ("" if it goes on). A stop string cuts what was drawn after it."""
        if request.params.stop and (found := self.find_stop(request.tokens, request.params.stop, before)):
            count, request.text = found
            del request.tokens[count:], request.logprobs[count:]
            return "stop"
        if request.tokens[-1] in self.engine.config.stop_ids:
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
        for bucket, by_context in sorted(entering.items()):
            contexts, rows = list(by_context), self.engine.rows(bucket)
            for start in range(0, len(contexts), rows):
                part = contexts[start : start + rows]
                self._enter(params, part, [by_context[context] for context in part])

    def _enter(self, params: Params, contexts: list[tuple[int, ...]], members: list[list[tuple[int, Request]]]) -> None:
        """Prefill `contexts` and insert row r into the slots of members[r]."""
        count = len(self.slots)
        source, uids = np.full(count, -1, np.int32), np.zeros(count, np.uint32)
        tokens, positions, remaining = (np.zeros(count, np.int32) for _ in range(3))
        knobs = Knobs(np.zeros(count, np.float32), np.zeros(count, np.int32), *np.zeros((2, count), np.float32))
        for row, entries in enumerate(members):
            self.shared_tokens += len(contexts[row]) * (len(entries) - 1)
            for index, request in entries:
                p = request.params
                source[index], uids[index] = row, request.uid
                tokens[index], positions[index] = request.context[-1], len(request.context) - 1
                remaining[index] = p.max_new_tokens
                knobs.temperature[index], knobs.top_k[index] = p.temperature, p.top_k
                knobs.top_p[index], knobs.min_p[index] = p.top_p, p.min_p
        prefix = self.engine.prefill(params, contexts)
        slots = {"tokens": tokens, "positions": positions, "remaining": remaining, "knobs": knobs}
        self.state = self.engine.insert(self.state, prefix, source, uids, slots)


def _check_request(request: Request) -> None:
    """Raise ValueError for what no engine can draw."""
    uid, p = request.uid, request.params
    if not request.context or p.max_new_tokens < 1:
        raise ValueError(f"request {uid}: {len(request.context)} context tokens and max_new_tokens {p.max_new_tokens}; "
                         f"both must be at least 1")
    if not 0 <= uid <= MOST_UID:
        raise ValueError(f"request {uid}: a uid is between 0 and {MOST_UID}")
    if len(request.logprobs) > len(request.tokens) or len(request.tokens) > p.max_new_tokens:
        raise ValueError(f"request {uid}: {len(request.logprobs)} log-probs for {len(request.tokens)} tokens, and "
                         f"max_new_tokens {p.max_new_tokens}; each is at most the next")
    if p.temperature != 0 and not LEAST_TEMPERATURE <= p.temperature < math.inf:
        raise ValueError(f"request {uid}: temperature {p.temperature} is neither 0 (greedy) nor a number from "
                         f"{LEAST_TEMPERATURE} on")
    if not 0 < p.top_p <= 1 or not 0 <= p.min_p <= 1:
        raise ValueError(f"request {uid}: top_p {p.top_p} must be above 0 and at most 1, min_p {p.min_p} from 0 to 1")
    if not -1 <= p.top_k <= MOST_TOP_K:
        raise ValueError(f"request {uid}: top_k {p.top_k} is neither -1 or 0 (off) nor from 1 to {MOST_TOP_K}")


def complete(scheduler: Scheduler, params: Params, requests: Sequence[Request]) -> list[Request]:
    """Run `requests` to their ends, in their order."""
    scheduler.submit(requests)
    while scheduler.busy:
        scheduler.step(params)
    return list(requests)
