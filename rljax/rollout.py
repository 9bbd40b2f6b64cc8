"""Stages 2 and 3 of 7: prompts become scored responses. Slots decode while finished samples are being scored."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from rljax.algorithms import dcpo
from rljax.gather import Gathered, Gathering
from rljax.metrics import Timers, pass_at_k, repeats
from rljax.rewards.pool import RewardPool
from rljax.sample import COMPLETED, TRUNCATED, Sample, SamplingParams
from rljax.sampler.scheduler import Request, Scheduler
from rljax.tokenizer import Tokenizer
from rljax.types import Params


class Interrupted(Exception):
    """The run was asked to stop while a rollout was under way."""


def remaining_budget(max_response_len: int, generated: int, cache_len: int, prompt_len: int) -> int:
    """Tokens that a response of `generated` tokens may still get: what is left of both limits."""
    return min(max_response_len - generated, cache_len - prompt_len - generated)


def from_labels(samples: Sequence[Sample], tokenizer: Tokenizer) -> None:
    """Make each sample's label, as text with the end token, its response, without log-probs (0) or a reward. What a
    conversation brought along stays as it is."""
    for sample in samples:
        if sample.response_tokens:
            size, sample.text, sample.status = len(sample.response_tokens), "", COMPLETED
            sample.logprobs, sample.versions = [0.0] * size, [0] * size
            continue
        if not isinstance(sample.label, str):
            raise ValueError(f"supervised data needs text labels; the prompt {sample.prompt!r} has {sample.label!r}")
        tokens = [*tokenizer.encode(sample.label), *([] if (end := tokenizer.hf.eos_token_id) is None else [end])]
        sample.response_tokens, sample.text, sample.status = tokens, sample.label, COMPLETED
        sample.logprobs, sample.loss_mask = [0.0] * len(tokens), [1] * len(tokens)
        sample.versions = [0] * len(tokens)


class Rollout:
    """Draws and scores the responses of training and evaluation, through one scheduler and one reward pool."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, pool: RewardPool, timers: Timers,
                 stopping: Callable[[], bool] = lambda: False,
                 post_process: Callable[[list[Sample]], None] | None = None, group_rewards: bool = False):
        """`stopping` is asked between dispatches; once it is True, `collect` raises Interrupted. `post_process` sees
        all samples of a rollout or evaluation set once they are scored, and writes their `train_metadata`;
        `group_rewards`: a group is scored at once."""
        self.scheduler, self.tokenizer, self.pool = scheduler, tokenizer, pool
        self.timers, self.stopping, self.post_process = timers, stopping, post_process
        self.group_rewards = group_rewards

    def collect(self, params: Params, samples: Sequence[Sample], sampling: SamplingParams, version: int) -> None:
        """Fill every sample: tokens, log-probs, status, text, reward. `params` are the engine's weights.

        A sample that has a part of its response keeps it, with log-probs, mask and versions, and is continued.
        Whatever is raised, no request stays behind in the scheduler.
        """
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        waiting = iter(groups.values())
        count = len(groups)
        everything = Gathering(lambda n: list(itertools.islice(waiting, n)), count, count, count)
        self.gather(params, everything, sampling, version)
        if self.post_process is not None:
            self.post_process(list(samples))

    def gather(self, params: Params, gathering: Gathering, sampling: SamplingParams, version: int) -> Gathered:
        """Draw and score until enough groups are kept; what was interrupted comes back with the tokens it has."""
        by_uid: dict[int, Sample] = {}

        def admit() -> None:
            fresh = gathering.admit()
            by_uid.update((sample.uid, sample) for sample in fresh)
            self.scheduler.submit([self._request(sample, sampling, version) for sample in fresh])

        try:
            with self.timers("rollout_time"):
                admit()
                while not gathering.finished:
                    if self.stopping():
                        raise Interrupted
                    for request in self.scheduler.step(params):
                        sample = by_uid[request.uid]
                        self._finish(sample, request, version)
                        # A row that names a reward of its own is scored alone.
                        together = self.group_rewards and not sample.metadata.get("rm_type")
                        gathering.ended(sample, self.pool, together)
                    gathering.tick()
                    admit()
        finally:
            for request in self.scheduler.abort():
                _extend(by_uid[request.uid], request, version)
            self.scheduler.release()  # training needs the memory
        with self.timers("reward_wait_time"):
            return gathering.close()

    def _request(self, sample: Sample, sampling: SamplingParams, version: int) -> Request:
        """The request that draws what is left of a sample; its limit counts what was drawn before."""
        drawn, prompt = len(sample.response_tokens), list(sample.prompt_tokens)
        left = remaining_budget(sampling.max_new_tokens, drawn, self.scheduler.engine.config.cache_len, len(prompt))
        limited = dataclasses.replace(sampling, max_new_tokens=drawn + left)
        old = next((index for index, drawn_by in enumerate(sample.versions) if drawn_by == version), drawn)
        return Request(sample.uid, prompt, limited, list(sample.response_tokens), list(sample.logprobs),
                       stale=min(old, len(sample.logprobs)))

    def _finish(self, sample: Sample, request: Request, version: int) -> None:
        _extend(sample, request, version)
        sample.end_reason = request.end_reason
        sample.status = TRUNCATED if request.end_reason == "length" else COMPLETED
        sample.text = request.text if request.text is not None else self.tokenizer.decode(request.tokens)


