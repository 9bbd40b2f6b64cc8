"""Stages 4 and 5 of 7 for one rollout: what models say of its samples, their advantages, and packed micro-batches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from rljax import advantages as formulas
from rljax import algorithms, packing, sharding
from rljax.algorithms import Scores
from rljax.critic import Critic
from rljax.metrics import masked_mean, repeats
from rljax.rewards import format as shape
from rljax.sample import TRUNCATED, Sample
from rljax.trainer import Scorer, Trainer
from rljax.types import PackedBatch, Params

log = logging.getLogger(__name__)
PENALTIES = ("overlong", "repetition", "form")
Arrays = list[np.ndarray]  # float32 [m] for each sample
TokenWeights = Callable[[list[Sample], Any], Arrays]


class Weights(NamedTuple):
    """The parameters that score a rollout; None where the run has no such model."""

    policy: Params
    reference: Params | None = None
    teacher: Params | None = None
    critic: Params | None = None


@dataclasses.dataclass
class Update:
    """One update of a rollout: its micro-batches, and what is known of it on the host."""

    batches: list[PackedBatch]
    on_policy: bool  # nothing was trained since the rollout: the update makes its old log-probs itself
    explained_variance: float | None  # of the critic's values, made before the update


def overlong_penalty(length: int, max_response_len: int, buffer_len: int, penalty: float) -> float:
    """DAPO's soft penalty, at most 0: 0 up to max_response_len - buffer_len tokens, from there down in a line to
    -penalty at max_response_len. Yu et al. 2025 (arXiv:2503.14476)."""
    over = length - (max_response_len - buffer_len)
    return -penalty * min(max(over, 0) / buffer_len, 1.0) if buffer_len > 0 else 0.0


def shape_rewards(samples: Sequence[Sample], config: ConfigDict) -> dict[str, float]:
    """Add the penalties of length, repetition and form to each scored sample's reward, and take truncated samples out
    of the loss (`algo.mask_truncated`), while they stay in their group. Returns the penalties' means as metrics."""
    limit, reward = config.rollout.max_response_len, config.reward
    for sample in samples:
        if reward.overlong_buffer_len and sample.reward is not None:
            size = len(sample.response_tokens)
            sample.rewards["overlong"] = overlong_penalty(
                size, limit, reward.overlong_buffer_len, reward.overlong_penalty
            )
            sample.reward += sample.rewards["overlong"]
        if reward.repetition_penalty and sample.reward is not None:
            sample.rewards["repetition"] = -reward.repetition_penalty * repeats(sample.response_tokens)
            sample.reward += sample.rewards["repetition"]
        if reward.format_penalty and sample.reward is not None:
            sample.rewards["form"] = -reward.format_penalty * (not shape.fits(sample.text))
            sample.reward += sample.rewards["form"]
        if config.algo.mask_truncated and sample.status == TRUNCATED:
            sample.loss_mask = [0] * len(sample.response_tokens)
    found = {name: [s.rewards[name] for s in samples if name in s.rewards] for name in PENALTIES}
    return {f"rollout/reward/{name}": float(np.mean(values)) for name, values in found.items() if values}


