"""Reward 1 where the response's number is the label's, in the form of GSM8K: the answer follows `#### `.

The label may be the whole solution as published, or the number alone. The response's answer is the last `#### x` after
its reasoning; without one it is what `math.py` finds: a box, "the answer is", or the last number.
"""

from __future__ import annotations

from rljax.rewards.math import equivalent, extract_answer, hashed_answer
from rljax.sample import Sample


def reward(sample: Sample) -> float:
    """1.0 or 0.0; a null label earns 0.0."""
    label = sample.label
    if isinstance(label, str):
        label = hashed_answer(label) or label
    answer = hashed_answer(sample.text.rpartition("</think>")[2]) or extract_answer(sample.text)
    return float(label is not None and answer is not None and equivalent(label, answer))
