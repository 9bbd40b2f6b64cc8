"""Stage 1 of 7: prompts. Rows of JSONL, Parquet or a data set become the prompt side of `Sample`s, in a fixed order.

The order of an epoch comes from a hash of (seed, epoch) alone, every process holds the same source, and its place is
a small dict: a restored source continues with exactly the next prompt.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import fnmatch
import hashlib
import json
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import grain
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet

from rljax import hub
from rljax.sample import Sample
from rljax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BUILTIN_PREFIX = "builtin:"
SUFFIXES = (".jsonl", ".parquet", ".arrow")  # what is taken from a folder
SLICE = re.compile(r"(.*)@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]", re.DOTALL)
SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?:ing)?(?![a-z])")  # in file names
SHARD = re.compile(r"[0-9a-f]{16}|[0-9]+")  # what differs between the shards of one data set
CHUNK = 1024  # prompts encoded at once


@dataclasses.dataclass
class Row:
    """One row of the data: where it stands (for messages), its fields, and its rendered prompt."""

    place: str  # file and line or row, counted from 1
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    tokens: np.ndarray | None = None  # [prompt length] int32


class PromptSource:
    """Prompts of `prompt_data` for ever, epoch after epoch.

    prompt_data: a JSONL, Parquet or Arrow file, a folder of those, a hub data set `owner/name` (a folder or file
    pattern inside it may follow: `owner/name/main/test-*`), `builtin:PATH` inside the package; `@[a:b]` after any of
    them takes rows a to b as Python does. Prompts are text or lists of chat messages; with `chat_template` and a
    tokenizer that has one, text becomes a user message. Labels stay as they stand; an empty `label_key` means that
    there are none. `metadata_key` and `tool_key` are optional in a row (objects and lists, or the same as JSON text);
    tools reach the chat template and `metadata["tools"]`.

    num_rows: rows that are drawn, i.e. whose rendered prompt has at most `max_prompt_len` tokens (counted with
    everything the template adds); dropped: how many were longer. epoch: how often all rows were drawn.
    Raises ValueError naming the file, line and key for anything that cannot be read.
    """

    def __init__(self, prompt_data: str, tokenizer: Tokenizer, *, max_prompt_len: int, input_key: str = "prompt",
                 label_key: str = "label", metadata_key: str = "metadata", tool_key: str = "tools",
                 shuffle: bool = True, seed: int = 42, chat_template: bool = True):
        if max_prompt_len < 1:
            raise ValueError(f"max_prompt_len {max_prompt_len} is below 1: no prompt fits")
        self.prompt_data, self.shuffle, self.seed = prompt_data, shuffle, seed
        keys = Keys(input_key, label_key, metadata_key, tool_key)
        records, self.fingerprint = _records(prompt_data, keys)
        rows = [keys.row(place, record) for place, record in records]
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
        self.largest_id = max(int(row.tokens.max()) for row in self._rows)
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

    def _sample(self, row: Row) -> Sample:
        """A sample that shares nothing with the source, so that hooks may write into it."""
        metadata = dict(row.metadata) if row.tools is None else {**row.metadata, "tools": row.tools}
        return Sample(prompt=copy.deepcopy(row.prompt), label=copy.deepcopy(row.label),
                      metadata=copy.deepcopy(metadata), prompt_tokens=row.tokens.tolist())


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


@dataclasses.dataclass(frozen=True)
class Keys:
    """Which key of a row holds what. `row` checks and takes them."""

    input: str
    label: str
    metadata: str
    tools: str

    @property
    def names(self) -> list[str]:
        """Every key that is read."""
        return [key for key in (self.input, self.label, self.metadata, self.tools) if key]

    def row(self, place: str, record: Any) -> Row:
        """The record as a Row; ValueError naming the place, the key and the keys there are."""
        if not isinstance(record, dict):
            raise ValueError(f"{place}: a row must be an object with keys, not {_kind(record)}")
        for knob, key in (("input_key", self.input), ("label_key", self.label)):
            if key not in record and (key or knob == "input_key"):
                hint = ", or set data.label_key='' if there are no labels" if knob == "label_key" else ""
                raise ValueError(f"{place}: no key {key!r}; the row has {', '.join(map(repr, record)) or 'no keys'} "
                                 f"(name one with data.{knob}{hint})")
        metadata = _optional(place, record, self.metadata, dict)
        return Row(place, _prompt(place, self.input, record[self.input]), record[self.label] if self.label else None,
                   {} if metadata is None else metadata, _optional(place, record, self.tools, list) or None)


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _prompt(place: str, key: str, prompt: Any) -> str | list[dict[str, Any]]:
    """A prompt that is text or chat messages, as it stands; ValueError for anything else."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        what = "an empty list" if prompt == [] else _kind(prompt)
        raise ValueError(f"{place}: {key!r} must be text or a list of chat messages, not {what}")
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"{place}: message {i} of {key!r} must be an object with 'role' and 'content', not "
                             f"{json.dumps(message, ensure_ascii=False)[:80]}")
    return prompt


