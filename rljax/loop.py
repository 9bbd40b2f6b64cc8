"""The seven stages of a rollout, in order, with resume around them."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rljax import assemble, critic, evaluation, hub, models, weights
from rljax.checkpoint import Checkpoints
from rljax.experience import Experience, Update, Weights
from rljax.gather import Prompts
from rljax.harvest import Harvest
from rljax.metrics import Pending, Recorder, Timers
from rljax.rewards.pool import RewardPool
from rljax.rollout import Interrupted, Rollout, summarize
from rljax.sample import Sample
from rljax.trainer import finish_metrics
from rljax.types import Params, TrainState

log = logging.getLogger(__name__)


class NonFinite(RuntimeError):
    """Too many updates in a row had a gradient that was not finite."""


@dataclasses.dataclass
class Progress:
    """Where the run stands between two rollouts: everything but the train state that a checkpoint needs."""

    rollouts: int = 0  # finished
    updates: int = 0  # train/step
    evaluated: int = -1  # rollouts after which the last evaluation took place
    exported: int = -1  # and the last export as a Hugging Face folder
    prompts: dict[str, Any] = dataclasses.field(default_factory=dict)
    record: dict[str, Any] = dataclasses.field(default_factory=dict)


class Loop:
    """One run. `stopping` is asked between dispatches and rollouts; once True, the run saves and ends."""

    def __init__(self, config: ConfigDict, run_dir: pathlib.Path, parts: assemble.Parts, pool: RewardPool,
                 stopping: Callable[[], bool], start: pathlib.Path | None):
        """`start`: the checkpoint to go on from (`assemble.starting_checkpoint`), None for a new run."""
        self.config, self.run_dir, self.parts, self.stopping = config, run_dir, parts, stopping
        self.pool, self.trainer = pool, parts.trainer
        self.timers, self.compiles = Timers(), CompileCounter()
        self.rollout = Rollout(parts.scheduler, parts.tokenizer, pool, self.timers, stopping, parts.post_process,
                               config.reward.group)
        self.supervised = config.algo.advantage_estimator == "sft"
        on_policy = parts.updates_per_rollout == 1 and config.algo.old_logprobs == "trainer"
        self.experience = Experience(config, self.trainer, parts.estimator, token_weights=parts.token_weights,
                                     critic=parts.critic, teacher=parts.teacher, on_policy=on_policy,
                                     shapes=assemble.pack_shapes(config, self.trainer))
        self.checkpoints = Checkpoints(assemble.checkpoint_dir(config, run_dir), keep=config.checkpoint.keep,
                                       async_save=config.checkpoint.async_save)
        self.prompts = Prompts(parts.source, config.rollout.n_samples_per_prompt)
        self.harvest = Harvest(config, self.prompts, self.rollout, parts.sampling, self.trainer.cfg.vocab_size)
        self.progress = Progress(prompts=self.prompts.state())
        self.state, self.critic, self.reference = self._start(start)
        self.harvest.check(self.progress.rollouts, parts.num_rollouts)
        self.teacher = weights.teacher_params(config, parts)
        self.draws = not self.supervised and not config.debug.train_only  # whether the sampler has work to do
        self.weights = parts.engine.weights(self.state.params) if self.draws else None
        if self.draws and config.sampler.warmup:
            parts.engine.warmup(self.weights)
        c = config.log
        self.record = Recorder(
            run_dir, tensorboard=c.tensorboard, jsonl=c.jsonl, wandb=c.wandb, project=c.project,
            experiment=c.experiment, resume=self.progress.record or None, total=parts.num_rollouts, interval=c.interval,
        )
        self.pending = Pending(self._log_update)

    def _start(self, start: pathlib.Path | None) -> tuple[TrainState, TrainState | None, Params | None]:
        """(policy, critic, reference): fresh, or those of the checkpoint `start`, with `progress` beside them."""
        parts, config = self.parts, self.config
        if start is None:
            state = self.trainer.init(weights.initial_params(config, self.trainer))
            return state, weights.critic_state(config, parts), weights.reference_params(config, parts)
        own = start.parent.absolute() == self.checkpoints.directory
        tree, host = (weights.restored if own else weights.adopted)(config, parts, start)
        self.progress = Progress(**{key: value for key, value in host.items() if key != "config"})
        if not own:  # a new run, with a record of its own
            self.progress = dataclasses.replace(self.progress, record={}, evaluated=-1, exported=-1)
        self.prompts.restore(self.progress.prompts)
        log.info("going on after %d rollouts from %s", self.progress.rollouts, start)
        return tree["policy"], tree.get("critic"), tree.get("reference")

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
        counts = self.pool.errors, self.pool.timeouts
        samples, values = self.harvest.next(self.weights, self.progress.rollouts)
        values |= {"rollout/reward_errors": self.pool.errors - counts[0],
                   "rollout/reward_timeouts": self.pool.timeouts - counts[1]}
        self._check_rewards(samples, values["rollout/reward_errors"] + values["rollout/reward_timeouts"])
        values |= {f"rollout/{name}": value for name, value in summarize(samples).items()}
        if not self.config.debug.rollout_only:
            values |= self._train(samples)
        self.record.samples(self.progress.rollouts, [s.to_json() for s in samples[: self.config.log.samples]])
        self.progress.rollouts += 1
        self.progress.prompts = self.prompts.state()
        return values

    def _check_rewards(self, samples: list[Sample], failed: int) -> None:
        """ValueError where every reward of a run's first rollout failed: the function, not the samples, is to blame."""
        fallbacks = all(sample.reward == self.pool.fallback for sample in samples)
        if self.progress.rollouts == 0 and samples and failed >= len(samples) and fallbacks:
            raise ValueError(f"reward.type = {self.config.reward.type}: all {failed} rewards of the first rollout "
                             f"failed, most with: {self.pool.worst}")

    def _train(self, samples: list[Sample]) -> dict[str, float]:
        """Stages 4 to 6."""
        scored = [sample for sample in samples if sample.reward is not None or self.supervised]
        if not scored:
            log.warning("rollout %d: none of its %d samples has a reward, so nothing is trained",
                        self.progress.rollouts + 1, len(samples))
        with self.timers("score_time"):
            critic_params = self.critic and self.critic.params
            by = Weights(self.state.params, self.reference, self.teacher, critic_params)
            updates, found = self.experience.make(scored, by)
        with self.timers("train_time"):
            for update in updates:
                self._update(update)
            self.pending.flush()  # waits for the last update, and keeps the record's order the same where a run ends
        self._refresh_reference()
        with self.timers("sync_time"):
            if self.draws:
                self.weights = jax.block_until_ready(self.parts.engine.weights(self.state.params, self.weights))
                found["perf/sync_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))
        return found

    def _update(self, update: Update) -> None:
        """Stage 6: one update, of the critic and, once it may move, of the policy."""
        sums: dict[str, Any] = {}
        if self.critic is not None:
            self.critic, sums["critic"] = self.parts.critic.step(self.critic, update.batches)
            if update.explained_variance is not None:
                sums["explained_variance"] = update.explained_variance
        if self.critic is None or self.progress.rollouts >= self.config.algo.num_critic_only_steps:
            self.state, sums["policy"] = self.trainer.step(self.state, update.batches, on_policy=update.on_policy)
        self.progress.updates += 1
        self.pending.push("train", self.progress.updates, sums)

    def _log_update(self, axis: str, step: int, sums: dict[str, Any]) -> None:
        values = finish_metrics(sums["policy"]) if "policy" in sums else {}
        if "critic" in sums:
            values |= critic.finish_metrics(sums["critic"])
        if "explained_variance" in sums:
            values["train/explained_variance"] = sums["explained_variance"]
        self.record.log(axis, step, values)
        for name in ("policy", "critic"):
            skipped = sums.get(name, {}).get("nonfinite", 0)
            if skipped > 0:
                log.warning("update %d of the %s skipped: its gradient is not finite", step, name)
            if skipped >= self.config.optim.max_nonfinite:
                raise NonFinite(f"{int(skipped)} updates of the {name} in a row had a gradient that is not finite "
                                f"(optim.max_nonfinite {self.config.optim.max_nonfinite}); the last was update {step}")

    def _refresh_reference(self) -> None:
        """The policy becomes the reference every `algo.ref_update_interval` rollouts."""
        interval = self.config.algo.ref_update_interval
        if self.reference is not None and interval and (self.progress.rollouts + 1) % interval == 0:
            self.reference = jax.tree.map(jnp.copy, self.state.params)

    def _log_rollout(self, values: dict[str, float]) -> None:
        """Stage 7: one line of metrics."""
        times = self.timers.pop()
        devices, scheduler = self.parts.mesh.size, self.parts.scheduler
        drawn = scheduler.take_counts()
        packed, trained = values.pop("row_tokens", 0.0), values.pop("trained_tokens", 0.0)
        if times.get("perf/rollout_time"):
            values["perf/rollout_tokens_per_device_per_sec"] = drawn["drawn"] / times["perf/rollout_time"] / devices
            values["perf/rollout_effective_tokens_per_device_per_sec"] = trained / times["perf/rollout_time"] / devices
            values["perf/slot_utilization"] = drawn["drawn"] / max(drawn["slot_steps"], 1)
            values["perf/prefix_shared_tokens"] = drawn["shared_tokens"]
            values["perf/preempted"] = drawn["preempted"]
        if times.get("perf/train_time"):
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
        if not self.parts.eval_sets or self.progress.evaluated == done or self.config.debug.train_only:
            return
        drawing = self.parts.engine.weights(self.state.params) if self.weights is None else self.weights
        values = evaluation.evaluate(self.rollout, drawing, self.parts.eval_sets, done,
                                     self.run_dir / "eval")
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
            self.checkpoints.save(self.progress.rollouts, self._trees(), host)

    def _trees(self) -> dict[str, Any]:
        """What a checkpoint holds of the devices (`weights.checkpoint_trees`)."""
        trees = {"policy": self.state, "critic": self.critic}
        if weights.keeps_reference(self.config):
            trees["reference"] = self.reference
        return {name: tree for name, tree in trees.items() if tree is not None}


class CompileCounter:
    """How many programs XLA compiled (or took from the persistent cache) since this was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._event)

    def _event(self, name: str, _: float, **details: Any) -> None:
        self.count += name == "/jax/core/compile/backend_compile_duration"
