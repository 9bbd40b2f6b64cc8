"""DCPO: accuracy and calibration of a stated confidence, optimised on disjoint tokens (arXiv 2603.09117).

The tokens of the answer get the group-normalised accuracy as their advantage; the tokens of the statement
`CONFIDENCE: c` get the group-normalised calibration error, negated. `post_process` finds the statement and the border
between the two in each response, `advantages` uses them.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax import advantages as formulas
from rljax import tokenizer as tokenizers
from rljax.rewards.dcpo import parse_confidence
from rljax.sample import Sample

MISSING_ERROR = 1.25  # squared error of a response without a statement: worse than any stated confidence's (<= 1)


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str, chat_template_kwargs: str) -> tokenizers.Tokenizer:
    """Loading takes up to seconds, and the hook runs once a rollout."""
    return tokenizers.load(path, json.loads(chat_template_kwargs))


def border(tokenizer: tokenizers.Tokenizer, tokens: Sequence[int], text: str, start: int) -> int:
    """Index of the token that holds character `start` of `text`, which is what `tokens` decode to, perhaps cut.

    It is the last token of the shortest prefix whose decoding reaches beyond `start`. A prefix may end inside a
    character, which decodes to U+FFFD: such an end is not counted. The length without it only grows with the prefix,
    so a bisection finds the border in about log2(tokens) decodes. Nothing is tokenized again: the tokens drawn need
    not be those that the tokenizer would make. Raises ValueError where `text` does not stand at the start of the
    decoded tokens.
    """
    wanted = text[: start + 1]
    skip = tokenizer.decode(tokens).startswith(wanted)  # a stop string with a special token keeps those in the text
    if not skip and not tokenizer.decode(tokens, skip_special=False).startswith(wanted):
        raise ValueError(f"the text {wanted[-80:]!r} is not what its {len(tokens)} response tokens decode to, so the "
                         f"confidence cannot be found among them")

    def reached(count: int) -> bool:
        return len(tokenizer.decode(tokens[:count], skip).rstrip("\ufffd")) > start

    return bisect.bisect_left(range(len(tokens)), True, lo=1, key=reached) - 1


def post_process(samples: Sequence[Sample], config: Any) -> None:
    """Reward post-processing: fills `train_metadata["dcpo"]` of every sample.

    confidence: the stated one in [0, 1], or None. border: index of the response token where the statement begins, or
    None. accuracy: 1.0 where the reward is at least 1, else 0.0; None where there is no reward. `config` is the whole
    configuration: its model section says which tokenizer drew the tokens. Raises ValueError as `border` does.
    """
    tokenizer = _tokenizer(config.model.path, config.model.chat_template_kwargs)
    for sample in samples:
        found, place = parse_confidence(sample.text), None
        if found is not None:
            place = border(tokenizer, sample.response_tokens, sample.text, found[0])
        sample.train_metadata["dcpo"] = {
            "confidence": None if found is None else found[1],
            "border": place,
            "accuracy": None if sample.reward is None else float(sample.reward >= 1),
        }


def _found(sample: Sample) -> dict[str, Any]:
    if "dcpo" not in sample.train_metadata:
        raise ValueError(f"sample {sample.uid} has no train_metadata['dcpo']: algo.advantage_estimator dcpo needs its "
                         f"own reward post-processing, but reward.post_process was replaced; call "
                         f"rljax.algorithms.dcpo.post_process(samples, config) in the replacement")
    return sample.train_metadata["dcpo"]


def calibration_errors(accuracy: np.ndarray, confidence: Sequence[float | None], groups: np.ndarray, weight: float,
                       alpha: float) -> np.ndarray:
    """weight * (alpha * accuracy + (1 - alpha) * mean accuracy of the group - confidence)^2; [N] float64, lower is
    better.

    accuracy [N] of 0 and 1; groups [N] ids; confidence: N numbers in [0, 1] or None, whose squared error counts as
    1.25. A single outcome is noisy and a group's mean says nothing of the single response: alpha blends the two.
    """
    index = np.unique(groups, return_inverse=True)[1].reshape(-1)
    mean = np.bincount(index, accuracy) / np.bincount(index)
    target = alpha * accuracy + (1 - alpha) * mean[index]
    squared = np.square(target - np.asarray(confidence, np.float64))  # None becomes NaN
    return weight * np.where(np.isnan(squared), MISSING_ERROR, squared)


def spread(mask: Sequence[int], border: int | None, accuracy: float, calibration: float, scale: float) -> np.ndarray:
    """Advantages of one response, float32 [m]: `accuracy` before the border, -calibration * scale from there on.

    mask [m]: 0 = not trained, advantage 0. border: index of the statement's first token; None = no statement, where
    the last trained token, which ended the response without one, takes the place of the statement.
    """
    trained = np.asarray(mask) > 0
    if border is None:
        border = int(np.flatnonzero(trained)[-1]) if trained.any() else len(trained)
    values = np.where(np.arange(len(trained)) < border, accuracy, -calibration * scale)
    return np.where(trained, values, 0.0).astype(np.float32)


def advantages(samples: list[Sample], algo: Any, scores: Any = None) -> list[np.ndarray]:
    """A list of float32 [m], m response tokens: accuracy's advantage before the statement, calibration's on it.

    Both are normalised inside the group on their own (`normalize_std` False leaves the deviation out), so neither
    depends on the other's spread: a group that is always right still learns its confidence. The calibration error is
    a cost, so its advantage is negated, times `algo.dcpo_calibration_scale`. `scores` is not used. Raises ValueError
    where `post_process` has not seen a sample and where one has no reward. arXiv 2603.09117.
    """
    found = [_found(sample) for sample in samples]
    groups = np.asarray([sample.group for sample in samples])
    accuracy = np.asarray([one["accuracy"] for one in found], np.float64)
    right = formulas.group_normalize(accuracy, groups, std=algo.normalize_std)  # raises where a reward is missing
    errors = calibration_errors(accuracy, [one["confidence"] for one in found], groups, algo.dcpo_calibration_weight,
                                algo.dcpo_hybrid_alpha)
    costs = formulas.group_normalize(errors, groups, std=algo.normalize_std)
    return [spread(sample.loss_mask, one["border"], float(a), float(c), algo.dcpo_calibration_scale)
            for sample, one, a, c in zip(samples, found, right, costs, strict=True)]


def reliability(confidence: Sequence[float] | np.ndarray, accuracy: Sequence[float] | np.ndarray, bins: int = 10,
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, mean confidence and mean accuracy in `bins` bins of equal width over [0, 1]; each [bins].

    confidence, accuracy [N], in [0, 1]. Bin i is [i/bins, (i+1)/bins), the last one with 1. The means of an empty bin
    are NaN. Raises ValueError for unequal lengths and for a confidence outside [0, 1].
    """
    stated, right = np.asarray(confidence, np.float64), np.asarray(accuracy, np.float64)
    if stated.ndim != 1 or stated.shape != right.shape:
        raise ValueError(f"confidences of shape {stated.shape} and accuracies of shape {right.shape}: both must be [N]")
    if not np.all((stated >= 0) & (stated <= 1)):
        raise ValueError(f"confidences from {stated.min()} to {stated.max()}: all must be in [0, 1]")
    index = np.minimum((stated * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    size = np.where(count > 0, count, np.nan)
    return count, np.bincount(index, stated, bins) / size, np.bincount(index, right, bins) / size


def expected_calibration_error(confidence: Sequence[float] | np.ndarray, accuracy: Sequence[float] | np.ndarray,
                               bins: int = 10) -> float:
    """ECE = sum over bins of (share of the samples) * |mean accuracy - mean confidence|, in [0, 1].

    Arguments as `reliability`, whose bins are used; also ValueError where there is no sample. Naeini et al. 2015.
    """
    count, stated, right = reliability(confidence, accuracy, bins)
    if not count.sum():
        raise ValueError("no stated confidences: their calibration error has no value")
    filled = count > 0
    return float(np.sum(count[filled] * np.abs(right[filled] - stated[filled])) / count.sum())


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics `dcpo/` of the scored samples; those that have no value are left out.

    missing_confidence: share without a statement. Over the others: confidence (mean), calibration_error (mean
    |accuracy - confidence|), brier (mean square of it), ece. All in [0, 1]. ValueError as in `advantages`.
    """
    scored = [one for one in map(_found, samples) if one["accuracy"] is not None]
    if not scored:
        return {}
    pairs = [(one["confidence"], one["accuracy"]) for one in scored if one["confidence"] is not None]
    values = {"dcpo/missing_confidence": 1 - len(pairs) / len(scored)}
    if pairs:
        confidence, accuracy = np.asarray(pairs, np.float64).T
        values |= {
            "dcpo/confidence": float(confidence.mean()),
            "dcpo/calibration_error": float(np.abs(accuracy - confidence).mean()),
            "dcpo/brier": float(np.square(accuracy - confidence).mean()),
            "dcpo/ece": expected_calibration_error(confidence, accuracy),
        }
    return values