def _optional(place: str, record: dict[str, Any], key: str, kind: type) -> Any:
    """The object or list under `key`, given as such or as JSON text; None where it is missing, null or empty text."""
    value = record.get(key) if key else None
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"{place}: {key!r} is text but not JSON: {error}") from error
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{place}: {key!r} must be {'an object' if kind is dict else 'a list'}, not {_kind(value)}")
    return value


def _tokenize(rows: list[Row], tokenizer: Tokenizer, chat_template: bool) -> None:
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


def _encode_one(row: Row, tokenizer: Tokenizer, chat_template: bool) -> None:
    try:
        _encode([row], tokenizer, chat_template)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error


def _encode(rows: list[Row], tokenizer: Tokenizer, chat_template: bool) -> list[list[int]]:
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


def _records(prompt_data: str, keys: Keys) -> tuple[list[tuple[str, Any]], str]:
    """(place, record) of every row inside the slice, and a fingerprint of the files' bytes and the slice."""
    path, begin, end = _parse_slice(prompt_data)
    files = _files(path)
    digest = hashlib.sha256(f"[{begin}:{end}]".encode())
    records: list[tuple[str, Any]] = []
    for file in files:
        try:
            records += _jsonl(file, digest) if file.suffix not in (".parquet", ".arrow") else _table(file, keys, digest)
        except (OSError, pyarrow.ArrowException) as error:  # unreadable, or no Parquet or Arrow file
            raise ValueError(f"{file}: cannot be read: {error}") from error
    if not records:
        raise ValueError(f"{path}: no rows in {', '.join(map(str, files))}")
    chosen = records[begin:end]
    if not chosen:
        raise ValueError(f"{prompt_data}: the slice takes none of the {len(records)} rows")
    return chosen, digest.hexdigest()[:16]


def _parse_slice(prompt_data: str) -> tuple[str, int | None, int | None]:
    """`path@[a:b]` as (path, a, b); without a slice (path, None, None)."""
    match = SLICE.fullmatch(prompt_data)
    if match:
        path, *bounds = match.groups()
        begin, end = (None if bound == "" else bound for bound in bounds)
        if "-" not in (begin, end):
            return path, None if begin is None else int(begin), None if end is None else int(end)
    if "@[" in prompt_data:
        raise ValueError(f"prompt_data {prompt_data!r}: a slice is written path@[a:b] with whole numbers, either end "
                         f"may be left out")
    return prompt_data, None, None


def _jsonl(file: pathlib.Path, digest: Any) -> Iterator[tuple[str, Any]]:
    """Rows of a JSONL file. Only a newline ends a row; a byte-order mark, CRLF and blank lines are fine."""
    content = file.read_bytes()
    digest.update(content)
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line := line.strip(b" \t\r"):
            place = f"{file}, line {number}"
            try:
                yield place, json.loads(line.decode("utf-8"), parse_constant=_no_constant)
            except UnicodeDecodeError as error:
                raise ValueError(f"{place}: not UTF-8 at byte {error.start}: {error.reason}") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not JSON: {error}: {line[:80].decode(errors='replace')!r}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _table(file: pathlib.Path, keys: Keys, digest: Any) -> Iterator[tuple[str, Any]]:
    """Rows of a Parquet or Arrow file, as the JSON values that they stand for."""
    with file.open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    table = _arrow(file) if file.suffix == ".arrow" else None
    names = pyarrow.parquet.read_schema(file).names if table is None else table.column_names
    wanted = [name for name in names if name in keys.names]
    others = dict.fromkeys(name for name in names if name not in wanted)  # for messages: the names alone
    table = pyarrow.parquet.read_table(file, columns=wanted) if table is None else table.select(wanted)
    for number, record in enumerate(table.to_pylist(), 1):
        place = f"{file}, row {number}"
        yield place, {**{key: _plain(place, key, value) for key, value in record.items()}, **others}


