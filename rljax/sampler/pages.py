"""The host side of the cache: which pages each slot reads. The keys and values themselves are `cache.py`'s.

Pages are handed out lowest first, so that what is in use lies in the first chunks of a pool.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Container, Sequence

import numpy as np

from rljax.sampler.cache import Tables


@dataclasses.dataclass
class Prompt:
    """A stored prompt: all tokens but the last, which decoding feeds."""

    tokens: tuple[int, ...]
    pages: list[int]
    members: list[int | None]  # slots that read it, by member number
    ready: bool = False  # written: slots may join

    def __post_init__(self):
        self.key = hash(self.tokens)

    @property
    def readers(self) -> int:
        """How many slots read it."""
        return len(self.members) - self.members.count(None)


class Pool:
    """Free pages of one pool."""

    def __init__(self, pages: int):
        self.pages, self._free = pages, list(range(pages))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The `count` lowest free pages; there must be as many."""
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """They are free again."""
        for page in pages:
            heapq.heappush(self._free, int(page))


class PageTables:
    """Two pools, the stored prompts, and the slots' tables (see `cache.Tables`)."""

    def __init__(self, slots: int, own_pages: int, prompt_pages: int, columns: tuple[int, int], members: int,
                 size: int):
        """columns: most pages of one slot, own and of its prompt; size: positions of a page, P."""
        self.own_pool, self.prompt_pool, self.size, self.members = Pool(own_pages), Pool(prompt_pages), size, members
        self.own = np.full((slots, columns[0]), -1, np.int32)
        self.prompt = np.full((slots, columns[1]), -1, np.int32)
        self.own_len, self.prompt_len, self.member = (np.zeros(slots, np.int32) for _ in range(3))
        self.prompts: list[Prompt] = []
        self._reads: list[Prompt | None] = [None] * slots

    def store(self, tokens: tuple[int, ...]) -> Prompt | None:
        """Pages for a prompt (all tokens but the last), not ready yet; None where too few are free."""
        count = -(-len(tokens) // self.size)
        if count > len(self.prompt_pool):
            return None
        self.prompts.append(Prompt(tokens, self.prompt_pool.take(count), [None] * self.members))
        return self.prompts[-1]

    def find(self, tokens: tuple[int, ...]) -> Prompt | None:
        """A stored copy of the prompt that another member can read, now or once it is ready."""
        key = hash(tokens)  # prompts often begin alike: to compare with them all takes long
        return next((p for p in self.prompts if p.key == key and None in p.members and p.tokens == tokens), None)

    def drop(self, keep: Container[tuple[int, ...]] = ()) -> None:
        """Free the prompts that no slot reads and `keep` does not name."""
        kept = []
        for prompt in self.prompts:
            if prompt.readers or prompt.tokens in keep:
                kept.append(prompt)
            else:
                self.prompt_pool.give(prompt.pages)
        self.prompts = kept

    def join(self, slot: int, prompt: Prompt) -> None:
        """Let the slot read a stored prompt that has a place for another member."""
        number = prompt.members.index(None)
        prompt.members[number], self._reads[slot] = slot, prompt
        self.prompt[slot, : len(prompt.pages)] = prompt.pages
        self.prompt_len[slot], self.member[slot], self.own_len[slot] = len(prompt.tokens), number, 0

    def fill(self, slot: int, length: int) -> list[int]:
        """`length` positions of the slot's own are filled from the start; the pages that hold them."""
        count = -(-length // self.size)
        self.own[slot, :count], self.own_len[slot] = self.own_pool.take(count), length
        return self.own[slot, :count].tolist()

    def grow(self, slot: int) -> bool:
        """A page for what the next dispatch writes; False where none is free."""
        column = self.own_len[slot] // self.size
        if self.own[slot, column] >= 0:
            return True
        if not len(self.own_pool):
            return False
        self.own[slot, column] = self.own_pool.take(1)[0]
        return True

    def leave(self, slot: int) -> None:
        """Free the slot's own pages and its place among the members."""
        self.own_pool.give(self.own[slot][self.own[slot] >= 0])
        members = self._reads[slot].members
        members[members.index(slot)] = None
        self.own[slot], self.prompt[slot], self._reads[slot] = -1, -1, None
        self.own_len[slot] = self.prompt_len[slot] = self.member[slot] = 0

    def of(self, slots: Sequence[int], rows: int) -> Tables:
        """The tables of these slots, for a program of `rows` slots; the others read nothing."""

        def pick(whole, idle):
            part = np.full((rows, *whole.shape[1:]), idle, np.int32)
            part[: len(slots)] = whole[list(slots)]
            return part

        return Tables(pick(self.own, -1), pick(self.own_len, 0), pick(self.prompt, -1), pick(self.prompt_len, 0),
                      pick(self.member, 0))
