"""Stages 2 and 3 of 7: prompts become scored responses. Slots decode while finished samples are being scored."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable, Sequence

import numpy as np

from rljax.metrics import Timers, nan_mean, pass_at_k
from rljax.rewards.pool import RewardPool, RewardResult
from rljax.sample import COMPLETED, TRUNCATED, Sample, SamplingParams
from rljax.sampler.scheduler import Request, Scheduler
from rljax.tokenizer import Tokenizer
from rljax.types import Params


class Interrupted(Exception):
    """The run was asked to stop while a rollout was under way."""


def make_group(prompt: Sample, group: int, size: int) -> list[Sample]:
    """`size` samples of one prompt instance; uid = group * size + index."""
    samples = [copy.deepcopy(prompt) for _ in range(size)]
    for index, sample in enumerate(samples):
        sample.group, sample.uid = group, group * size + index
    return samples


def from_labels(samples: Sequence[Sample], tokenizer: Tokenizer) -> None:
    """Make each sample's label, as text with the end token, its response, without log-probs (0) or a reward."""
    for sample in samples:
        if not isinstance(sample.label, str):
            raise ValueError(f"supervised data needs text labels; the prompt {sample.prompt!r} has {sample.label!r}")
        tokens = [*tokenizer.encode(sample.label), *([] if (end := tokenizer.hf.eos_token_id) is None else [end])]
        sample.response_tokens, sample.text, sample.status = tokens, sample.label, COMPLETED
        sample.logprobs, sample.loss_mask = [0.0] * len(tokens), [1] * len(tokens)
        sample.versions = [0] * len(tokens)


class Rollout:
    """Draws and scores the responses of training and evaluation, through one scheduler and one reward pool."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, pool: RewardPool, timers: Timers,
                 stopping: Callable[[], bool] = lambda: False):
        """`stopping` is asked between dispatches; once it is True, `collect` raises Interrupted."""
        self.scheduler, self.tokenizer, self.pool = scheduler, tokenizer, pool
        self.timers, self.stopping = timers, stopping

    def collect(self, params: Params, samples: Sequence[Sample], sampling: SamplingParams, version: int) -> None:
        """Fill every sample: tokens, log-probs, status, text, reward. `params` are the engine's weights."""
        by_uid = {sample.uid: sample for sample in samples}
        self.scheduler.submit(Request(s.uid, list(s.prompt_tokens), sampling) for s in samples)
        futures: dict[int, concurrent.futures.Future[RewardResult]] = {}
        with self.timers("rollout_time"):
            while self.scheduler.busy:
                if self.stopping():
                    self.scheduler.abort()
                    raise Interrupted
                for request in self.scheduler.step(params):
                    sample = by_uid[request.uid]
                    self._finish(sample, request, version)
                    futures[sample.uid] = self.pool.submit(sample)
        with self.timers("reward_wait_time"):
            for uid, future in futures.items():
                result = future.result()
                by_uid[uid].reward, by_uid[uid].rewards = result.reward, dict(result.parts)

    def _finish(self, sample: Sample, request: Request, version: int) -> None:
        sample.response_tokens, sample.logprobs = request.tokens, request.logprobs
        sample.loss_mask, sample.versions = [1] * len(request.tokens), [version] * len(request.tokens)
        sample.end_reason = request.end_reason
        sample.status = TRUNCATED if request.end_reason == "length" else COMPLETED
        sample.text = request.text if request.text is not None else self.tokenizer.decode(request.tokens)


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """Sample-level metrics under their bare names (`response_len/mean`, ...), for `rollout/` and `eval/{name}/`."""
    lengths = np.asarray([len(s.response_tokens) for s in samples], np.float64)
    values = {
        "response_len/mean": lengths.mean(), "response_len/median": np.median(lengths),
        "response_len/max": lengths.max(), "response_len/min": lengths.min(),
        "truncated_ratio": np.mean([s.status == TRUNCATED for s in samples]),
        "repetition_frac": np.mean([repeats(s.response_tokens) for s in samples]),
    }
    if any(s.reward is not None for s in samples):
        values["raw_reward"] = nan_mean([_number(s.reward) for s in samples])
        values["rollout_log_probs"] = nan_mean([x for s in samples for x in s.logprobs])
    for part in sorted({name for s in samples for name in s.rewards}):
        values[f"reward/{part}"] = nan_mean([_number(s.rewards.get(part)) for s in samples])
    return {name: float(value) for name, value in values.items()} | _group_metrics(samples)


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def _group_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """pass@k over groups (right = reward of at least 1), and how many groups have one reward only."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.group, []).append(sample.reward)
    values: dict[str, float] = {}
    for rewards in groups.values():
        if len(rewards) > 1 and len(set(rewards)) == 1:
            name = f"zero_std/count_{rewards[0]:.4g}"
            values[name] = values.get(name, 0.0) + 1.0
    k = 1
    while k <= min((len(rewards) for rewards in groups.values()), default=0):
        right = [(len(rewards), sum(r >= 1 for r in rewards)) for rewards in groups.values()]
        values[f"passrate/pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in right]))
        k *= 2
    return values


def repeats(tokens: Sequence[int], period: int = 32, times: int = 3) -> bool:
    """Whether the end of `tokens` is one stretch of at most `period` tokens `times` times over, 12 tokens or more."""
    for size in range(1, min(period, len(tokens) // times) + 1):
        span = max(size * times, 12)
        tail = tokens[-span:]
        if len(tail) == span and all(tail[i] == tail[i + size] for i in range(span - size)):
            return True
    return False
