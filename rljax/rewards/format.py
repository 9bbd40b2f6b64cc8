"""Reward 1 where the response has the wanted shape, else 0; what it says is not judged."""

from __future__ import annotations

import re

from rljax.sample import Sample

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"


def fits(text: str, pattern: str = THINK_ANSWER) -> bool:
    """Whether the whole text matches, a dot matching newlines. The default takes linear time."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def reward(sample: Sample) -> float:
    """1.0 where the whole response matches the regular expression in `metadata["format"]`, a dot matching newlines.

    Without one: exactly one `<think>...</think>`, then exactly one `<answer>...</answer>`, and nothing else. Only the
    response is looked at, so a shape that the prompt shows earns nothing. A bad expression raises re.error.
    """
    return float(fits(sample.text, sample.metadata.get("format", THINK_ANSWER)))
