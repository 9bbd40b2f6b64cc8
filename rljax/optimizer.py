"""The optimizer from the `optim` knobs: schedule, weight decay and which leaves move."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from rljax.types import Params


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The `optim` section with `model.trainable` and `model.frozen`; total_updates ends a decaying schedule."""

    lr: float
    schedule: str = "constant"  # constant, linear, cosine
    warmup_steps: int = 0
    total_updates: int = 1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    trainable: str = ".*"
    frozen: str = ""


def learning_rate(config: OptimizerConfig, count: jax.Array) -> jax.Array:
    """Rate of the update after `count` updates, float32: linear warm-up to lr, whose first step is lr / warmup_steps,
    then constant, or down to 0 at `total_updates` by a line or half a cosine. Never 0 at the first update."""
    done = (count - config.warmup_steps) / max(1, config.total_updates - config.warmup_steps)
    done = jnp.clip(done, 0.0, 1.0)
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done))}[config.schedule]
    warm = jnp.minimum(1.0, (count + 1) / max(1, config.warmup_steps))
    return jnp.asarray(config.lr * warm * decay, jnp.float32)


def leaf_names(params: Params) -> Params:
    """A tree like params with each leaf's name, `layers/q` say."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return flax.traverse_util.unflatten_dict({name: name for name in flat}, sep="/")


def trainable_mask(config: OptimizerConfig, params: Params) -> Params:
    """True where `trainable` matches a leaf's name and `frozen` (if set) does not; ValueError where nothing is left."""
    mask = jax.tree.map(
        lambda name: bool(re.search(config.trainable, name)) and not (config.frozen and re.search(config.frozen, name)),
        leaf_names(params),
    )
    if not any(jax.tree.leaves(mask)):
        raise ValueError(f"model.trainable {config.trainable!r} and model.frozen {config.frozen!r} leave no leaf to "
                         f"train; leaves: {', '.join(sorted(jax.tree.leaves(leaf_names(params))))}")
    return mask


def decay_mask(params: Params) -> Params:
    """True for matrices; norms and biases ([L, width] or [width]) are not decayed."""
    return jax.tree.map(lambda name: not re.search(r"(norm|bias)", name), leaf_names(params))


def make_optimizer(config: OptimizerConfig, params: Params) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) on the trainable leaves; the others get no update and no moments."""
    adamw = optax.adamw(
        lambda count: learning_rate(config, count),
        b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decay_mask,
    )
    labels = jax.tree.map(lambda moves: "train" if moves else "freeze", trainable_mask(config, params))
    return optax.multi_transform({"train": adamw, "freeze": optax.set_to_zero()}, labels)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, shardings: Params, other: Any) -> Any:
    """Shardings of `optimizer.init(params)`: moments as their parameters, the rest (counts) as `other`."""

    def frozen(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    return optax.tree_map_params(
        optimizer, lambda leaf, sharding: leaf if frozen(leaf) else sharding, jax.eval_shape(optimizer.init, params),
        shardings, transform_non_params=lambda leaf: leaf if frozen(leaf) else other, is_leaf=frozen,
    )