class Experience:
    """Makes the updates of a rollout from its scored samples."""

    def __init__(self, config: ConfigDict, trainer: Trainer, estimator: algorithms.Estimator, *,
                 token_weights: TokenWeights | None = None, critic: Critic | None = None,
                 teacher: Scorer | None = None, on_policy: bool, shapes: dict[str, Any]):
        """`on_policy`: a rollout is one update, which makes the policy's old log-probs itself. `token_weights` is the
        user's loss aggregation, `shapes` are arguments of `packing.pack`."""
        self.config, self.trainer, self.estimator, self.token_weights = config, trainer, estimator, token_weights
        self.critic, self.teacher, self.shapes, self.on_policy = critic, teacher, shapes, on_policy
        algo = config.algo
        self.by_trainer = algo.old_logprobs == "trainer" and algo.surrogate != "sft"
        self.reads_old = algo.kl_coef > 0 or algo.opd_kl_coef > 0

    def make(self, samples: list[Sample], weights: Weights) -> tuple[list[Update], dict[str, float]]:
        """Updates in order, and metrics. An update with nothing to train is left out, and said."""
        values = shape_rewards(samples, self.config)
        parts = packing.split_updates(len(samples), self.config.train.global_batch_size or len(samples) or 1)
        trained = [part for part in parts if any(any(samples[index].loss_mask) for index in part)]
        if len(trained) < len(parts):
            log.warning("%d of %d updates have no token to train: skipped", len(parts) - len(trained), len(parts))
        if not trained:
            return [], values | {"trained_tokens": 0.0, "row_tokens": 0.0}
        single = self.on_policy and len(parts) == 1
        hooks = _hooks(samples)
        scores, entropies = self._score(samples, parts, weights, self.by_trainer and (not single or self.reads_old))
        advantages, returns = self._advantages(samples, scores)
        updates = [self._update(samples, part, scores, advantages, returns, hooks, single) for part in trained]
        values |= self._means(samples, scores, entropies, advantages, returns)
        mask = np.concatenate([sample.loss_mask for sample in samples])
        values |= {f"rollout/extra/{name}": masked_mean(np.concatenate(arrays), mask) for name, arrays in hooks.items()}
        return updates, values | _row_metrics(samples, advantages, updates)

    def _score(self, samples: list[Sample], parts: Sequence[Sequence[int]], weights: Weights, old: bool):
        """(scores, entropies or None): one pass of each model that something needs, in the updates' own shapes, so
        that nothing more compiles."""
        wanted: dict[str, Callable[[PackedBatch], Any]] = {}
        if old:
            wanted["old_logprobs"] = lambda batch: self.trainer.score(weights.policy, batch)
        if weights.reference is not None:
            wanted["ref_logprobs"] = lambda batch: self.trainer.score(weights.reference, batch)[0]
        if weights.teacher is not None:
            wanted["teacher_logprobs"] = lambda batch: self.teacher.score(weights.teacher, batch)[0]
        if self.critic is not None:
            wanted["values"] = lambda batch: self.critic.values(weights.critic, batch)
        found: dict[str, Arrays] = {}
        for part in parts if wanted else ():
            items = [_item(samples[index]) for index in part]
            batches = packing.pack(items, **self.shapes)
            outputs = sharding.to_host([{name: score(batch) for name, score in wanted.items()} for batch in batches])
            if old:
                for one in outputs:
                    one["old_logprobs"], one["entropy"] = one["old_logprobs"]
            for name in outputs[0]:
                values = packing.unpack(batches, [one[name] for one in outputs], items)
                found.setdefault(name, []).extend(values)
        if self.config.algo.old_logprobs == "rollout":
            found["old_logprobs"] = [np.asarray(sample.logprobs, np.float32) for sample in samples]
        entropies = found.pop("entropy", None)
        rows = [dict(zip(found, values)) for values in zip(*found.values())] or [{}] * len(samples)
        return [Scores(**row) for row in rows], entropies

    def _advantages(self, samples: list[Sample], scores: list[Scores]) -> tuple[Arrays, Arrays | None]:
        """(advantages, returns of the critic): the estimator's, plus the teacher's term, whitened where asked for."""
        algo = self.config.algo
        advantages = algorithms.estimate(self.estimator, samples, algo, scores)
        returns = None
        if self.critic is not None and algo.advantage_estimator == "ppo":
            returns = [one + score.need("values") for one, score in zip(advantages, scores, strict=True)]
        elif self.critic is not None:  # an estimator without the values as baseline: what was really earned
            rewards, kl = [sample.reward for sample in samples], algorithms.token_kl(samples, algo, scores)
            returns = algorithms.over_tokens(_returns, samples, rewards, kl, kl_coef=algo.kl_coef, gamma=algo.gamma)[0]
        if algo.opd_kl_coef > 0:
            advantages = [
                one - algo.opd_kl_coef * np.where(np.asarray(sample.loss_mask) > 0, score.need("old_logprobs")
                                                  - score.need("teacher_logprobs"), 0.0).astype(np.float32)
                for one, sample, score in zip(advantages, samples, scores, strict=True)
            ]
        if algo.normalize_advantages:
            advantages = algorithms.over_tokens(_whiten, samples, advantages)[0]
        return advantages, returns

    def _update(self, samples, part, scores, advantages, returns, hooks, single) -> Update:
        """The packed micro-batches of the samples `part`."""
        members = [samples[index] for index in part]
        items = []
        for index, sample, weight in zip(part, members, self._loss_weights(members), strict=True):
            extras = {name: arrays[index] for name, arrays in hooks.items()}
            if returns is not None:
                extras |= {"old_values": scores[index].values, "returns": returns[index]}
            items.append(_item(sample, weight, advantages[index], scores[index], extras))
        explained = None
        if returns is not None:
            explained = explained_variance([scores[i].values for i in part], [returns[i] for i in part],
                                           [samples[i].loss_mask for i in part])
        return Update(packing.pack(items, **self.shapes), single, explained)

    def _loss_weights(self, samples: list[Sample]) -> Arrays:
        algo = self.config.algo
        masks = [sample.loss_mask for sample in samples]
        if self.token_weights is None:
            length = algo.loss_length or self.config.rollout.max_response_len
            return packing.loss_weights(masks, algo.loss_aggregation, length)
        weights = [np.asarray(one, np.float32) for one in self.token_weights(samples, algo)]
        if [len(one) for one in weights] != [len(mask) for mask in masks]:
            raise ValueError(f"algo.loss_aggregation {algo.loss_aggregation} returned weights of lengths "
                             f"{[len(one) for one in weights][:8]} for masks of {[len(mask) for mask in masks][:8]}")
        if not all(np.isfinite(one).all() for one in weights):
            raise ValueError(f"algo.loss_aggregation {algo.loss_aggregation} returned a weight that is not finite")
        return [np.where(np.asarray(mask) > 0, one, 0.0) for mask, one in zip(masks, weights, strict=True)]

    def _means(self, samples, scores, entropies, advantages, returns) -> dict[str, float]:
        """`rollout/` metrics: means over trained tokens."""
        algo, old = self.config.algo, [one.old_logprobs for one in scores]
        found = {
            "log_probs": old if self.by_trainer else None, "ref_log_probs": [one.ref_logprobs for one in scores],
            "teacher_log_probs": [one.teacher_logprobs for one in scores], "values": [one.values for one in scores],
            "entropy": entropies, "returns": returns, "advantages": advantages,
        }
        found = {name: arrays for name, arrays in found.items() if arrays is not None and arrays[0] is not None}
        if old[0] is not None and "ref_log_probs" in found:
            found["kl"] = algorithms.over_tokens(algorithms.kl_estimate, samples, old, found["ref_log_probs"],
                                                 kind=algo.kl_reward_type if algo.kl_coef else algo.kl_loss_type)[0]
        mask = np.concatenate([sample.loss_mask for sample in samples])
        return {f"rollout/{name}": masked_mean(np.concatenate(arrays), mask) for name, arrays in found.items()}


