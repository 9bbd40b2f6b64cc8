"""The host side of sampling: requests wait in a queue, slots and pages are given out between dispatches.

`submit` takes requests, `step` starts one dispatch and returns what the one before it finished, so that what the
caller does with those happens while the device decodes. `abort` takes requests out with what they have drawn; an
aborted request may be submitted again and goes on bit for bit as if it had never stopped, and so does one that had to
give its pages to older ones: their tokens are fed again. What older weights drew (`Request.stale`) is prefilled where
that should be faster, and again so later. Nothing here depends on time: the same calls give the same dispatches.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rljax import sharding
from rljax.sampler import requests as asked
from rljax.sampler.cache import Chunk
from rljax.sampler.decode import Drawn, Slots
from rljax.sampler.engine import Engine
from rljax.sampler.pages import Prompt
from rljax.sampler.prefill import Prefix
from rljax.sampler.requests import Request
from rljax.types import Params

__all__ = ["Request", "Scheduler", "complete"]

RESERVE = 8  # slots for which one page stays free when another enters
FindStop = Callable[[Sequence[int], tuple[str, ...], int], "tuple[int, str] | None"]


@dataclasses.dataclass
class Long:
    """What is prefilled chunk after chunk, one between two dispatches: a prompt, or a request's prompt and tokens."""

    tokens: Sequence[int]
    prefix: Prefix
    prompt: Prompt | None = None
    request: Request | None = None
    done: int = 0

    @property
    def complete(self) -> bool:
        return self.done >= len(self.tokens)


