"""Mesh, logical-axis rules and the way of trees between host and devices.

Every array dimension has a logical name; one table per layout says which mesh axes split it. Training splits
the width of the weights over `fsdp`; the rollout copy does not, since decoding would gather them at every step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")
Axes = tuple[str | None, ...]
Rules = Mapping[str, str | tuple[str, ...] | None]

TRAIN_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "group": "data",  # rows, where fsdp splits their width
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": None,
}
ROLLOUT_RULES: Rules = {**TRAIN_RULES, "embed": None}


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes data, fsdp, tensor; one of them may be -1 (what is left of the devices).

    Raises ValueError naming both numbers where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and fixed > 0 and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        product = math.prod(sizes.values())
        raise ValueError(f"mesh {sizes} multiplies to {product}, but there are {len(devices)} devices")
    # Explicit axis types, the default of recent JAX, would demand shardings in every operation.
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, devices=devices, axis_types=(AxisType.Auto,) * 3)


def partition_spec(axes: Axes, rules: Rules, mesh: Mesh, shape: Sequence[int] | None = None) -> PartitionSpec:
    """The PartitionSpec of logical `axes`; an unknown name raises ValueError.

    With `shape`, a dimension that its mesh axes do not divide stays whole (an odd vocabulary, say).
    """
    entries: list[Any] = []
    for index, name in enumerate(axes):
        if name is not None and name not in rules:
            raise ValueError(f"unknown logical axis {name!r}; known: {', '.join(sorted(rules))}")
        entry = None if name is None else rules[name]
        names = (entry,) if isinstance(entry, str) else entry or ()
        if shape is not None and shape[index] % math.prod(mesh.shape[n] for n in names):
            entry = None
        entries.append(entry)
    return PartitionSpec(*entries)


def named(axes: Axes, rules: Rules, mesh: Mesh, shape: Sequence[int] | None = None) -> NamedSharding:
    """`partition_spec` bound to the mesh."""
    return NamedSharding(mesh, partition_spec(axes, rules, mesh, shape))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def tree_shardings(specs: Any, rules: Rules, mesh: Mesh) -> Any:
    """Shardings for a tree of leaves that carry `.shape` and `.axes` (the model's `specs`)."""
    return jax.tree.map(
        lambda leaf: named(leaf.axes, rules, mesh, leaf.shape), specs, is_leaf=lambda leaf: hasattr(leaf, "axes")
    )


def constrain(x: jax.Array, axes: Axes, rules: Rules = TRAIN_RULES) -> jax.Array:
    """Pin the layout of an intermediate inside `jit` to the mesh in context (`jax.set_mesh`); without one, x."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, rules, mesh, x.shape))


def gather_weight(x: jax.Array, axes: Axes, units: Mapping[str, int]) -> jax.Array:
    """A weight of training's layout, as a layer uses it: the split of its width over fsdp undone. Its gradient is
    split again; with `constrain` alone it would be made whole on every device first.

    units: the number of heads along an axis. Where its mesh axes do not divide it, each device gets all heads, for
    the sum inside a score must not cross devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    shape = [units.get(name, size) for name, size in zip(axes, x.shape, strict=True)]
    used = partition_spec(axes, ROLLOUT_RULES, mesh, shape)
    stored = partition_spec(axes, TRAIN_RULES, mesh, x.shape)
    if _split(stored, mesh) == _split(used, mesh):
        return x  # unchanged: a scan would store a copy of anything else for the backward pass
    return _reshard(x, used, (partition_spec(axes, TRAIN_RULES, mesh, shape), stored))


def _split(spec: PartitionSpec, mesh: Any) -> list[Any]:
    """The entries of a spec that really split something."""
    return [entry if entry is not None and mesh.shape[entry] > 1 else None for entry in spec]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reshard(x: jax.Array, forward: PartitionSpec, backward: tuple[PartitionSpec, ...]) -> jax.Array:
    """x in the layout `forward`; its gradient in those of `backward`, one after the other."""
    return jax.lax.with_sharding_constraint(x, forward)


def _reshard_gradient(forward: PartitionSpec, backward: tuple[PartitionSpec, ...], _: None, gradient: jax.Array):
    for spec in backward:
        gradient = jax.lax.with_sharding_constraint(gradient, spec)
    return (gradient,)


_reshard.defvjp(lambda x, forward, backward: (_reshard(x, forward, backward), None), _reshard_gradient)


def to_devices(tree: Any, shardings: Any) -> Any:
    """Host values that every process holds alike, onto the devices of `shardings` (a tree, or one for all)."""
    return jax.device_put(tree, shardings)


def to_host(tree: Any) -> Any:
    """Device values as numpy arrays, whole on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)
