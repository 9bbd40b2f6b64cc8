"""Token F1 of the final answer with the label, as SQuAD scores it (Rajpurkar et al. 2016, arXiv 1606.05250)."""

from __future__ import annotations

import collections
import re
import string
from typing import Any

from rljax.rewards.math import extract_answer
from rljax.sample import Sample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)


def tokens(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(prediction: str, label: Any) -> float:
    """2 P R / (P + R) over the words that both share, each as often as in both; 1 where both have none. Of a list of
    labels the best."""
    if isinstance(label, (list, tuple)):
        return max((f1(prediction, one) for one in label), default=0.0)
    said, gold = collections.Counter(tokens(prediction)), collections.Counter(tokens(str(label)))
    if not said or not gold:
        return float(said == gold)
    shared = (said & gold).total()
    return 2.0 * shared / (said.total() + gold.total())


def reward(sample: Sample) -> float:
    """`f1` of what stands in the last `<answer>` or `\\boxed{}`, else of the whole response."""
    tags = _TAG.findall(sample.text)
    boxed = extract_answer(sample.text) if "\\boxed" in sample.text else None
    return f1(tags[-1] if tags else boxed or sample.text, sample.label)