class Scheduler:
    """Continuous batching over one engine."""

    def __init__(self, engine: Engine, find_stop: FindStop | None = None):
        """`find_stop(tokens, stop, start)` finds a stop string that ends after `start` tokens: (tokens up to and with
        the one that completes it, text before it) or None."""
        self.engine, self.find_stop = engine, find_stop
        self.queue: collections.deque[Request] = collections.deque()
        self.slots: list[Request | None] = [None] * engine.config.slots
        self.tables, self.chunks = engine.tables(), list[Chunk]()
        self._clock = 0
        self._long: Long | None = None
        # A dispatch that runs, and whom it serves: (slot, request) of each row.
        self._flight: tuple[Drawn, list[tuple[int, Request]]] | None = None
        self._counts: collections.Counter[str] = collections.Counter()

    # --- in and out --------------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """Append all to the queue, or none: ValueError, naming the request and the numbers, where a context is empty
        or does not fit with its new tokens, a knob is out of range, or the uid is in flight already."""
        requests = list(requests)
        uids = {request.uid for request in [*self.queue, *self.slots] if request}
        for request in requests:
            asked.check(request, self.engine.config, self.engine.cfg.vocab_size)
            if request.params.stop and self.find_stop is None:
                raise ValueError(f"request {request.uid} has stop strings, but the scheduler has no tokenizer")
            if request.uid in uids:
                raise ValueError(f"request {request.uid}: another with this uid is in flight; uids are unique")
            uids.add(request.uid)
        for request in requests:
            request.end_reason, request.text, request.entered = "", None, 0
        self._enqueue(requests)

    @property
    def busy(self) -> int:
        """Requests in slots or waiting."""
        return len(self.queue) + sum(slot is not None for slot in self.slots)

    def step(self, params: Params) -> list[Request]:
        """Collect the dispatch that runs, refill slots, start the next; the requests that ended, in slot order."""
        finished = self._collect()
        if self.queue and not self.chunks:
            self.chunks = self.engine.chunks()
        self._refill(params)
        self._dispatch(params)
        self._forget_prompts()
        return finished

    def abort(self, uids: Iterable[int] | None = None) -> list[Request]:
        """Take requests (all by default) out of slots and queue, with what they had drawn before the dispatch that
        runs."""
        wanted = None if uids is None else set(uids)
        taken = []
        for index, request in enumerate(self.slots):
            if request and (wanted is None or request.uid in wanted):
                taken.append(request)
                self._leave(index)
        waiting = [r for r in self.queue if wanted is None or r.uid in wanted]
        kept = [r for r in self.queue if wanted is not None and r.uid not in wanted]
        self.queue.clear()
        self._enqueue(kept)
        for request in taken + waiting:
            request.end_reason = "abort"
            if self._long and self._long.request is request:
                self._long = None
        self._forget_prompts()
        return taken + waiting

    def release(self) -> None:
        """Give the cache's memory back; it is made anew when it is needed. Nothing may be in flight."""
        if self.busy:
            raise ValueError(f"{self.busy} requests are in flight: the cache is in use")
        self._flight, self.tables, self.chunks = None, self.engine.tables(), []

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call: tokens drawn, slots x steps, context tokens that a group shared, requests that
        gave up their pages, and dispatches."""
        names = ("drawn", "slot_steps", "shared_tokens", "preempted", "dispatches")
        counts = {name: self._counts[name] for name in names}
        self._counts.clear()
        return counts

    def _enqueue(self, requests: Sequence[Request], first: bool = False) -> None:
        for request in requests:
            request.taken, request.prompt = 0, tuple(request.context[:-1])
            request.prefilled = asked.worth_prefilling(request, self.engine.config)
            (self.queue.appendleft if first else self.queue.append)(request)

    def _forget_prompts(self) -> None:
        """Those who come when nobody is left may come with other weights. A prompt that is prefilled in part would
        also find nobody to complete it."""
        if not self.busy:
            self._long = None
            self.tables.drop()

    def _leave(self, index: int) -> None:
        """Free a slot and its pages."""
        self.slots[index] = None
        self.tables.leave(index)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _refill(self, params: Params) -> None:
        """Fill free slots from the queue. While others decode, at most one prefill program runs, so that they go on."""
        decoding, waiting = any(self.slots), list(itertools.islice(self.queue, len(self.slots)))
        if self._long and self._long.request and not any(self._long.request is request for request in waiting):
            self._long = None  # those who gave way came before it: they may need what it holds up
        # Prompts that nobody reads stay only for those who come next: the others may need the room.
        keep = {request.prompt for request in waiting}
        self.tables.drop(keep | ({self._long.prompt.tokens} if self._long and self._long.prompt else set()))
        self._join(params)
        while self.queue and None in self.slots:
            if self._long and not self._long.complete:
                self._extend(params)
            elif not (self._resume(params) or self._prefill(params)):
                return
            self._join(params)
            if decoding:
                return

    def _join(self, params: Params) -> None:
        """Let waiting requests whose prompt is stored take free slots, in the queue's order. One that needs many pages
        at once, for what was prefilled, is not overtaken."""
        left, placed = [], []
        while self.queue and None in self.slots and len(left) < len(self.slots):
            request = self.queue.popleft()
            ready = self._ready(request)
            if ready and self._has_pages(request):
                self._place(request, ready)
                placed.append(request)
                continue
            left.append(request)
            if ready and request.prefilled:
                break
        self.queue.extendleft(reversed(left))
        for request in placed:
            if request.params.prompt_logprobs and request.prompt_logprobs is None:
                request.prompt_logprobs = self.engine.prompt_logprobs(params, request.context)

    def _ready(self, request: Request) -> Prompt | None:
        """The stored prompt of a request that could enter if there were pages."""
        prompt = self.tables.find(request.prompt)
        loaded = self._long and self._long.request is request and self._long.complete
        return prompt if prompt and prompt.ready and (loaded or not request.prefilled) else None

    def _has_pages(self, request: Request) -> bool:
        # Some are left for those that decode, or the new one would soon have to give its page back.
        scarce = self.engine.pages[0] < len(self.slots) * self.engine.config.columns[0]
        reserve = sum(slot is not None for slot in self.slots) // RESERVE * scarce
        return len(self.tables.own_pool) > request.prefilled // self.engine.config.page + reserve

    def _place(self, request: Request, prompt: Prompt) -> None:
        index, shared = self.slots.index(None), prompt.readers > 0
        self.tables.join(index, prompt)
        if request.prefilled:
            pages, request.taken = self.tables.fill(index, request.prefilled), request.prefilled
            self.engine.insert_own(self.chunks, self._long.prefix, pages, len(request.prompt))
            self._long = None
        self.tables.grow(index)
        self._clock += 1
        self.slots[index], request.entered = request, request.entered or self._clock
        self._counts["shared_tokens"] += len(request.context) * shared

    def _prefill(self, params: Params) -> bool:
        """Store the prompts that wait longest, as many as one program takes, also some that come soon; False where none
        can be stored."""
        batch, first = list[Prompt](), 0
        for request in itertools.islice(self.queue, len(self.slots)):
            bucket = self.engine.bucket(len(request.context))
            rows = self.engine.rows(bucket)
            if self.tables.find(request.prompt) or (batch and (bucket != first or len(batch) == max(1, rows))):
                continue
            if rows == 0 and self._long:
                continue  # one at a time
            if (prompt := self.tables.store(request.prompt)) is None:
                break
            first = bucket
            batch.append(prompt)
        if not batch:
            return False
        if self.engine.rows(first) == 0:
            self._long = Long(batch[0].tokens, self.engine.long_prefix(), prompt=batch[0])
            self._extend(params)
            return True
        if any(prompt.tokens for prompt in batch):
            self._insert(self.engine.prefill(params, [prompt.tokens for prompt in batch], first), batch)
        for prompt in batch:
            prompt.ready = True
        return True

    def _resume(self, params: Params) -> bool:
        """Start to prefill the tokens of the request that waits for that longest; False where its prompt is not stored
        yet, or another is under way."""
        waiting = (r for r in itertools.islice(self.queue, len(self.slots)) if r.prefilled)
        request = next((r for r in waiting if self.tables.find(r.prompt)), None)
        if self._long or request is None:
            return False
        tokens = [*request.context, *request.tokens[: request.prefilled - 1]]
        self._long = Long(tokens, self.engine.long_prefix(resumed=True), request=request)
        self._extend(params)
        return True

    def _insert(self, prefix: Prefix, prompts: Sequence[Prompt]) -> None:
        self.engine.insert(self.chunks, prefix, [prompt.pages for prompt in prompts])

    def _extend(self, params: Params) -> None:
        """One more chunk of what is long; after its last a prompt is stored, and a request may take a slot."""
        job = self._long
        job.prefix = self.engine.extend(params, job.prefix, job.tokens, job.done)
        job.done += self.engine.config.prefill_chunk
        if job.complete and job.prompt:
            self._insert(job.prefix, [job.prompt])
            job.prompt.ready, self._long = True, None

    # --- dispatches --------------------------------------------------------------------------------------------------

    def _dispatch(self, params: Params) -> None:
        """Start a dispatch for the slots that are taken."""
        self._find_pages()
        served = [(index, request) for index, request in enumerate(self.slots) if request]
        if not served:
            return
        rows = next(n for n in self.engine.row_counts if n >= len(served))
        slots, forced = Slots.idle(rows), np.full((rows, self.engine.config.steps_per_dispatch), -1, np.int32)
        for row, (_, request) in enumerate(served):
            asked.fill(slots, row, request)
            known = request.tokens[request.taken : request.taken + forced.shape[1]]
            forced[row, : len(known)] = known
        tables = self.tables.of([index for index, _ in served], rows)
        self._flight = (self.engine.generate(params, self.chunks, slots, tables, forced), served)
        self._counts["dispatches"] += 1

    def _find_pages(self) -> None:
        """A page for what each slot writes next, for the oldest first; where none is left, the youngest gives way. It
        keeps its age: else one that had to wait for many pages would always be the youngest."""
        for index in sorted((i for i, r in enumerate(self.slots) if r), key=lambda i: self.slots[i].entered):
            while self.slots[index] and not self.tables.grow(index):
                youngest = max((i for i, r in enumerate(self.slots) if r), key=lambda i: self.slots[i].entered)
                request = self.slots[youngest]
                self._enqueue([request], first=True)
                self._leave(youngest)
                self._counts["preempted"] += 1

    def _collect(self) -> list[Request]:
        """Wait for the dispatch that runs and take over what it gave; the requests that ended leave their slots."""
        if self._flight is None:
            return []
        (drawn, served), self._flight = self._flight, None
        drawn = sharding.to_host(drawn)
        counts, tokens, logprobs = drawn.counts.tolist(), drawn.tokens.tolist(), drawn.logprobs.tolist()
        self._counts["slot_steps"] += max(counts) * len(counts)
        finished = []
        for row, (index, request) in enumerate(served):
            if self.slots[index] is not request:
                continue  # aborted meanwhile
            count = counts[row]
            self._extend_request(request, tokens[row][:count], logprobs[row][:count])
            if request.params.top_logprobs:
                self._add_top(request, drawn.top_ids[row, :count], drawn.top_logprobs[row, :count])
            self.tables.own_len[index] += len(tokens[row])
            if request.end_reason:
                finished.append(request)
                self._leave(index)
        return finished

    def _add_top(self, request: Request, ids: np.ndarray, logprobs: np.ndarray) -> None:
        most, known = request.params.top_logprobs, len(request.top)
        pairs = zip(ids[:, :most].tolist(), logprobs[:, :most].tolist(), strict=True)
        rows = [list(zip(*pair, strict=True)) for pair in pairs]
        request.top.extend(rows[known - request.taken + len(rows) :])
        del request.top[len(request.tokens) :]

    def _extend_request(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        """Add what a dispatch gave, less what the request had already, and say in `end_reason` if it ended."""
        before, start = len(request.tokens), request.taken
        request.tokens.extend(tokens[before - start :])
        request.logprobs.extend(logprobs[len(request.logprobs) - start :])
        request.taken += len(tokens)
        self._counts["drawn"] += len(request.tokens) - before
        if len(request.tokens) > before:
            request.end_reason = self._end_reason(request, before)
        elif request.taken >= request.params.max_new_tokens:
            request.end_reason = "length"

    def _end_reason(self, request: Request, before: int) -> str:
        """Why the request ended ("" if it goes on). A stop string cuts what was drawn after it."""
        p, start = request.params, max(before, request.params.min_new_tokens)
        if p.stop and start < len(request.tokens) and (found := self.find_stop(request.tokens, p.stop, start)):
            count, request.text = found
            del request.tokens[count:], request.logprobs[count:]
            return "stop"
        if request.tokens[-1] in self.engine.config.stop_ids:
            return "stop"
        return "length" if len(request.tokens) >= p.max_new_tokens else ""


def complete(scheduler: Scheduler, params: Params, requests: Sequence[Request]) -> list[Request]:
    """Run `requests` to their ends, in their order."""
    scheduler.submit(requests)
    while scheduler.busy:
        scheduler.step(params)
    return list(requests)
