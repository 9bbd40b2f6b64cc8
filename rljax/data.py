"""Stage 1 of 7: prompts. Rows of JSONL, Parquet or a data set become the prompt side of `Sample`s, in a fixed order.

The order of an epoch comes from a hash of (seed, epoch) alone, every process holds the same source, and its place is
a small dict: a restored source continues with exactly the next prompt.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from rljax import records
from rljax.sample import Sample
from rljax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHUNK = 1024  # prompts encoded at once


class PromptSource:
    """Prompts of `prompt_data` for ever, epoch after epoch.

    prompt_data: a JSONL, Parquet or Arrow file, a folder of those, a hub data set `owner/name` (a folder or file
    pattern inside it may follow: `owner/name/main/test-*`), `builtin:PATH` inside the package; `@[a:b]` after any of
    them takes rows a to b as Python does. Prompts are text or lists of chat messages; with `chat_template` and a
    tokenizer that has one, text becomes a user message. Labels stay as they stand; an empty `label_key` means that
    there are none. `metadata_key` and `tool_key` are optional in a row (objects and lists, or the same as JSON text);
    tools reach the chat template and `metadata["tools"]`. `prompt_suffix` is put behind every prompt. With
    `conversations` a row's messages are a whole chat, for supervised training: its response is all from the first
    assistant turn on, and its loss mask is 1 on what the assistant says.

    num_rows: rows that are drawn, i.e. whose rendered prompt has at most `max_prompt_len` tokens (counted with
    everything the template adds); dropped: how many were longer. epoch: how often all rows were drawn.
    Raises ValueError naming the file, line and key for anything that cannot be read.
    """

    def __init__(self, prompt_data: str, tokenizer: Tokenizer, *, max_prompt_len: int, input_key: str = "prompt",
                 label_key: str = "label", metadata_key: str = "metadata", tool_key: str = "tools",
                 shuffle: bool = True, seed: int = 42, chat_template: bool = True, prompt_suffix: str = "",
                 conversations: bool = False):
        if max_prompt_len < 1:
            raise ValueError(f"max_prompt_len {max_prompt_len} is below 1: no prompt fits")
        self.prompt_data, self.shuffle, self.seed = prompt_data, shuffle, seed
        self.sources = [self]  # as of a mixture
        keys = records.Keys(input_key, label_key, metadata_key, tool_key, prompt_suffix)
        found, self.fingerprint = records.read(prompt_data, keys)
        rows = [keys.row(place, record) for place, record in found]
        if conversations:
            _split_conversations(rows, tokenizer)
        else:
            _tokenize(rows, tokenizer, chat_template)
        self._rows = [row for row in rows if len(row.tokens) <= max_prompt_len]
        self.num_rows, self.dropped = len(self._rows), len(rows) - len(self._rows)
        if not self._rows:
            raise ValueError(f"{prompt_data}: all {len(rows)} prompts are longer than max_prompt_len {max_prompt_len} "
                             f"tokens: the shortest has {min(len(row.tokens) for row in rows)}")
        if self.dropped:
            log.warning("%s: dropped %d of %d prompts that are longer than max_prompt_len %d tokens (the longest has "
                        "%d)", prompt_data, self.dropped, len(rows), max_prompt_len,
                        max(len(row.tokens) for row in rows))
        self.largest_id = max(max(int(row.tokens.max()), *row.response, 0) for row in self._rows)
        self.epoch, self._index = 0, 0
        self._order = epoch_order(self.num_rows, seed, 0, shuffle)

    def take(self, n: int) -> list[Sample]:
        """The next n prompts, one new `Sample` each; an epoch's short end is completed from the next epoch."""
        samples = []
        for _ in range(n):
            samples.append(self._sample(self._rows[int(self._order[self._index])]))
            self._index += 1
            if self._index == self.num_rows:
                self._go(self.epoch + 1, 0)
        return samples

    def state(self) -> dict[str, Any]:
        """Where the source stands, as JSON values: `restore` it to continue with the next prompt."""
        return {"epoch": self.epoch, "index": self._index, "num_rows": self.num_rows, "seed": self.seed,
                "shuffle": self.shuffle, "fingerprint": self.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Changed data is said in a warning, and the run goes on at that place.

        Raises ValueError for a state with a missing or impossible entry, or of another seed or order.
        """
        if "sources" in state:
            raise ValueError(f"the saved place is of {len(state['sources'])} sources, data.prompt_data has 1")
        if missing := sorted(self.state().keys() - state.keys()):
            raise ValueError(f"the saved place in {self.prompt_data} lacks {', '.join(missing)}")
        for key in ("seed", "shuffle"):
            if state[key] != getattr(self, key):
                raise ValueError(f"the saved place in {self.prompt_data} is of data.{key} {state[key]}, not "
                                 f"{getattr(self, key)}: its order cannot be continued")
        epoch, index, rows = state["epoch"], state["index"], state["num_rows"]
        if epoch < 0 or not 0 <= index < rows:
            raise ValueError(f"the saved place in {self.prompt_data} is impossible: epoch {epoch}, index {index} of "
                             f"{rows} rows")
        self._go(*((epoch, index) if index < self.num_rows else (epoch + 1, 0)))  # a shorter file: its next epoch
        if (state["fingerprint"], rows) != (self.fingerprint, self.num_rows):
            log.warning("%s changed since the checkpoint: fingerprint %s with %d prompts then, %s with %d now; going "
                        "on in epoch %d after %d prompts", self.prompt_data, state["fingerprint"], rows,
                        self.fingerprint, self.num_rows, self.epoch, self._index)

    def _go(self, epoch: int, index: int) -> None:
        if epoch != self.epoch:
            self._order = epoch_order(self.num_rows, self.seed, epoch, self.shuffle)
        self.epoch, self._index = epoch, index

    def _sample(self, row: records.Row) -> Sample:
        """A sample that shares nothing with the source, so that hooks may write into it."""
        metadata = dict(row.metadata) if row.tools is None else {**row.metadata, "tools": row.tools}
        return Sample(prompt=copy.deepcopy(row.prompt), label=copy.deepcopy(row.label),
                      metadata=copy.deepcopy(metadata), prompt_tokens=row.tokens.tolist(),
                      response_tokens=list(row.response), loss_mask=list(row.loss_mask))


class Mixture:
    """Prompts of several sources in fixed shares, each in its own order: a source itself.

    The next prompt is always of the source that is furthest behind its share, so that any stretch is mixed like the
    whole, and the place is the sources' places.
    """

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]):
        """`weights` are the sources' shares of the prompts, above 0 and of any sum."""
        self.sources, self.weights = list(sources), [weight / sum(weights) for weight in weights]
        self.prompt_data = " + ".join(source.prompt_data for source in sources)
        self.num_rows = sum(source.num_rows for source in sources)
        self.dropped = sum(source.dropped for source in sources)
        self.largest_id = max(source.largest_id for source in sources)
        self._taken = [0] * len(sources)

    def take(self, n: int) -> list[Sample]:
        """The next n prompts, one new `Sample` each."""
        samples = []
        for _ in range(n):
            total = sum(self._taken) + 1
            behind = [weight * total - taken for weight, taken in zip(self.weights, self._taken, strict=True)]
            chosen = behind.index(max(behind))
            self._taken[chosen] += 1
            samples += self.sources[chosen].take(1)
        return samples

    def state(self) -> dict[str, Any]:
        """Where the sources stand, as JSON values."""
        return {"taken": list(self._taken), "sources": [source.state() for source in self.sources]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; ValueError where it is of another number of sources."""
        places = state.get("sources", ())
        if len(places) != len(self.sources):
            raise ValueError(f"the saved place is of {len(places) or 1} sources, data.prompt_data has "
                             f"{len(self.sources)}")
        self._taken = list(state["taken"])
        for source, place in zip(self.sources, state["sources"], strict=True):
            source.restore(place)


def parse_mixture(prompt_data: str) -> list[tuple[float, str]]:
    """`0.7*a.jsonl + 0.3*b.jsonl` as (weight, path) pairs; a path without a weight has 1. ValueError for a weight that
    is not above 0."""
    parts = []
    for part in prompt_data.split(" + "):
        weight, star, path = part.strip().partition("*")
        weighted = bool(star) and re.fullmatch(r"[\d.]+(e[-+]?\d+)?", weight) is not None
        try:
            share = float(weight) if weighted else 1.0
        except ValueError:
            share = 0.0
        if not 0 < share < math.inf or (weighted and not path):
            raise ValueError(f"data.prompt_data: {part.strip()!r} is not of the form weight*path with a weight above 0")
        parts.append((share, path.strip() if weighted else part.strip()))
    return parts


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> grain.MapDataset:
    """Row numbers of one epoch, by position: a permutation of range(num_rows), through grain.

    grain mixes (seed + epoch) mod 2^32, in which seed 42 in epoch 1 repeats seed 43 in epoch 0, so it gets 32 bits of
    SHA-256 of both instead.
    """
    rows = grain.MapDataset.range(num_rows)
    if not shuffle:
        return rows
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return rows.shuffle(seed=int.from_bytes(digest[:4], "little"))


def _tokenize(rows: list[records.Row], tokenizer: Tokenizer, chat_template: bool) -> None:
    """Fill in every row's tokens, in chunks; an error names the row."""
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start: start + CHUNK]
        try:
            encoded = _encode(chunk, tokenizer, chat_template)
        except ValueError:
            for row in chunk:
                _encode_one(row, tokenizer, chat_template)
            raise
        for row, ids in zip(chunk, encoded, strict=True):
            if not ids:
                raise ValueError(f"{row.place}: the prompt {row.prompt!r} has no tokens")
            row.tokens = np.asarray(ids, np.int32)


def _split_conversations(rows: list[records.Row], tokenizer: Tokenizer) -> None:
    """Fill in every row's tokens, response and loss mask from its chat."""
    for row in rows:
        if isinstance(row.prompt, str):
            raise ValueError(f"{row.place}: supervised data without labels (data.label_key='') needs lists of chat "
                             f"messages with assistant turns, not text")
        try:
            ids, mask = tokenizer.conversation(row.prompt, row.tools)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
        first = mask.index(1)
        last = len(mask) - mask[::-1].index(1)
        row.tokens, row.response, row.loss_mask = np.asarray(ids[:first], np.int32), ids[first:last], mask[first:last]


def _encode_one(row: records.Row, tokenizer: Tokenizer, chat_template: bool) -> None:
    try:
        _encode([row], tokenizer, chat_template)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error


def _encode(rows: list[records.Row], tokenizer: Tokenizer, chat_template: bool) -> list[list[int]]:
    """Prompt ids: rendered chats get nothing added, plain text the start token that the tokenizer itself adds."""
    if not chat_template or not tokenizer.has_chat_template:
        chats = [row for row in rows if not isinstance(row.prompt, str)]
        if chats:
            why = "the tokenizer has no chat template" if chat_template else "model.chat_template is False"
            raise ValueError(f"the prompt is a list of chat messages, but {why}")
        return tokenizer.encode_prompts([row.prompt for row in rows])
    texts = []
    for row in rows:
        chat = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        texts.append(tokenizer.render(chat, tools=row.tools))
    return tokenizer.encode_batch(texts)
