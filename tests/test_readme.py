"""The README's promises that a parser can hold: every slime argument has its row, every knob in it exists."""

from __future__ import annotations

import pathlib
import re

from shared_data import shared

from rljax import config

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def slime_rows() -> dict[str, str]:
    return dict(re.findall(r"^\| `(--[a-z0-9-]+)` \| (.+) \|$", README, re.MULTILINE))


def test_every_slime_argument_is_answered():
    knobs = shared("KNOBS.md").read_text(encoding="utf-8")
    arguments = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", knobs)) - {"--config", "--explain"}
    assert len(arguments) > 50
    assert arguments == set(slime_rows())


def test_knobs_of_the_table_exist():
    known = config.flat(config.DEFAULTS)
    named = [name for answer in slime_rows().values() for name in re.findall(r"`([a-z]+\.[a-z_]+)", answer)]
    assert len(named) > 20
    assert [name for name in named if name not in known] == []


def test_configs_of_the_table_exist():
    table = README.split("| config | what |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+\.py)`", table))
    assert named == {path.name for path in (ROOT / "configs").glob("*.py")}


def test_modules_of_the_tables_exist():
    named = re.findall(r"`([a-z_]+(?:\.py|/))`", README.split("## How it is built")[1].split("To add")[0])
    assert len(named) > 25
    assert [name for name in named if not (ROOT / "rljax" / name).exists()] == []
