r"""Reward 1 where the final answer of the response equals the label mathematically, else 0.

The answer is, in this order: what follows the reasoning (`</think>`); the last `<answer>`; the last closed `\boxed{}`;
the last `#### x`; what follows the last "answer is" or "Answer:"; the last formula or number. A reasoning block that
is never closed holds no answer. Everything here is total: nothing raises, hangs or takes much memory,
in any thread.

Decided where sound programs differ: a percent sign or a base may be left out; 35% also equals 0.35; a decimal may
stand for a value that no decimal equals from six figures on; an interval may be written as a double inequality both
ways; (a, b) and a list a, b differ; units may be left out on one side; log is the one of base 10; real expressions are
compared where both are real.
"""

from __future__ import annotations

import re
from typing import Any

from rljax.rewards import _latex as latex
from rljax.rewards._equal import same
from rljax.sample import Sample

_MAX_ANSWER = 3000  # characters; a longer answer is compared as text only
_MAX_TAIL = 20_000  # characters at the end in which an answer without a mark is looked for
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\s#][^\n#]*)")
_MARKER = re.compile(
    r"\banswer\b(?:\s+is\b)?[ \t]*(?:\*\*)?[ \t]*"
    r"(?::|(?<=is)|(?<=\*\*))[ \t]*(?:\*\*)?[ \t]*:?\s*([^\n]+)",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\\\((.{1,600}?)\\\)|\\\[(.{1,600}?)\\\]|\$\$(.{1,600}?)\$\$|(?<!\\)\$((?:\\.|[^$\\\n]){1,600})\$", re.DOTALL
)
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")  # between two dollar signs that are money
_NUMBER = re.compile(
    r"""
    (?<![\w.)])(?:-?[$€£]?|[$€£]-)                                   # a minus after a value is no sign
    (?:
        [(\[][-+\d\s./]+,[-+\d\s.,/]+[)\]]                           # a point or an interval
      | \d{0,9}\ ?\\[dtc]?frac\{[^{}\n]{1,80}\}\{[^{}\n]{1,80}\}     # LaTeX without dollar signs
      | \d{0,9}\ ?\\sqrt\{[^{}\n]{1,80}\}
      | (?:\d[\d,]*(?:\.\d+)?|\.\d+)
        (?:[eE][-+]?\d+|\s*(?:\\times|[×x*])\s*10\^\{?-?\d+\}?|\^\{?-?\d+\}?|\s*/\s*\d+(?![\d.])|(?::\d+)+)?
    )%?
    | (?<=\w)\d+(?:\.\d+)?
    """,
    re.VERBOSE,
)
_FILLER = re.compile(
    r"(?:(?:therefore|thus|hence|then|simply|just|exactly|indeed|approximately|about|equal to|given by|the|option"
    r"|choice)\b[,:]?\s*)+",
    re.IGNORECASE,
)
_END = re.compile(
    r"(?<=[\w)}\]%*$])(?:\.(?=\s|$)|\s+\((?=[a-zA-Z]{2})|,\s+(?!and\b|or\b)(?=[a-zA-Z]{2,}\b)"
    r"|\s+(?:because|since|as|so|which|for|but|not)\b)"
)


def extract_answer(text: str) -> str | None:
    """The final answer as text, or None where the response gives none."""
    text = text.rpartition("</think>")[2].replace("\u2212", "-")  # the minus sign of typography
    if "<think>" in text:
        return None  # cut off while reasoning
    tags = _TAG.findall(text)
    text = tags[-1] if tags else text
    boxes = [box for box in latex.boxes(text) if box]
    if boxes:
        return boxes[-1]
    if tags:
        return latex.strip_ends(text) or None
    text = re.sub(r"[ \t]+", " ", text[-_MAX_TAIL:])
    return hashed_answer(text) or _after_marker(text) or _last_value(text)


def hashed_answer(text: str) -> str | None:
    """What follows the last `####` that something follows on its line, or None."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def _after_marker(text: str) -> str | None:
    """What an explicit "answer is" or "Answer:" announces, up to the end of its sentence or a remark."""
    found = _MARKER.findall(text)
    if not found:
        return None
    line = found[-1].strip()
    filler = _FILLER.match(line)
    line = line[filler.end() :] if filler else line
    formula = _FORMULA.match(line)
    if formula and not _PROSE.search(formula[0]):
        return next(group for group in formula.groups() if group).strip()
    line = latex.cut(line, _END)
    return latex.strip_ends(line.strip().strip("*").strip()) or None


def _last_value(text: str) -> str | None:
    """The last formula between math delimiters, or the last plain number, whichever comes later."""
    formulas = [match for match in _FORMULA.finditer(text) if not _PROSE.search(match[0])]
    numbers = list(_NUMBER.finditer(text))
    if formulas and (not numbers or numbers[-1].start() < formulas[-1].end()):
        return next(group for group in formulas[-1].groups() if group).strip()
    return numbers[-1][0].rstrip(",") if numbers else None


def equivalent(gold: Any, prediction: Any) -> bool:
    """Whether two answers, given as text or numbers, are the same; every answer equals itself."""
    left, right = ("" if value is None else str(value).strip() for value in (gold, prediction))
    if left == right:
        return True
    if max(len(left), len(right)) > _MAX_ANSWER:
        return False
    left, right = latex.normal(left), latex.normal(right)
    pairs = {(left, right)} | {(one, other) for one in _readings(left) for other in _readings(right)}
    return any(same(*pair) for pair in sorted(pairs))


def _readings(text: str) -> set[str]:
    """100,200 may be one number or a list of two."""
    return {text, latex.without_thousands(text)}


def grade(text: str, label: Any) -> float:
    """1.0 where the response's final answer is equivalent to the label, or to any of a list of labels; else 0.0."""
    answer = extract_answer(text)
    labels = label if isinstance(label, (list, tuple)) else [label]
    return float(answer is not None and any(one is not None and equivalent(one, answer) for one in labels))


def reward(sample: Sample) -> float:
    """`grade` of the response."""
    return grade(sample.text, sample.label)
