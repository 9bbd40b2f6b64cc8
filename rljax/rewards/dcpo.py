"""Reward for answers that end in a line `CONFIDENCE: <0..1>`: the `math` grade of what stands before that line."""

from __future__ import annotations

import re

from rljax.rewards import math
from rljax.sample import Sample

# ASCII, so that neither other digits nor letters that fold to these ones count. Every unbounded part follows the
# keyword and its neighbours share no character, so a failed attempt costs no more than the text it read.
_STATEMENT = re.compile(
    r"""
    (?<!\w)\*{0,3}confidence\*{0,3}[^\S\n]*:\*{0,3}[^\S\n]*\*{0,3}
    (0?\.\d+|1\.0+|[01])
    \*{0,3}\.?\*{0,3}[^\S\n]*$                                        # it ends its line, perhaps as a sentence
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE | re.ASCII,
)


def parse_confidence(text: str) -> tuple[int, float] | None:
    """The last valid statement of confidence: (index of its first character, value in [0, 1]), or None.

    `CONFIDENCE: 0.85`, in any case, with Markdown's asterisks around any part of it (they belong to the statement),
    anywhere in a line but to that line's end. A number is 0, 1, .5, 0.5 or 1.0, perhaps with a full stop (`1.`). No
    statements are numbers outside [0, 1], nan and inf, signs, percentages, exponents and fractions; the last
    statement that is one counts. Total on any text and linear in its length.
    """
    last = None
    for last in _STATEMENT.finditer(text):
        pass
    return None if last is None else (last.start(), float(last[1]))


def reward(sample: Sample) -> float:
    """1.0 or 0.0: `math.grade` of the text before the last valid statement, of the whole text where there is none."""
    found = parse_confidence(sample.text)
    return math.grade(sample.text if found is None else sample.text[: found[0]], sample.label)
