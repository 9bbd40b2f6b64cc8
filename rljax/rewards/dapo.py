"""DAPO's score of competition mathematics: 1 or -1 by the last `Answer:` line (Yu et al. 2025, arXiv 2503.14476)."""

from __future__ import annotations

import re

from rljax.rewards.math import equivalent
from rljax.sample import Sample

TAIL = 300  # characters at the end in which the answer must stand
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def reward(sample: Sample) -> dict[str, float]:
    """{"reward": 1 or -1, "acc": 1 or 0}: what the last `Answer: x` within the last 300 characters says is equivalent
    to the label, or to one of a list of labels; else, and without such a line, it is wrong."""
    found = _ANSWER.findall(sample.text[-TAIL:])
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    answer = found[-1].strip().strip("$*").strip() if found else None
    right = answer is not None and any(one is not None and equivalent(one, answer) for one in labels)
    return {"reward": 1.0 if right else -1.0, "acc": float(right)}
