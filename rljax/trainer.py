"""Stage 6 of 7: the sharded train step. `accumulate` adds one micro-batch's gradients, `update` applies them.

`Updater` trains any tree by any objective; `Trainer` is the policy's, and scores too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax import policy, sharding
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.optimizer import OptimizerConfig, learning_rate, make_optimizer, state_shardings, trainable_mask
from rljax.policy import MAX, MEAN, LossConfig, Sums
from rljax.types import PackedBatch, Params, TrainState

Objective = Callable[[Params, PackedBatch], tuple[jax.Array, Sums]]


def accumulate_step(objective: Objective, params: Params, batch: PackedBatch, grads: Params, sums: Sums):
    """Add the gradients and sums of one micro-batch to those so far."""
    new, parts = jax.grad(objective, has_aux=True)(params, batch)
    merged = {k: jnp.maximum(sums[k], v) if k.startswith(MAX) else sums[k] + v for k, v in parts.items()}
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


class Updater:
    """The compiled programs that train one tree of parameters on one mesh."""

    def __init__(self, specs: Params, mesh: Mesh, objectives: Mapping[str, Objective], optim: OptimizerConfig,
                 clip_grad: float = 1.0):
        """`specs` describes the parameters (`decoder.specs`); each objective is the loss of one kind of step."""
        self.mesh, self.objectives = mesh, dict(objectives)
        self.shardings = sharding.tree_shardings(specs, sharding.TRAIN_RULES, mesh)
        self.batch_sharding = sharding.named(("batch", None), sharding.TRAIN_RULES, mesh)
        whole = sharding.replicated(mesh)
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), specs,
            is_leaf=lambda leaf: hasattr(leaf, "axes"),
        )
        optimizer = make_optimizer(optim, self.shapes)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        opt_shardings = state_shardings(optimizer, self.shapes, self.shardings, whole)
        self.state_shapes = TrainState(scalar, self.shapes, jax.eval_shape(optimizer.init, self.shapes), scalar)
        self.state_shardings = TrainState(whole, self.shardings, opt_shardings, whole)
        self._init = jax.jit(optimizer.init, out_shardings=opt_shardings)
        self._accumulate = {
            name: jax.jit(functools.partial(accumulate_step, objective), donate_argnums=(2, 3),
                          out_shardings=(self.shardings, whole))
            for name, objective in self.objectives.items()
        }
        self._update = jax.jit(
            functools.partial(update_step, optimizer, optim, clip_grad),
            donate_argnums=0, out_shardings=(self.state_shardings, whole),
        )
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes), out_shardings=self.shardings
        )
        self._sum_names: dict[str, list[str]] = {}

    def init(self, params: Params) -> TrainState:
        """A fresh state around `params` (float32, sharded as `self.shardings`), which it takes over."""
        scalars = sharding.to_devices((jnp.int32(0), jnp.int32(0)), sharding.replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return TrainState(scalars[0], params, self._init(params), scalars[1])

    def put(self, batch: PackedBatch) -> PackedBatch:
        """A packed batch from the host onto the mesh, rows split over the data axes."""
        return sharding.to_devices(batch, self.batch_sharding)

    def apply(self, state: TrainState, batches: list[PackedBatch], name: str) -> tuple[TrainState, Sums]:
        """One update of the objective `name` from its micro-batches. Returns the sums and the update's metrics,
        still on the device."""
        with jax.set_mesh(self.mesh):
            grads, sums = self._zeros(), self._zero_sums(name, batches[0])
            for batch in batches:
                grads, sums = self._accumulate[name](state.params, self.put(batch), grads, sums)
            state, metrics = self._update(state, grads)
        return state, {**sums, **metrics}

    def _zero_sums(self, name: str, batch: PackedBatch) -> Sums:
        if name not in self._sum_names:
            self._sum_names[name] = list(jax.eval_shape(self.objectives[name], self.shapes, batch)[1])
        zeros = {key: jnp.float32(0) for key in self._sum_names[name]}
        return sharding.to_devices(zeros, sharding.replicated(self.mesh))


class Scorer:
    """Log-probs of a model that need not be the one that is trained."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, loss: LossConfig):
        self.mesh, self.data_shards = mesh, mesh.shape["data"] * mesh.shape["fsdp"]
        self.shards = self.data_shards, mesh.shape["tensor"]
        self.shardings = sharding.tree_shardings(decoder.specs(cfg), sharding.TRAIN_RULES, mesh)
        self.batch_sharding = sharding.named(("batch", None), sharding.TRAIN_RULES, mesh)
        self._score = jax.jit(
            functools.partial(policy.token_scores, cfg, loss, self.shards), out_shardings=self.batch_sharding
        )

    def score(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        """(log-probs, entropies), [R, T] float32, nats; 0 where loss_mask is."""
        with jax.set_mesh(self.mesh):
            return self._score(params, sharding.to_devices(batch, self.batch_sharding))


class Trainer(Updater, Scorer):
    """The policy: `step` for its updates, `score` for its log-probs and those of a reference of its kind."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, loss: LossConfig, optim: OptimizerConfig, clip_grad: float = 1.0):
        self.cfg, self.loss = cfg, loss
        Scorer.__init__(self, cfg, mesh, loss)
        objectives = {
            old: functools.partial(policy.objective, cfg, dataclasses.replace(loss, old_logprobs=old), self.shards)
            for old in ("batch", "self")
        }
        Updater.__init__(self, decoder.specs(cfg), mesh, objectives, optim, clip_grad)

    def step(self, state: TrainState, batches: list[PackedBatch], *, on_policy: bool) -> tuple[TrainState, Sums]:
        """One update. `on_policy`: nothing moved since the rollout, so that the old log-probs are those of this very
        pass."""
        return self.apply(state, batches, "self" if on_policy else "batch")


def finish_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """`train/` metrics of one update from its fetched sums: means over trained tokens where they are means."""
    tokens = max(float(sums["tokens"]), 1.0)
    values = {}
    for name, value in sums.items():
        if name != "tokens":
            short = name.removeprefix(MEAN).removeprefix(MAX)
            values[f"train/{short}"] = float(value) / (tokens if name.startswith(MEAN) else 1.0)
    values["train/nonfinite_skips"] = values.pop("train/nonfinite")
    return values
