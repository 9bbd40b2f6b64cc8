"""Stage 6 of 7: the sharded train step. `score` gives log-probs, `accumulate` adds one micro-batch's gradients,
`update` applies them.

The loss of a step is sum(loss_weight * token_loss) over all its micro-batches, with weights made on the host for
the whole step: no denominators here, so packing, micro-batch size and device count cannot change it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax import losses, ops, sharding
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.optimizer import OptimizerConfig, learning_rate, make_optimizer, state_shardings, trainable_mask
from rljax.types import PackedBatch, Params, TrainState

Shards = tuple[int, int]  # how many parts of the rows, and of the vocabulary, lie on different devices
Sums = dict[str, jax.Array]  # scalars; sums over the micro-batches of a step, `_max` keys maxima


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What the loss is made of (KNOBS `algo`) and how it is computed."""

    surrogate: str = "clip"  # clip, sft
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    dual_clip: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    kl_metric: bool = False
    entropy_coef: float = 0.0
    old_logprobs: str = "batch"  # batch: as given; self: this very pass, for the only update of a rollout
    temperature: float = 1.0
    compute_dtype: Any = jnp.float32
    remat: str = "none"  # none, dots, full: what the backward pass makes again
    vocab_chunk: int = 8192

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference is in the loss or a metric."""
        return self.kl_loss_coef > 0 or self.kl_metric


def token_scores(cfg: ModelConfig, loss: LossConfig, shards: Shards, params: Params, batch: PackedBatch):
    """Log-prob of each trained token given those before it in its segment, and the entropy there: [R, T] float32,
    nats, 0 where loss_mask is."""
    hidden = decoder.forward(
        cfg, params, batch.tokens, batch.positions, batch.segment_ids, dtype=loss.compute_dtype, remat=loss.remat
    )
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    head = decoder.head_weight(cfg, params).astype(loss.compute_dtype)
    return ops.token_logprobs(
        before, head, batch.tokens, batch.loss_mask, temperature=loss.temperature, softcap=cfg.logits_softcap,
        chunk=loss.vocab_chunk, groups=shards[0], shards=shards[1],
    )


def policy_loss(loss: LossConfig, batch: PackedBatch, logp: jax.Array, entropy: jax.Array) -> tuple[jax.Array, Sums]:
    """The micro-batch's share of the step's loss, and sums for the metrics.

    loss = sum w * (surrogate + kl_loss_coef * KL(policy, reference) - entropy_coef * entropy), over trained tokens;
    GRPO (Shao et al. 2024) with the clip of PPO (Schulman et al. 2017).
    """
    mask = batch.loss_mask > 0
    logp, entropy = jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)
    old = jax.lax.stop_gradient(logp) if loss.old_logprobs == "self" else jnp.where(mask, batch.old_logprobs, 0.0)
    observed = {"tokens": mask.sum().astype(jnp.float32)}
    if loss.surrogate == "sft":
        policy = -logp
    else:
        advantages = jnp.where(mask, batch.advantages, 0.0)
        policy, clipped = losses.clipped_surrogate(
            logp, old, advantages, loss.eps_clip, loss.eps_clip_high, loss.dual_clip
        )
        observed |= _observe(mask, logp, old, clipped, batch.rollout_logprobs)
    weight = jnp.where(mask, batch.loss_weight, 0.0)
    parts = {"pg_loss": (weight * policy).sum(), "entropy_loss": (weight * entropy).sum()}
    total = parts["pg_loss"] - loss.entropy_coef * parts["entropy_loss"]
    if loss.needs_reference:
        kl = losses.approx_kl(logp, jnp.where(mask, batch.ref_logprobs, 0.0), loss.kl_loss_type)
        parts["kl_loss"] = (weight * jnp.where(mask, kl, 0.0)).sum()
        total += loss.kl_loss_coef * parts["kl_loss"]
    return total, {**parts, "loss": total, **jax.lax.stop_gradient(observed)}


def _observe(mask, logp, old, clipped, rollout_logprobs) -> Sums:
    """Sums over trained tokens that become means once divided by their number."""
    difference = jnp.abs(jnp.where(mask, old - rollout_logprobs, 0.0))
    return {
        "pg_clipfrac": jnp.where(mask, clipped, 0.0).sum(),
        "ppo_kl": (old - logp).sum(),
        "train_rollout_logprob_abs_diff": difference.sum(),
        "train_rollout_logprob_abs_diff_max": difference.max(),
    }


def accumulate_step(cfg, loss: LossConfig, shards: Shards, params: Params, batch: PackedBatch, grads: Params, sums: Sums):
    """Add the gradients and sums of one micro-batch to those so far."""

    def objective(p):
        logp, entropy = token_scores(cfg, loss, shards, p, batch)
        return policy_loss(loss, batch, logp, entropy)

    new, parts = jax.grad(objective, has_aux=True)(params)
    merged = {k: jnp.maximum(sums[k], v) if k.endswith("_max") else sums[k] + v for k, v in parts.items()}
    return jax.tree.map(jnp.add, grads, new), merged


def update_step(optimizer, optim: OptimizerConfig, clip_grad: float, state: TrainState, grads: Params):
    """Clip by the global norm and apply; a non-finite gradient leaves the state as it was and is counted."""
    moves = trainable_mask(optim, state.params)
    grads = jax.tree.map(lambda g, m: g if m else jnp.zeros_like(g), grads, moves)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0

    def move(state: TrainState) -> TrainState:
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), state.opt_state, state.params)
        # A frozen leaf is not even added 0 to, which would turn -0.0 into 0.0.
        params = jax.tree.map(lambda p, u, m: p + u if m else p, state.params, updates, moves)
        return TrainState(state.step + 1, params, opt_state, jnp.int32(0))

    def stay(state: TrainState) -> TrainState:
        return state.replace(nonfinite=state.nonfinite + 1)

    # A choice between branches works in place; one between values would hold both states.
    new = jax.lax.cond(finite, move, stay, state)
    return new, {"grad_norm": norm, "lr": learning_rate(optim, state.step), "nonfinite": new.nonfinite}


class Trainer:
    """The compiled programs of one policy on one mesh."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, loss: LossConfig, optim: OptimizerConfig, clip_grad: float = 1.0):
        self.cfg, self.mesh, self.loss, self.clip_grad = cfg, mesh, loss, clip_grad
        self.shardings = sharding.tree_shardings(decoder.specs(cfg), sharding.TRAIN_RULES, mesh)
        self.batch_sharding = sharding.named(("batch", None), sharding.TRAIN_RULES, mesh)
        self.data_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        whole = sharding.replicated(mesh)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), decoder.specs(cfg),
            is_leaf=lambda leaf: hasattr(leaf, "axes"),
        )
        optimizer = make_optimizer(optim, shapes)
        opt_shardings = state_shardings(optimizer, shapes, self.shardings, whole)
        self.state_shardings = TrainState(whole, self.shardings, opt_shardings, whole)
        shards = self.data_shards, mesh.shape["tensor"]
        self._init = jax.jit(optimizer.init, out_shardings=opt_shardings)
        self._score = jax.jit(functools.partial(token_scores, cfg, loss, shards), out_shardings=self.batch_sharding)
        self._accumulate = {
            old: jax.jit(
                functools.partial(accumulate_step, cfg, dataclasses.replace(loss, old_logprobs=old), shards),
                donate_argnums=(2, 3), out_shardings=(self.shardings, whole),
            )
            for old in ("batch", "self")
        }
        self._update = jax.jit(
            functools.partial(update_step, optimizer, optim, clip_grad),
            donate_argnums=0, out_shardings=(self.state_shardings, whole),
        )
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=self.shardings
        )

    def init(self, params: Params) -> TrainState:
        """A fresh state around `params` (float32, sharded as `self.shardings`), which it takes over."""
        scalars = sharding.to_devices((jnp.int32(0), jnp.int32(0)), sharding.replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return TrainState(scalars[0], params, self._init(params), scalars[1])

    def put(self, batch: PackedBatch) -> PackedBatch:
        """A packed batch from the host onto the mesh, rows split over the data axes."""
        return sharding.to_devices(batch, self.batch_sharding)

    def score(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        """(log-probs, entropies), [R, T] float32, nats; 0 where loss_mask is."""
        with jax.set_mesh(self.mesh):
            return self._score(params, self.put(batch))

    def step(self, state: TrainState, batches: list[PackedBatch], *, on_policy: bool) -> tuple[TrainState, Sums]:
        """One update from its micro-batches. `on_policy`: nothing moved since the rollout, so that the old
        log-probs are those of this very pass. Returns the sums and the update's metrics, still on the device."""
        with jax.set_mesh(self.mesh):
            grads, sums = self._zeros(), self._zero_sums()
            for batch in batches:
                accumulate = self._accumulate["self" if on_policy else "batch"]
                grads, sums = accumulate(state.params, self.put(batch), grads, sums)
            state, metrics = self._update(state, grads)
        return state, {**sums, **metrics}

    def _zero_sums(self) -> Sums:
        names = ["loss", "pg_loss", "entropy_loss", "tokens"] + ["kl_loss"] * self.loss.needs_reference
        if self.loss.surrogate != "sft":
            names += ["pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"]
        return sharding.to_devices({name: jnp.float32(0) for name in names}, sharding.replicated(self.mesh))


def finish_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """`train/` metrics of one update from its fetched sums: means over trained tokens where they are means."""
    tokens = max(float(sums["tokens"]), 1.0)
    means = ("pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff")
    values = {f"train/{k}": float(v) / (tokens if k in means else 1.0) for k, v in sums.items() if k != "tokens"}
    values["train/nonfinite_skips"] = values.pop("train/nonfinite")
    return values
