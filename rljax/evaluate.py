"""Named evaluation sets through the same slots and reward pool as training."""

from __future__ import annotations

import dataclasses

from rljax.data import PromptSource
from rljax.gather import make_group
from rljax.rollout import Rollout, summarize
from rljax.sample import Sample, SamplingParams
from rljax.types import Params

UID_BASE = 1 << 31  # training counts up from 0, so that evaluation draws with keys of its own


@dataclasses.dataclass
class EvalSet:
    """One set: its prompts in file order, samples of each, and how they are drawn."""

    name: str
    source: PromptSource
    n_samples: int
    sampling: SamplingParams

    def samples(self) -> list[Sample]:
        """Fresh samples of every prompt, with the same uids in every evaluation."""
        self.source.restore({**self.source.state(), "epoch": 0, "index": 0})
        samples = []
        for group, prompt in enumerate(self.source.take(self.source.num_rows)):
            samples.extend(make_group(prompt, group, self.n_samples))
        for sample in samples:
            sample.uid += UID_BASE
        return samples


def evaluate(rollout: Rollout, params: Params, sets: list[EvalSet], version: int) -> dict[str, float]:
    """`eval/` metrics of all sets: mean reward, truncation, pass@k, and every sample-level metric of a rollout."""
    metrics: dict[str, float] = {}
    for one in sets:
        samples = one.samples()
        rollout.collect(params, samples, one.sampling, version)
        metrics |= named_metrics(one.name, summarize(samples))
    return metrics


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
