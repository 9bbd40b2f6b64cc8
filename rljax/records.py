"""Rows of JSONL, Parquet and Arrow files, of folders and hub data sets, checked and taken apart by key."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import fnmatch
import hashlib
import json
import logging
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet

from rljax import hub

log = logging.getLogger(__name__)

BUILTIN_PREFIX, REASONING_GYM = "builtin:", "reasoning_gym:"
SUFFIXES = (".jsonl", ".parquet", ".arrow")  # what is taken from a folder
SLICE = re.compile(r"(.*)@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]", re.DOTALL)
SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?:ing)?(?![a-z])")  # in file names
SHARD = re.compile(r"[0-9a-f]{16}|[0-9]+")  # what differs between the shards of one data set


@dataclasses.dataclass
class Row:
    """One row of the data: where it stands (for messages), its fields, and its rendered prompt."""

    place: str  # file and line or row, counted from 1
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    tokens: np.ndarray | None = None  # [prompt length] int32
    response: list[int] = dataclasses.field(default_factory=list)  # of a conversation: all from its first answer on
    loss_mask: list[int] = dataclasses.field(default_factory=list)  # and which of these the assistant says


@dataclasses.dataclass(frozen=True)
class Keys:
    """Which key of a row holds what. `row` checks and takes them."""

    input: str
    label: str
    metadata: str
    tools: str
    suffix: str = ""  # text behind every prompt

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
        prompt = _with_suffix(place, _prompt(place, self.input, record[self.input]), self.suffix)
        return Row(place, prompt, record[self.label] if self.label else None,
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


def _with_suffix(place: str, prompt: str | list[dict[str, Any]], suffix: str) -> str | list[dict[str, Any]]:
    """The prompt with `suffix` behind its text, or behind that of its last message."""
    if not suffix or isinstance(prompt, str):
        return prompt + suffix if suffix else prompt
    if not isinstance(prompt[-1]["content"], str):
        raise ValueError(f"{place}: data.prompt_suffix cannot be put behind the last message, whose content is "
                         f"{_kind(prompt[-1]['content'])}")
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + suffix}]


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


def read(prompt_data: str, keys: Keys) -> tuple[list[tuple[str, Any]], str]:
    """(place, record) of every row of `prompt_data` (see `data.PromptSource`) inside its slice, and a fingerprint of
    the files' bytes and the slice. ValueError names what cannot be read."""
    path, begin, end = _parse_slice(prompt_data)
    digest = hashlib.sha256(f"[{begin}:{end}]".encode())
    records: list[tuple[str, Any]] = []
    if path.startswith(REASONING_GYM):
        records += _reasoning_gym(path, keys, digest)
    files = [] if path.startswith(REASONING_GYM) else _files(path)
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


def _reasoning_gym(path: str, keys: Keys, digest: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a reasoning-gym task, `reasoning_gym:TASK` or `reasoning_gym:TASK?size=1000&seed=1&max_x=9`, made with
    these settings; the whole entry goes into the metadata, where the reward of that name finds it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"prompt_data {path!r} needs the package reasoning-gym: pip install 'rljax[reasoning-gym]'") \
            from error
    task, _, text = path.removeprefix(REASONING_GYM).partition("?")
    digest.update(path.encode())
    settings = dict(urllib.parse.parse_qsl(text, keep_blank_values=True))
    try:
        settings = {name: json.loads(value) for name, value in settings.items()}
        entries = reasoning_gym.create_dataset(task, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"prompt_data {path!r}: {error or 'settings out of range'}") from error
    for number, entry in enumerate(entries):
        record = {keys.input: entry["question"], keys.label: entry["answer"], keys.metadata: {"reasoning_gym": entry}}
        yield f"{path}, entry {number}", {name: value for name, value in record.items() if name}


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
