"""The weights that a run starts with: new ones, those of files, or those of its own or another run's checkpoint."""

from __future__ import annotations

import functools
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rljax import assemble, checkpoint, models
from rljax.algo_rules import needs_reference
from rljax.trainer import Trainer
from rljax.types import Params, TrainState

log = logging.getLogger(__name__)


def initial_params(config: ConfigDict, trainer: Trainer) -> Params:
    """Float32 weights in the trainer's layout: of model.path, or new ones where model.init is random."""
    if config.model.init == "random":
        fresh = jax.jit(functools.partial(models.init, trainer.cfg), out_shardings=trainer.shardings)
        return fresh(jax.random.key(config.train.seed))
    return models.load(config.model.path, shardings=trainer.shardings)[1]


def critic_state(config: ConfigDict, parts: assemble.Parts) -> TrainState | None:
    """The critic as a run starts it: the weights of model.critic_path, or the policy's, below a head that gives 0."""
    if parts.critic is None:
        return None
    path = config.model.critic_path
    if not path:
        return parts.critic.start(initial_params(config, parts.trainer))
    return parts.critic.start(models.load(path, shardings=parts.trainer.shardings)[1])


def teacher_params(config: ConfigDict, parts: assemble.Parts) -> Params | None:
    """The weights of model.teacher_path in the compute dtype, where there is a teacher."""
    if parts.teacher is None:
        return None
    params = models.load(config.model.teacher_path, shardings=parts.teacher.shardings)[1]
    dtype = assemble.compute_dtype(config.model.compute_dtype)
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree), donate_argnums=0)(params)


def keeps_reference(config: ConfigDict) -> bool:
    """Whether a checkpoint holds the reference: where it moves, or is the start of a run out of another's."""
    adopts = config.checkpoint.load not in ("auto", "none") and not config.model.ref_path
    return needs_reference(config) and (config.algo.ref_update_interval > 0 or adopts)


def checkpoint_trees(config: ConfigDict, parts: assemble.Parts) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shapes, shardings) of what a checkpoint holds of the devices: policy, critic, and perhaps the reference."""
    shapes: dict[str, Any] = {"policy": parts.trainer.state_shapes}
    shardings: dict[str, Any] = {"policy": parts.trainer.state_shardings}
    if parts.critic is not None:
        shapes["critic"], shardings["critic"] = parts.critic.state_shapes, parts.critic.state_shardings
    if keeps_reference(config):
        shapes["reference"], shardings["reference"] = parts.trainer.shapes, parts.trainer.shardings
    return shapes, shardings


def restored(config: ConfigDict, parts: assemble.Parts, folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trees, host) of the run's own checkpoint; a reference that it does not hold is loaded."""
    trees, host = checkpoint.restore(folder, *checkpoint_trees(config, parts))
    if "reference" not in trees:
        trees["reference"] = reference_params(config, parts)
    return trees, host


def adopted(config: ConfigDict, parts: assemble.Parts, folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trees, host) for a new run out of another's checkpoint: its policy with the optimizer, or the weights alone
    where that is of another kind; its critic, or a fresh one; and its weights as the reference, unless one is named."""
    shapes, shardings = checkpoint_trees(config, parts)
    trees: dict[str, Any] = {}
    host = checkpoint.read_host(folder)
    host.pop("machine", None)
    for name in ("policy", "critic"):
        if name in shapes:
            try:
                one, _ = checkpoint.restore(folder, {name: shapes[name]}, {name: shardings[name]}, part=True)
                trees |= one
            except checkpoint.Misfit as error:
                log.info("%s of %s is not taken over: %s", name, folder, error)
    if "policy" not in trees:
        trees["policy"] = parts.trainer.init(restored_params(parts, folder))
    if "critic" in shapes and "critic" not in trees:
        trees["critic"] = critic_state(config, parts)
    if keeps_reference(config):
        trees["reference"] = jax.tree.map(jnp.copy, trees["policy"].params)
    else:
        trees["reference"] = reference_params(config, parts)
    return trees, host


def restored_params(parts: assemble.Parts, folder: pathlib.Path) -> Params:
    """The policy's weights alone, out of any run's checkpoint."""
    shapes, shardings = parts.trainer.shapes, parts.trainer.shardings
    tree, _ = checkpoint.restore(folder, {"policy": {"params": shapes}}, {"policy": {"params": shardings}}, part=True)
    return tree["policy"]["params"]


def reference_params(config: ConfigDict, parts: assemble.Parts) -> Params | None:
    """Frozen weights of the KL: those of model.ref_path, or those that the run started with; None without a KL."""
    if not parts.needs_reference:
        return None
    if not config.model.ref_path:
        return initial_params(config, parts.trainer)
    return models.load(config.model.ref_path, shardings=parts.trainer.shardings)[1]
