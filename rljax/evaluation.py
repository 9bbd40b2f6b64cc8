"""Named evaluation sets through the same slots and reward pool as training."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from rljax import harvest
from rljax.data import Mixture, PromptSource
from rljax.gather import make_group
from rljax.rewards.math import extract_answer
from rljax.rollout import Rollout, summarize
from rljax.sample import Sample, SamplingParams
from rljax.types import Params

UID_BASE = 1 << 31  # training counts up from 0, so that evaluation draws with keys of its own


@dataclasses.dataclass
class EvalSet:
    """One set: its prompts in file order, samples of each, and how they are drawn."""

    name: str
    source: PromptSource | Mixture
    n_samples: int
    sampling: SamplingParams
    rm_type: str = ""  # the reward of all its samples, where it is not the run's

    def samples(self) -> list[Sample]:
        """Fresh samples of every prompt, with the same uids in every evaluation."""
        samples, prompts = [], []
        for source in self.source.sources:  # of a mixture every prompt of every part
            source.restore({**source.state(), "epoch": 0, "index": 0})
            prompts += source.take(source.num_rows)
        for group, prompt in enumerate(prompts):
            samples.extend(make_group(prompt, group, self.n_samples))
        for sample in samples:
            sample.uid += UID_BASE
            if self.rm_type:
                sample.metadata["rm_type"] = self.rm_type
        return samples


def evaluate(rollout: Rollout, params: Params, sets: list[EvalSet], version: int,
             out: pathlib.Path | None = None) -> dict[str, float]:
    """`eval/` metrics of all sets: mean reward, truncation, pass@k, maj@n, and every sample-level metric of a rollout.
    With `out`, every sample goes to `{name}-{version}.jsonl` there."""
    metrics: dict[str, float] = {}
    for one in sets:
        samples = one.samples()
        rollout.collect(params, samples, one.sampling, version)
        values = summarize(samples)
        if one.n_samples > 1 and (share := majority(samples)) is not None:
            values[f"passrate/maj@{one.n_samples}"] = share
        metrics |= named_metrics(one.name, values)
        if out is not None:
            harvest.save(out / f"{one.name}-{version:06d}.jsonl", samples)
    return metrics


def majority(samples: Sequence[Sample]) -> float | None:
    """maj@n: share of groups whose most frequent answer has a reward of at least 1 (Wang et al. 2022,
    arXiv 2203.11171); None without a scored group.

    The answer is what `rewards.math.extract_answer` finds, else the stripped text; of equally frequent ones the first.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.group, []).append(sample)
    right = []
    for group in groups.values():
        answers = [extract_answer(sample.text) or sample.text.strip() for sample in group]
        most = collections.Counter(answers).most_common(1)[0][0]
        right.append(group[answers.index(most)].reward >= 1)
    return float(np.mean(right)) if right else None


def named_metrics(name: str, values: dict[str, float]) -> dict[str, float]:
    """A set's metrics under the names of `eval/`; no mean reward where no sample was scored."""
    metrics = {}
    for key, short in (("raw_reward", ""), ("truncated_ratio", "-truncated_ratio")):
        if key in values:
            metrics[f"eval/{name}{short}"] = values[key]
    for key, value in values.items():
        if key.startswith("passrate/"):
            metrics[f"eval/{name}-{key.removeprefix('passrate/')}"] = value
        metrics[f"eval/{name}/{key}"] = value
    return metrics
