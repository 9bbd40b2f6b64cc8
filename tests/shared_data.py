"""Where the tests find golden data, cases and real prompts: a folder `shared` beside the checkout."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(os.environ.get("RLJAX_SHARED", pathlib.Path(__file__).resolve().parents[2] / "shared"))


def shared(*parts: str) -> pathlib.Path:
    """Path below the shared folder; skips the test, saying so, where the folder is missing."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is missing: set RLJAX_SHARED to the folder with golden data and cases")
    return path


def cases(area: str) -> list[dict[str, Any]]:
    """Rows of one case file; empty (and so an empty parametrisation, reported as skipped) where it is missing."""
    path = ROOT / "cases" / f"{area}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
