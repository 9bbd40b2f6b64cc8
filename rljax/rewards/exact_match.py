"""Reward 1 where the stripped response is the label, else 0."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from rljax.sample import Sample

_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})")  # no exponent: 1e999999999 must stay text


def same(text: str, label: Any) -> bool:
    """Equal text after stripping; two plain numbers are compared by value, so 5, 5.0 and "5" are equal."""
    left, right = text.strip(), "" if label is None else str(label).strip()
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return Decimal(left) == Decimal(right)
    return left == right


def reward(sample: Sample) -> float:
    """1.0 or 0.0. A list as label means any of its entries; a null label equals only an empty response."""
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    return float(any(same(sample.text, label) for label in labels))