def _whiten(mask: jax.Array, advantages: jax.Array) -> tuple[jax.Array]:
    return (formulas.whiten(advantages, mask),)


def _returns(mask: jax.Array, rewards: jax.Array, kl: jax.Array, kl_coef: float, gamma: float) -> tuple[jax.Array]:
    return (formulas.discounted_returns(formulas.token_rewards(rewards, kl, mask, kl_coef), mask, gamma),)


def explained_variance(values: Arrays, returns: Arrays, masks: Sequence[Sequence[int]]) -> float | None:
    """1 - var(returns - values) / var(returns) over trained tokens; None where the returns do not vary."""
    kept = np.concatenate([np.asarray(mask) for mask in masks]) > 0
    target = np.concatenate(returns).astype(np.float64)[kept]
    error = target - np.concatenate(values).astype(np.float64)[kept]
    return float(1.0 - error.var() / target.var()) if target.size and target.var() > 0 else None


def _hooks(samples: Sequence[Sample]) -> dict[str, Arrays]:
    """Per-token numbers that a hook put into `train_metadata`: lists with one entry for each response token, by name.
    ValueError naming the samples that lack one, or have one of another length."""
    names = {name for sample in samples for name, values in sample.train_metadata.items()
             if isinstance(values, (list, tuple, np.ndarray))}
    for name in sorted(names):
        bad = [sample.uid for sample in samples
               if np.shape(sample.train_metadata.get(name)) != (len(sample.response_tokens),)]
        if bad:
            raise ValueError(f"train_metadata[{name!r}] has not one number for each response token on {len(bad)} of "
                             f"{len(samples)} samples: {', '.join(map(str, bad[:8]))}")
    return {name: [np.asarray(sample.train_metadata[name], np.float32) for sample in samples] for name in sorted(names)}


def _item(sample: Sample, weight: np.ndarray | None = None, advantages: np.ndarray | None = None,
          scores: Scores = Scores(), extras: dict[str, np.ndarray] | None = None) -> packing.PackItem:
    """A sample as what `packing.pack` takes; zeros for what is not given."""
    sample.check()
    zeros = np.zeros(len(sample.response_tokens), np.float32)

    def given(values: np.ndarray | None) -> np.ndarray:
        return zeros if values is None else values

    return packing.PackItem(
        tokens=np.asarray(sample.prompt_tokens + sample.response_tokens, np.int32),
        prompt_len=len(sample.prompt_tokens), loss_mask=np.asarray(sample.loss_mask, np.int32),
        loss_weight=given(weight), advantages=given(advantages), old_logprobs=given(scores.old_logprobs),
        ref_logprobs=given(scores.ref_logprobs), rollout_logprobs=np.asarray(sample.logprobs, np.float32),
        extras=extras or {},
    )


def _row_metrics(samples: list[Sample], advantages: Arrays, updates: list[Update]) -> dict[str, float]:
    """How full the rows are, and the mean of each sample's advantage at its last trained token."""
    batches = [batch for update in updates for batch in update.batches]
    rows = sum(batch.tokens.size for batch in batches)
    real = sum(int((batch.segment_ids > 0).sum()) for batch in batches)
    masks = [np.asarray(sample.loss_mask) for sample in samples]
    last = [one[mask > 0][-1] if mask.any() else 0.0 for one, mask in zip(advantages, masks)]
    return {"row_tokens": float(rows), "trained_tokens": float(sum(mask.sum() for mask in masks)),
            "perf/packing_efficiency": real / rows, "rollout/rewards": float(np.mean(last))}