def _arrow(file: pathlib.Path) -> pyarrow.Table:
    """An Arrow file as `datasets` saves it (a stream) or in the random-access format."""
    with pyarrow.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            return pyarrow.ipc.open_file(source).read_all()
        source.seek(0)
        return pyarrow.ipc.open_stream(source).read_all()


def _plain(place: str, key: str, value: Any) -> Any:
    """A column's value as JSON. Null fields of messages go: columnar files write them where a row has no such key."""
    if isinstance(value, dict):
        return {name: _plain(place, key, part) for name, part in value.items()}
    if isinstance(value, list):
        parts = [_plain(place, key, part) for part in value]
        return [{k: v for k, v in part.items() if v is not None or k == "content"} if isinstance(part, dict) else part
                for part in parts]
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{place}: {key!r} holds {type(value).__name__}, which is no text, number, list or object")


def _files(path: str) -> list[pathlib.Path]:
    """The files that `path` names, in order of their names."""
    if path.startswith(BUILTIN_PREFIX):
        local = hub.BUILTIN / path.removeprefix(BUILTIN_PREFIX)
        if not local.exists():
            there = sorted(str(f.relative_to(hub.BUILTIN)) for s in SUFFIXES for f in hub.BUILTIN.rglob(f"*{s}"))
            raise ValueError(f"prompt_data {path!r}: not in the package, which has "
                             f"{', '.join(BUILTIN_PREFIX + name for name in there) or 'no data'}")
    else:
        local = pathlib.Path(path).expanduser()
    if local.is_dir():
        return _choose(path, local, sorted(f for f in local.rglob("*") if f.is_file() and f.suffix in SUFFIXES))
    return [local] if local.exists() else _download(path)


def _download(path: str) -> list[pathlib.Path]:
    """Files of a hub data set: `owner/name`, and inside it a folder, a file or a pattern."""
    owner, _, rest = path.partition("/")
    name, _, inside = rest.partition("/")
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]+", f"{owner}/{name}") or owner.startswith(".") or \
            (not inside and name.endswith((*SUFFIXES, ".json"))):
        raise ValueError(f"prompt_data {path!r}: no such file or folder, and no hub data set (owner/name)")
    inside = inside.rstrip("/") or "*"
    patterns = [inside, f"{inside}/*"]
    try:
        folder = pathlib.Path(huggingface_hub.snapshot_download(f"{owner}/{name}", repo_type="dataset", allow_patterns=[
            pattern if pattern.endswith(SUFFIXES) else f"{pattern}{suffix}" for pattern in patterns
            for suffix in SUFFIXES]))
    except (OSError, ValueError) as error:  # hub errors derive from OSError (HTTP, offline) or ValueError (bad id)
        raise ValueError(f"prompt_data {path!r}: no such file or folder, and fetching it as a hub data set failed: "
                         f"{error}") from error
    found = [f for f in folder.rglob("*") if f.is_file() and f.suffix in SUFFIXES
             and any(fnmatch.fnmatchcase(f.relative_to(folder).as_posix(), p) for p in
                     (*patterns, *(inside + suffix for suffix in SUFFIXES)))]
    return _choose(path, folder, sorted(found))


def _choose(path: str, folder: pathlib.Path, files: list[pathlib.Path]) -> list[pathlib.Path]:
    """The training split where a folder has several; ValueError where it cannot be told what is meant."""
    if not files:
        raise ValueError(f"{path}: no file there ends in {', '.join(SUFFIXES)}")
    splits: dict[str, list[pathlib.Path]] = {}
    for file in files:
        words = SPLIT.findall(file.relative_to(folder).as_posix())
        splits.setdefault(words[-1] if words else "no split", []).append(file)
    if len(splits) > 1 and "train" not in splits:
        raise ValueError(f"{path} has several splits ({', '.join(splits)}): name the file or folder of one of them")
    chosen = splits.get("train", files)
    if len(splits) > 1:
        log.info("%s: taking the split 'train' of %s; for another, name its file or folder", path, ", ".join(splits))
    folders = {SHARD.sub("#", file.relative_to(folder).parent.as_posix()): file.parent for file in chosen}
    if len(folders) > 1:
        raise ValueError(f"{path} has several data sets ({', '.join(map(str, folders.values()))}): name the folder "
                         f"of one of them")
    return chosen
