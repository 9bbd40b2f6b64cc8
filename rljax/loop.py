"""The seven stages of a rollout, in order, with resume around them."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from rljax import algorithms, assemble, checkpoint, evaluate, hub, losses, models, packing, sharding
from rljax.checkpoint import Checkpoints
from rljax.metrics import Pending, Recorder, Timers, masked_mean
from rljax.rewards.pool import RewardPool
from rljax.rollout import Interrupted, Rollout, from_labels, make_group, summarize
from rljax.sample import Sample
from rljax.trainer import finish_metrics
from rljax.types import PackedBatch, TrainState

log = logging.getLogger(__name__)


class NonFinite(RuntimeError):
    """Too many updates in a row had a gradient that was not finite."""


@dataclasses.dataclass
class Progress:
    """Where the run stands between two rollouts: everything but the train state that a checkpoint needs."""

    rollouts: int = 0  # finished
    groups: int = 0  # prompt instances handed out
    updates: int = 0  # train/step
    evaluated: int = -1  # rollouts after which the last evaluation took place
    exported: int = -1  # and the last export as a Hugging Face folder
    source: dict[str, Any] = dataclasses.field(default_factory=dict)
    record: dict[str, Any] = dataclasses.field(default_factory=dict)


class Loop:
    """One run. `stopping` is asked between dispatches and rollouts; once True, the run saves and ends."""

    def __init__(self, config: ConfigDict, run_dir: pathlib.Path, parts: assemble.Parts, pool: RewardPool,
                 stopping: Callable[[], bool], start: pathlib.Path | None):
        """`start`: the checkpoint to go on from (`assemble.starting_checkpoint`), None for a new run."""
        self.config, self.run_dir, self.parts, self.stopping = config, run_dir, parts, stopping
        self.pool, self.trainer = pool, parts.trainer
        self.timers, self.compiles = Timers(), CompileCounter()
        self.rollout = Rollout(parts.scheduler, parts.tokenizer, pool, self.timers, stopping)
        self.supervised = config.algo.advantage_estimator == "sft"
        self.on_policy = parts.updates_per_rollout == 1 and config.algo.old_logprobs == "trainer"
        self.checkpoints = Checkpoints(assemble.checkpoint_dir(config, run_dir), keep=config.checkpoint.keep,
                                       async_save=config.checkpoint.async_save)
        self.progress = Progress(source=parts.source.state())
        self.state = self._start(start)
        needs_reference = self.trainer.loss.needs_reference
        self.reference = assemble.reference_params(config, self.trainer) if needs_reference else None
        self.weights = None if self.supervised else parts.engine.weights(self.state.params)
        c = config.log
        self.record = Recorder(
            run_dir, tensorboard=c.tensorboard, jsonl=c.jsonl, wandb=c.wandb, project=c.project,
            experiment=c.experiment, resume=self.progress.record or None, total=parts.num_rollouts, interval=c.interval,
        )
        self.pending = Pending(self._log_update)

    def _start(self, start: pathlib.Path | None) -> TrainState:
        """A fresh state, or that of the checkpoint `start`, with `progress` beside it."""
        if start is None:
            return self.trainer.init(assemble.initial_params(self.config, self.trainer))
        state, host = checkpoint.restore(start, self.parts.state_shapes, self.trainer.state_shardings)
        del host["config"]
        self.progress = Progress(**host)
        if start.parent.absolute() != self.checkpoints.directory:  # a new run, with a record of its own
            self.progress = dataclasses.replace(self.progress, record={}, evaluated=-1, exported=-1)
        self.parts.source.restore(self.progress.source)
        log.info("going on after %d rollouts from %s", self.progress.rollouts, start)
        return state

    @property
    def finished(self) -> bool:
        """Whether all rollouts are done."""
        return self.progress.rollouts >= self.parts.num_rollouts

    def run(self) -> None:
        """All rollouts that are left. Saves at the end, and where it is asked to stop."""
        with self.checkpoints, self.record:
            if self.finished:
                log.info("all %d rollouts are done already; a larger rollout.num_rollouts than %d goes on",
                         self.progress.rollouts, self.parts.num_rollouts)
            try:
                self._border()
                while not self.finished and not self.stopping():
                    with self.timers("step_time"):
                        values = self._one_rollout()
                    self._log_rollout(values)
                    self._border()
            except Interrupted:
                log.info("asked to stop; what was under way after %d rollouts will be done again",
                         self.progress.rollouts)
            finally:
                self.pending.flush()
            self._save()

    def _one_rollout(self) -> dict[str, float]:
        """Stages 1 to 6."""
        self.progress.source = self.parts.source.state()
        counts = self.pool.errors, self.pool.timeouts
        samples = self._samples()
        values = {"rollout/reward_errors": self.pool.errors - counts[0],
                  "rollout/reward_timeouts": self.pool.timeouts - counts[1]}
        scored = [sample for sample in samples if sample.reward is not None or self.supervised]
        if not scored:
            log.warning("rollout %d: none of its %d samples has a reward, so nothing is trained",
                        self.progress.rollouts + 1, len(samples))
        advantages = algorithms.estimate(self.parts.estimator, scored, self.config.algo) if scored else []
        updates = self._pack(scored, advantages)
        values |= {f"rollout/{name}": value for name, value in summarize(samples).items()}
        values |= self._score(updates)
        values |= _packed_metrics(scored, advantages, updates)
        with self.timers("train_time"):
            for batches in updates:
                self._update(batches)
            self.pending.flush()  # waits for the last update, and keeps the record's order the same where a run ends
        with self.timers("sync_time"):
            if not self.supervised:
                self.weights = jax.block_until_ready(self.parts.engine.weights(self.state.params))
        self.record.samples(self.progress.rollouts, [s.to_json() for s in samples[: self.config.log.samples]])
        self.progress.rollouts += 1
        self.progress.source = self.parts.source.state()
        return values

    def _samples(self) -> list[Sample]:
        """Stages 1 to 3: prompts, responses, rewards."""
        rollout = self.config.rollout
        samples = []
        for offset, prompt in enumerate(self.parts.source.take(rollout.batch_size)):
            samples += make_group(prompt, self.progress.groups + offset, rollout.n_samples_per_prompt)
        if self.supervised:
            from_labels(samples, self.parts.tokenizer)
        else:
            self.rollout.collect(self.weights, samples, self.parts.sampling, self.progress.updates)
        self.progress.groups += rollout.batch_size
        return samples

    def _pack(self, samples: list[Sample], advantages: list[np.ndarray]) -> list[list[PackedBatch]]:
        """Stage 5: for each update its micro-batches. An update with nothing to train is left out, and said."""
        algo, config = self.config.algo, self.config
        size = config.train.global_batch_size or len(samples) or 1
        length = algo.loss_length or config.rollout.max_response_len
        updates = []
        for part in packing.split_updates(len(samples), size):
            masks = [samples[i].loss_mask for i in part]
            if not any(map(any, masks)):
                log.warning("an update of rollout %d has no token to train: skipped", self.progress.rollouts + 1)
                continue
            weights = packing.loss_weights(masks, algo.loss_aggregation, length)
            items = [pack_item(samples[i], w, advantages[i]) for i, w in zip(part, weights, strict=True)]
            updates.append(packing.pack(items, **assemble.pack_shapes(config, self.trainer)))
        return updates

    def _score(self, updates: list[list[PackedBatch]]) -> dict[str, float]:
        """Old and reference log-probs into the batches, where the loss will read them; their means."""
        trainer, sums = self.trainer, ScoreSums()
        needs_old = not (self.on_policy or self.supervised) and self.config.algo.old_logprobs == "trainer"
        with self.timers("score_time"):
            for batches in updates:
                for index, batch in enumerate(batches):
                    old, entropy, reference = batch.rollout_logprobs, None, batch.ref_logprobs
                    if needs_old:
                        old, entropy = trainer.score(self.state.params, batch)
                    if self.reference is not None:
                        reference, _ = trainer.score(self.reference, batch)
                    batches[index] = batch.replace(old_logprobs=old, ref_logprobs=reference)
                    sums.add(batch.loss_mask, old if needs_old else None, entropy,
                             reference if self.reference is not None else None, trainer.loss.kl_loss_type)
        return sums.means()

    def _update(self, batches: list[PackedBatch]) -> None:
        """Stage 6: one update."""
        self.state, sums = self.trainer.step(self.state, batches, on_policy=self.on_policy)
        self.progress.updates += 1
        self.pending.push("train", self.progress.updates, sums)

    def _log_update(self, axis: str, step: int, sums: dict[str, float]) -> None:
        self.record.log(axis, step, finish_metrics(sums))
        if sums["nonfinite"] > 0:
            log.warning("update %d skipped: its gradient is not finite", step)
        if sums["nonfinite"] >= self.config.optim.max_nonfinite:
            raise NonFinite(f"{int(sums['nonfinite'])} updates in a row had a gradient that is not finite "
                            f"(optim.max_nonfinite {self.config.optim.max_nonfinite}); the last was update {step}")

    def _log_rollout(self, values: dict[str, float]) -> None:
        """Stage 7: one line of metrics."""
        times = self.timers.pop()
        devices, scheduler = self.parts.mesh.size, self.parts.scheduler
        drawn = scheduler.take_counts()
        packed, trained = values.pop("row_tokens"), values.pop("trained_tokens")
        if times.get("perf/rollout_time"):
            values["perf/rollout_tokens_per_device_per_sec"] = drawn["drawn"] / times["perf/rollout_time"] / devices
            values["perf/rollout_effective_tokens_per_device_per_sec"] = trained / times["perf/rollout_time"] / devices
            values["perf/slot_utilization"] = drawn["drawn"] / max(drawn["slot_steps"], 1)
            values["perf/prefix_shared_tokens"] = drawn["shared_tokens"]
        values["perf/train_tokens_per_device_per_sec"] = packed / times["perf/train_time"] / devices
        values["perf/train_effective_tokens_per_device_per_sec"] = trained / times["perf/train_time"] / devices
        speed = self.parts.flops_per_token * packed / times["perf/train_time"] / devices
        values["perf/tflops_per_device"] = speed / 1e12
        if self.parts.peak_flops:
            values["perf/mfu"] = speed / self.parts.peak_flops
        values["perf/compiles"] = self.compiles.count
        stats = jax.local_devices()[0].memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            values["perf/device_memory_peak"] = stats["peak_bytes_in_use"]
        self.record.log("rollout", self.progress.rollouts - 1, values | times)

    def _border(self) -> None:
        """Between two rollouts: evaluation, export and checkpoint where they are due and were not done before."""
        done, c = self.progress.rollouts, self.config
        last = done == self.parts.num_rollouts
        at_interval = done > 0 and c.eval.interval and (done % c.eval.interval == 0 or last)
        if at_interval or (done == 0 and c.eval.before_train):
            self._evaluate()
        exports = c.checkpoint.save_hf_interval
        if done and exports and (done % exports == 0 or last) and self.progress.exported != done:
            self._export()
        if done and c.checkpoint.save_interval and done % c.checkpoint.save_interval == 0:
            self._save()

    def _evaluate(self) -> None:
        done = self.progress.rollouts
        if not self.parts.eval_sets or self.progress.evaluated == done:
            return
        weights = self.parts.engine.weights(self.state.params) if self.weights is None else self.weights
        values = evaluate.evaluate(self.rollout, weights, self.parts.eval_sets, self.progress.updates)
        self.record.log("eval", done, values)
        self.progress.evaluated = done
        self.parts.scheduler.take_counts()
        self.timers.pop()

    def _export(self) -> None:
        models.save(self.run_dir / "hf" / str(self.progress.rollouts), self.trainer.cfg, self.state.params,
                    dtype=self.config.checkpoint.save_hf_dtype, tokenizer_from=hub.resolve(self.config.model.path))
        self.progress.exported = self.progress.rollouts

    def _save(self) -> None:
        """The state between two rollouts."""
        with self.timers("save_time"):
            self.progress.record = self.record.position()
            host = {**dataclasses.asdict(self.progress), "config": self.config.to_dict()}
            self.checkpoints.save(self.progress.rollouts, self.state, host)


def pack_item(sample: Sample, weight: np.ndarray, advantages: np.ndarray) -> packing.PackItem:
    """A scored sample as what `packing.pack` takes."""
    sample.check()
    zeros = np.zeros(len(sample.response_tokens), np.float32)
    return packing.PackItem(
        tokens=np.asarray(sample.prompt_tokens + sample.response_tokens, np.int32),
        prompt_len=len(sample.prompt_tokens), loss_mask=np.asarray(sample.loss_mask, np.int32), loss_weight=weight,
        advantages=advantages, old_logprobs=zeros, ref_logprobs=zeros,
        rollout_logprobs=np.asarray(sample.logprobs, np.float32),
    )


def _packed_metrics(samples: Sequence[Sample], advantages, updates: list[list[PackedBatch]]) -> dict[str, float]:
    """Means over trained tokens, and how full the rows are."""
    batches = [batch for update in updates for batch in update]
    rows = sum(batch.tokens.size for batch in batches)
    real = sum(int((batch.segment_ids > 0).sum()) for batch in batches)
    masks = [np.asarray(sample.loss_mask) for sample in samples]
    values = {"row_tokens": float(rows), "trained_tokens": float(sum(mask.sum() for mask in masks))}
    if rows:
        values["perf/packing_efficiency"] = real / rows
        values["rollout/advantages"] = masked_mean(np.concatenate(advantages), np.concatenate(masks))
        last = [a[m > 0][-1] if m.any() else 0.0 for a, m in zip(advantages, masks)]
        values["rollout/rewards"] = float(np.mean(last))
    return values


class ScoreSums:
    """Means over trained tokens of what the scoring pass returns, fetched once for all micro-batches."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []

    def add(self, mask: Any, old: Any, entropy: Any, reference: Any, kl_type: str) -> None:
        """Keep one micro-batch's [R, T] arrays; None = not computed."""
        found = {"mask": mask, "log_probs": old, "entropy": entropy, "ref_log_probs": reference}
        if old is not None and reference is not None:
            found["kl"] = losses.approx_kl(old, reference, kl_type)
        self.parts.append({name: value for name, value in found.items() if value is not None})

    def means(self) -> dict[str, float]:
        """`rollout/` metrics."""
        parts = sharding.to_host(self.parts)
        names = [name for name in (parts[0] if parts else ()) if name != "mask"]
        mask = np.concatenate([p["mask"].ravel() for p in parts]) if names else None
        return {f"rollout/{n}": masked_mean(np.concatenate([p[n].ravel() for p in parts]), mask) for n in names}


class CompileCounter:
    """How many programs XLA compiled (or took from the persistent cache) since this was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._event)

    def _event(self, name: str, _: float, **details: Any) -> None:
        self.count += name == "/jax/core/compile/backend_compile_duration"
