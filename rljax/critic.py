"""PPO's critic: the policy's decoder with a scalar head in place of the vocabulary, a tree and optimizer of its own.

values[t] = hidden[t - 1] . value_head: what is expected before token t is drawn, in units of reward.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax import losses, sharding
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.optimizer import OptimizerConfig
from rljax.policy import MEAN, LossConfig, Sums, hidden_before
from rljax.trainer import Updater
from rljax.types import PackedBatch, Params, TrainState

HEAD = "value_head"


def specs(cfg: ModelConfig) -> Params:
    """The critic's parameters as `decoder.Spec` leaves: the decoder's without an untied head, and `value_head` [D]."""
    tree = {name: leaf for name, leaf in decoder.specs(cfg).items() if name != "lm_head"}
    return {**tree, HEAD: decoder.Spec((cfg.hidden_size,), (None,), "zeros")}


def token_values(cfg: ModelConfig, loss: LossConfig, params: Params, batch: PackedBatch) -> jax.Array:
    """[R, T] float32, in units of reward; 0 where loss_mask is."""
    hidden = hidden_before(cfg, loss, params, batch).astype(jnp.float32)
    return jnp.where(batch.loss_mask > 0, hidden @ params[HEAD].astype(jnp.float32), 0.0)


def objective(cfg: ModelConfig, loss: LossConfig, value_clip: float, params: Params, batch: PackedBatch):
    """sum w * value_loss over trained tokens; `old_values` and `returns` come in the batch's extras."""
    mask = batch.loss_mask > 0
    values = token_values(cfg, loss, params, batch)
    old, returns = (jnp.where(mask, batch.extras[name], 0.0) for name in ("old_values", "returns"))
    error, clipped = losses.value_loss(values, old, returns, value_clip)
    total = (jnp.where(mask, batch.loss_weight, 0.0) * error).sum()
    sums = {"tokens": mask.sum().astype(jnp.float32), "value_loss": total,
            MEAN + "value_clipfrac": jnp.where(mask, clipped, 0.0).sum()}
    return total, jax.lax.stop_gradient(sums)


class Critic(Updater):
    """The compiled programs of the critic."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, loss: LossConfig, value_clip: float, optim: OptimizerConfig,
                 clip_grad: float = 1.0):
        """Of `loss` only the compute dtype and remat count."""
        self.cfg = cfg
        values = functools.partial(token_values, cfg, loss)
        super().__init__(specs(cfg), mesh, {"value": functools.partial(objective, cfg, loss, value_clip)}, optim,
                         clip_grad)
        self._values = jax.jit(values, out_shardings=self.batch_sharding)

    def start(self, params: Params) -> TrainState:
        """A fresh state from a policy's weights (float32, in its layout, taken over): its head gives 0 everywhere."""
        head = sharding.to_devices(jnp.zeros(self.cfg.hidden_size, jnp.float32), self.shardings[HEAD])
        body = {name: leaf for name, leaf in params.items() if name != "lm_head"}
        return self.init({**body, HEAD: head})

    def values(self, params: Params, batch: PackedBatch) -> jax.Array:
        """[R, T] float32, in units of reward; 0 where loss_mask is."""
        with jax.set_mesh(self.mesh):
            return self._values(params, self.put(batch))

    def step(self, state: TrainState, batches: list[PackedBatch]) -> tuple[TrainState, Sums]:
        """One update of the values."""
        return self.apply(state, batches, "value")


def finish_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """`train/` metrics of one critic update from its fetched sums."""
    tokens = max(float(sums["tokens"]), 1.0)
    return {
        "train/value_loss": float(sums["value_loss"]),
        "train/value_clipfrac": float(sums[MEAN + "value_clipfrac"]) / tokens,
        "train/critic_grad_norm": float(sums["grad_norm"]), "train/critic_lr": float(sums["lr"]),
        "train/critic_nonfinite_skips": float(sums["nonfinite"]),
    }
