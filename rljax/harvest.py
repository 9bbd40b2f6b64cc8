"""Stages 1 to 3 of 7 for one training rollout: prompts and what was interrupted, responses, rewards, filters."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from rljax import filters
from rljax.gather import Gathering, Group, Prompts, interrupt, prepare
from rljax.rollout import Rollout, from_labels
from rljax.sample import Sample, SamplingParams
from rljax.types import Params

log = logging.getLogger(__name__)
FILES = "rollout-{}.jsonl"


class Harvest:
    """Gives each rollout's samples, drawn or from a file."""

    def __init__(self, config: ConfigDict, prompts: Prompts, rollout: Rollout, sampling: SamplingParams,
                 vocab_size: int):
        """Reads the `rollout` and `debug` knobs; ValueError for a filter that does not exist."""
        self.vocab_size = vocab_size
        self.config, self.prompts, self.rollout, self.sampling = config, prompts, rollout, sampling
        knobs = config.rollout
        names = ("dynamic_filter", "sample_filter", "buffer_filter")
        self.filters = {name: filters.find(f"rollout.{name}", knobs[name]) for name in names if knobs[name]}
        self.supervised = config.algo.advantage_estimator == "sft"

    def check(self, first: int, end: int) -> None:
        """ValueError where a rollout from `first` to below `end` is to be replayed and has no file."""
        if not (folder := self.config.debug.load_rollouts):
            return
        missing = [number for number in range(first, end) if not _file(pathlib.Path(folder), number).is_file()]
        if missing:
            raise ValueError(f"debug.load_rollouts = {folder!r}: {len(missing)} of the run's {end - first} rollouts "
                             f"have no file there, the first is {FILES.format(f'{missing[0]:06d}')}; set "
                             f"rollout.num_rollouts to what there is")

    def next(self, params: Params | None, number: int) -> tuple[list[Sample], dict[str, float]]:
        """Samples of rollout `number` (from 0), drawn by the sampler's weights `params`, and `rollout/` metrics."""
        debug = self.config.debug
        if debug.load_rollouts:
            samples, values = load(_file(pathlib.Path(debug.load_rollouts), number), self.vocab_size), {}
        elif self.supervised:
            samples = [one for group in self.prompts.take(self.config.rollout.batch_size) for one in group]
            from_labels(samples, self.rollout.tokenizer)
            values = {}
        else:
            groups, values = self._draw(params, number)
            samples = [sample for group in groups for sample in group]
            values |= self._sample_filter(samples)
            if samples and self.rollout.post_process is not None:
                self.rollout.post_process(samples)
        if debug.save_rollouts:
            save(_file(pathlib.Path(debug.save_rollouts), number), samples)
        return samples, {f"rollout/{name}": float(value) for name, value in values.items()}

    def _draw(self, params: Params, number: int) -> tuple[list[Group], dict[str, float]]:
        """The groups to train on. The version of the weights is the number of rollouts that made them."""
        knobs = self.config.rollout
        dropped = self._buffer_filter()
        restarted = prepare(self.prompts.waiting, number, knobs.max_version_lag, knobs.mask_offpolicy_in_partial)
        in_flight = max(knobs.batch_size, knobs.over_sampling_batch_size)
        verdict = self._verdict if "dynamic_filter" in self.filters else None
        limit = in_flight * (knobs.max_filter_rounds if verdict else 1)
        found = self.rollout.gather(
            params, Gathering(self.prompts.take, knobs.batch_size, in_flight, limit, verdict), self.sampling, number
        )
        interrupt(found.left, knobs.partial)
        self.prompts.give_back(found.left)
        if len(found.kept) < knobs.batch_size:
            log.warning("rollout %d: only %d of %d groups passed rollout.dynamic_filter = %s after %d were tried "
                        "(rollout.max_filter_rounds %d); training on those", number + 1, len(found.kept),
                        knobs.batch_size, knobs.dynamic_filter, found.taken, knobs.max_filter_rounds)
        values: dict[str, float] = {f"dynamic_filter/drop_{reason}": count for reason, count in found.drops.items()}
        if knobs.partial:
            values |= _staleness([sample for group in found.kept for sample in group], number)
            values |= {"buffered_groups": len(self.prompts.waiting), "restarted_samples": restarted}
        if "buffer_filter" in self.filters:
            values["buffer_filter/dropped"] = dropped
        return found.kept, values

    def _verdict(self, group: Group) -> str:
        return "" if self.filters["dynamic_filter"](group) else self.config.rollout.dynamic_filter

    def _buffer_filter(self) -> int:
        """Interrupted groups that the filter refuses are forgotten; how many."""
        if "buffer_filter" not in self.filters:
            return 0
        groups = list(self.prompts.waiting)
        self.prompts.waiting.clear()
        self.prompts.give_back([group for group in groups if self.filters["buffer_filter"](group)])
        return len(groups) - len(self.prompts.waiting)

    def _sample_filter(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Samples that the filter (called with a list of one) refuses stay in their group and are not trained."""
        if "sample_filter" not in self.filters:
            return {}
        refused = [sample for sample in samples if not self.filters["sample_filter"]([sample])]
        for sample in refused:
            sample.loss_mask = [0] * len(sample.loss_mask)
        return {"sample_filter/dropped": len(refused)}


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Share of the tokens that older weights drew, and the largest distance in versions."""
    lags = [version - one for sample in samples for one in sample.versions]
    return {"offpolicy_tokens_frac": sum(lag > 0 for lag in lags) / max(len(lags), 1),
            "max_version_lag": max(lags, default=0)}


def _file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder.expanduser() / FILES.format(f"{number:06d}")


def save(file: pathlib.Path, samples: Sequence[Sample]) -> None:
    """One JSON object a line with every field of a sample."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(sample.to_json()) + "\n" for sample in samples]
    file.write_text("".join(lines), encoding="utf-8")


def load(file: pathlib.Path, vocab_size: int) -> list[Sample]:
    """The samples that `save` wrote, equal in every field; OSError where the file cannot be read, ValueError naming
    file and line for what is no sample."""
    samples = []
    for place, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            samples.append(_sample(json.loads(line), vocab_size))
        except (TypeError, ValueError) as error:
            raise ValueError(f"debug.load_rollouts: {file}, line {place}: no sample: {error}") from error
    return samples


def _sample(record: Any, vocab_size: int) -> Sample:
    """A record as a sample; ValueError or TypeError for what cannot be trained on."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    sample = Sample(**record)
    sample.check()
    for name in ("prompt_tokens", "response_tokens"):
        if bad := [t for t in getattr(sample, name) if type(t) is not int or not 0 <= t < vocab_size]:
            raise ValueError(f"{name} has {bad[0]!r}, and the model has {vocab_size} tokens")
    if not sample.prompt_tokens:
        raise ValueError("prompt_tokens is empty")
    if sample.reward is not None and type(sample.reward) not in (int, float):
        raise ValueError(f"reward is {sample.reward!r}, which is neither a number nor null")
    if bad := [x for x in sample.logprobs if x is not None and type(x) not in (int, float)]:
        raise ValueError(f"logprobs has {bad[0]!r}, which is neither a number nor null")
    return sample