def _extend(sample: Sample, request: Request, version: int) -> None:
    """The sample's tokens as the request has them: the new ones are trained, and were drawn by `version`."""
    new = len(request.tokens) - len(sample.response_tokens)
    sample.response_tokens, sample.logprobs = request.tokens, request.logprobs
    sample.loss_mask, sample.versions = sample.loss_mask + [1] * new, sample.versions + [version] * new


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """Sample-level metrics under their bare names (`response_len/mean`, ...), for `rollout/` and `eval/{name}/`.

    A sample without a reward (None) is left out of every mean of rewards; no samples give no metrics.
    """
    if not samples:
        return {}
    lengths = np.asarray([len(s.response_tokens) for s in samples], np.float64)
    values = {
        "response_len/mean": lengths.mean(), "response_len/median": np.median(lengths),
        "response_len/max": lengths.max(), "response_len/min": lengths.min(),
        "truncated_ratio": np.mean([s.status == TRUNCATED for s in samples]),
        "repetition_frac": np.mean([repeats(s.response_tokens) for s in samples]),
    }
    scored = [s.reward for s in samples if s.reward is not None]
    if scored:
        values["raw_reward"] = np.mean(scored)
    drawn = [x for s in samples if s.end_reason for x, m in zip(s.logprobs, s.loss_mask, strict=True)
             if m and x is not None]
    if drawn:  # not in supervised training, whose responses are labels
        values["rollout_log_probs"] = np.mean(drawn)
    for part in sorted({name for s in samples for name in s.rewards}):
        values[f"reward/{part}"] = np.mean([s.rewards[part] for s in samples if part in s.rewards])
    notes = [{**s.metadata, **s.train_metadata} for s in samples]  # by the data and by hooks
    numbers = {name for note in notes for name, value in note.items()
               if type(value) in (int, float) and name.isprintable()}
    for name in sorted(numbers):
        values[f"extra/{name}"] = np.mean([note[name] for note in notes if type(note.get(name)) in (int, float)])
    if any("dcpo" in s.train_metadata for s in samples):
        values |= dcpo.summary(samples)
    return {name: float(value) for name, value in values.items()} | _group_metrics(samples)


def _group_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """pass@k over groups (right = reward of at least 1), and how many groups have one reward only."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.group, []).append(sample.reward)
    values: dict[str, float] = {}
    for rewards in groups.values():
        if len(rewards) > 1 and len(set(rewards)) == 1:
            name = f"zero_std/count_{rewards[0] + 0.0:.4g}"  # -0 counts as 0
            values[name] = values.get(name, 0.0) + 1.0
    k = 1
    while k <= min((len(rewards) for rewards in groups.values()), default=0):
        right = [(len(rewards), sum(r >= 1 for r in rewards)) for rewards in groups.values()]
        values[f"passrate/pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in right]))
        k *= 2
    return values
