"""Configs: loading by file or name; overrides from the command line. The knobs themselves stand in `knobs.py`.

A config file defines `get_config(variant="")` and returns `config.get_config()` with some knobs set. The command
line wins over the file, the file over the default. Overrides are parsed here and not by ml_collections'
config_flags, whose errors name neither the nearest key of a section nor the value of a wrong type, and whose
bool and tuple fields take other spellings than the ones promised to users.
"""

from __future__ import annotations

import ast
import copy
import difflib
import inspect
import json
import pathlib
import re
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from rljax.config_rules import row_buckets, validate
from rljax.knobs import DEFAULTS, FREE_KNOBS, FREE_SECTIONS, INT_TUPLES

__all__ = ["diff", "find", "get_config", "load", "parse", "resolved", "row_buckets", "validate"]

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
DEFAULT = "quickstart.py"

BOOLS = {"true": True, "1": True, "false": False, "0": False}


def get_config() -> ConfigDict:
    """All knobs at their defaults: the base of every config file. Locked: a new key or another type raises."""
    return ConfigDict(copy.deepcopy(DEFAULTS)).lock()


def flat(sections: Mapping[str, Any], source: str = "config") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`; a section that is no mapping raises ValueError."""
    knobs = {}
    for section, keys in sections.items():
        if not isinstance(keys, Mapping):
            raise ValueError(f"{source}: {section} = {keys!r}: expected a section of knobs; {_suggest(section)}")
        knobs.update({f"{section}.{key}": value for key, value in keys.items()})
    return knobs


def _likeness(word: str, known: str) -> float:
    """Between 0 and 1; initials count as near, so that learning_rate finds lr."""
    initials = "".join(part[:1] for part in word.split("_"))
    return max(difflib.SequenceMatcher(None, word, known).ratio(), 0.9 * (initials == known))


def _suggest(name: str) -> str:
    """Which knob may have been meant by the unknown `name`."""
    section, _, key = name.partition(".")
    if section not in DEFAULTS:
        elsewhere = [f"{s}.{k}" for s, keys in DEFAULTS.items() for k in keys if k == (key or section)]
        near = max(DEFAULTS, key=lambda known: _likeness(section, known))
        hint = " or ".join(elsewhere) or (f"{near}.{key}" if key in DEFAULTS[near] else near)
        return f"did you mean {hint}? Sections: {', '.join(DEFAULTS)}"
    near = max(DEFAULTS[section], key=lambda known: _likeness(key, known))
    elsewhere = "".join(f" or {s}.{key}" for s, keys in DEFAULTS.items() if key in keys)
    return f"did you mean {section}.{near}{elsewhere}? Keys of {section}: {', '.join(DEFAULTS[section])}"


def _default(name: str, source: str) -> Any:
    """The default of the knob `name`; ValueError with the nearest one where there is none."""
    section, _, key = name.partition(".")
    if key not in DEFAULTS.get(section, {}):
        raise ValueError(f"{source}: unknown knob {name}; {_suggest(name)}")
    return DEFAULTS[section][key]


def _element(name: str) -> type:
    """What the tuple of the knob `name` holds."""
    return int if name in INT_TUPLES else str


def _typed(name: str, value: Any, source: str) -> Any:
    """`value` as the type of the knob's default; an int may stand for a float and a list for a tuple."""
    default = _default(name, source)
    wanted = type(default)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is tuple and isinstance(value, (list, tuple)):
        if all(type(item) is _element(name) for item in value):
            return tuple(value)
        raise ValueError(f"{source}: {name} = {value!r}: expected a tuple of {_element(name).__name__}")
    if type(value) is not wanted:
        raise ValueError(f"{source}: {name} = {value!r}: expected {wanted.__name__}, got {type(value).__name__}")
    return value


def _parse_tuple(text: str, element: type) -> tuple[Any, ...]:
    """`('a','b')`, `[1, 2]`, `'a'` as Python writes them, or `a,b`, every space and line end kept; empty text is
    the empty tuple."""
    if text.strip()[:1] in tuple("([\"'"):
        value = ast.literal_eval(text.strip())
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    parts = text.split(",")
    return tuple(element(part) for part in (parts[:-1] if parts[-1] == "" else parts))


def parse_value(name: str, text: str) -> Any:
    """The value of the override `name=text` in the type of the knob; ValueError naming both otherwise."""
    default = _default(name, "command line")
    try:
        if isinstance(default, bool):
            return BOOLS[text.strip().lower()]
        if isinstance(default, tuple):
            value = _parse_tuple(text, _element(name))
        else:
            value = type(default)(text)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        wanted = {bool: "true or false", tuple: f"a tuple of {_element(name).__name__}, such as a,b or ('a','b')"}
        kind = wanted.get(type(default), type(default).__name__)
        raise ValueError(f"command line: {name} = {text!r}: expected {kind}") from error
    return _typed(name, value, "command line")


def parse(argv: list[str]) -> tuple[str, list[str], list[str]]:
    """Split arguments into the config's name, overrides `section.key=value`, and the rest.

    Taken: `--config NAME`, `--config=NAME`, `--config.a.b=VALUE`, `--config.a.b VALUE`, and `--config.a.b` alone
    for true. A value that begins with two dashes needs the form with `=`.
    """
    name, overrides, rest = DEFAULT, [], []
    waiting = list(argv)
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            rest.append(flag + equals + value)
            continue
        if not equals and waiting and not waiting[0].startswith("--"):
            equals, value = "=", waiting.pop(0)
        if flag == "--config":
            if not value:
                raise ValueError(f"--config needs a name, such as --config={DEFAULT}")
            name = value
        else:
            overrides.append(flag.removeprefix("--config.") + equals + value)
    return name, overrides, rest


def find(name: str) -> tuple[pathlib.Path, str]:
    """File and variant of `grpo_qwen.py:8b`: a path, also from the working directory, then a file of configs/.

    The ending .py may be left out. Raises ValueError with what exists.
    """
    for text, variant in ((name, ""), name.rpartition(":")[::2]):
        for folder in (pathlib.Path.cwd(), CONFIGS):
            for candidate in (folder / text, folder / f"{text}.py"):
                if text and candidate.is_file():
                    return candidate, variant
    here = sorted(path.name for path in CONFIGS.glob("*.py"))
    raise ValueError(f"config {name!r}: no such file in {pathlib.Path.cwd()} or {CONFIGS}; there: {', '.join(here)}")


def _from_module(path: pathlib.Path, text: str, variant: str) -> Any:
    """What `get_config` of a Python file returns; an unknown knob is reported with the file's line."""
    module = ModuleType(f"rljax_config_{path.stem}")
    module.__file__ = str(path)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
        if not hasattr(module, "get_config"):
            raise ValueError(f"{path}: defines no function get_config")
        if variant and not inspect.signature(module.get_config).parameters:
            raise ValueError(f"{path}: has no variants, so {variant!r} is none of them")
        return module.get_config(variant) if variant else module.get_config()
    except ValueError:
        raise
    except Exception as error:  # the boundary to a user's file: anything may go wrong in it
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(path)
        unknown = re.search(r'Key "(\w+)" does not exist', str(error))  # ml_collections' words; ours name the nearest
        section = unknown and re.search(rf"(\w+)\W+{unknown[1]}\b", where)
        name = f"{section[1]}.{unknown[1]}" if section and section[1] in DEFAULTS else unknown and unknown[1]
        raise ValueError(f"{where}: " + (f"unknown knob {name}; {_suggest(name)}" if name else str(error))) from error


def _from_file(path: pathlib.Path, variant: str) -> dict[str, Any]:
    """The knobs that a config file sets, flat and of the right types."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    found = found if path.suffix == ".json" else _from_module(path, text, variant)
    found = found.to_dict() if isinstance(found, ConfigDict) else found
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: holds {type(found).__name__}, expected the sections of a config")
    return {name: _typed(name, value, str(path)) for name, value in flat(found, str(path)).items()}


def load(name: str | pathlib.Path, overrides: list[str] | tuple[str, ...] = (), variant: str = "") -> ConfigDict:
    """The config file `name` (see `find`; also a run's config.json) with overrides `optim.lr=2e-6` applied. `variant`
    is what may also follow the name behind a colon.

    Overrides may carry the prefix `--config.`; of two for one knob the last wins. Raises ValueError naming file
    or command line, knob and value.
    """
    knobs = flat(DEFAULTS) | _from_file(*find(f"{name}:{variant}" if variant else str(name)))
    arguments = []
    for before, text in zip(["", *overrides], overrides, strict=False):
        is_value = before.startswith("--") and "=" not in before
        arguments.append(text if text.startswith("--") or is_value else f"--config.{text}")
    _, pairs, rest = parse(arguments)
    if rest:
        raise ValueError(f"command line: {' '.join(rest)}: not of the form --config.section.key=value")
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals and not isinstance(_default(key, "command line"), bool):
            raise ValueError(f"command line: --config.{key} needs a value")
        knobs[key] = parse_value(key, text if equals else "true")
    config = get_config()
    for key, value in knobs.items():
        section, _, leaf = key.partition(".")
        config[section][leaf] = value
    return config


def resolved(config: ConfigDict) -> str:
    """The whole config as JSON text: what --print_config shows and what config.json in a run's directory holds."""
    ordered = {section: {key: config[section][key] for key in keys} for section, keys in DEFAULTS.items()}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Knobs that differ between two resolved configs and must not when a run is resumed, with both values."""
    before, after = (flat(json.loads(json.dumps(dict(side)))) for side in (old, new))
    changed = []
    for name in dict.fromkeys([*before, *after]):
        if name.partition(".")[0] in FREE_SECTIONS or name in FREE_KNOBS:
            continue
        if name not in before or name not in after or before[name] != after[name]:
            values = [repr(side[name]) if name in side else "not set" for side in (before, after)]
            changed.append(f"{name}: {values[0]} in the run, {values[1]} now")
    return changed
