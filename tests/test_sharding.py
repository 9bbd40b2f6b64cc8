"""sharding.py: meshes, the rules, where a leaf comes to lie, and constraints inside programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from rljax import sharding
from rljax.models import decoder
from rljax.sharding import ROLLOUT_RULES, TRAIN_RULES


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, -1, 1), (1, 8, 1)), ((2, 2, 2), (2, 2, 2)), ((-1, 2, 1), (4, 2, 1)), ((2, 1, -1), (2, 1, 4)),
     ((8, -1, 1), (8, 1, 1))],
)
def test_mesh_sizes(sizes, expected):
    mesh = sharding.make_mesh(*sizes)
    assert mesh.axis_names == sharding.MESH_AXES and mesh.devices.shape == expected
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("sizes", [(3, -1, 1), (2, 2, 1), (16, 1, 1), (-1, -1, 1), (0, -1, 1), (-2, 2, 2)])
def test_a_mesh_that_does_not_fit_names_both_numbers(sizes):
    with pytest.raises(ValueError, match=r"multiplies to -?\d+, but there are 8 devices"):
        sharding.make_mesh(*sizes)


def test_rules():
    mesh = sharding.make_mesh(2, 2, 2)
    spec = sharding.partition_spec
    assert spec(("vocab", "embed"), TRAIN_RULES, mesh) == PartitionSpec("tensor", "fsdp")
    assert spec(("vocab", "embed"), ROLLOUT_RULES, mesh) == PartitionSpec("tensor", None)
    assert spec(("batch", None), TRAIN_RULES, mesh) == PartitionSpec(("data", "fsdp"), None)
    assert spec(("vocab", "embed"), TRAIN_RULES, mesh, (97, 64)) == PartitionSpec(None, "fsdp")
    assert spec(("batch", "mlp"), TRAIN_RULES, mesh, (6, 4)) == PartitionSpec(None, "tensor")
    with pytest.raises(ValueError, match="unknown logical axis 'embedding'; known: .*embed.*vocab"):
        spec(("embedding",), TRAIN_RULES, mesh)


def test_every_rule_names_axes_of_the_mesh_and_both_layouts_know_the_same():
    assert TRAIN_RULES.keys() == ROLLOUT_RULES.keys()
    for rules in (TRAIN_RULES, ROLLOUT_RULES):
        for entry in rules.values():
            assert set((entry,) if isinstance(entry, str) else entry or ()) <= set(sharding.MESH_AXES)


def test_to_devices_splits_and_to_host_brings_back():
    mesh = sharding.make_mesh(2, 2, 2)
    specs = {"w": decoder.Spec((8, 12), ("embed", "mlp"), "normal"), "b": decoder.Spec((5,), ("mlp",), "zeros")}
    shardings = sharding.tree_shardings(specs, TRAIN_RULES, mesh)
    host = {"w": np.arange(96, dtype=np.float32).reshape(8, 12), "b": np.arange(5, dtype=np.float32)}
    tree = sharding.to_devices(host, shardings)
    assert tree["w"].addressable_shards[0].data.shape == (4, 6)
    assert tree["b"].addressable_shards[0].data.shape == (5,)
    jax.tree.map(np.testing.assert_array_equal, sharding.to_host(tree), host)


def layout(function, *args):
    """Sharding of the only result of a program whose layout the compiler chooses."""
    return jax.jit(function)(*args).sharding


def test_constrain_pins_a_layout_where_a_mesh_is_set():
    x = np.ones((8, 4), np.float32)
    assert sharding.constrain(x, ("batch", "mlp")) is x
    with jax.set_mesh(sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])):
        assert sharding.constrain(x, ("batch", "mlp")) is x
    mesh = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        found = layout(lambda x: sharding.constrain(x * 2, ("batch", "mlp")), x)
        odd = layout(lambda x: sharding.constrain(x * 2, ("batch", "mlp")), np.ones((8, 3), np.float32))
        with pytest.raises(ValueError, match="unknown logical axis 'rows'"):
            layout(lambda x: sharding.constrain(x, ("rows", None)), x)
    assert found.spec == PartitionSpec(("data", "fsdp"), "tensor")
    assert odd.is_equivalent_to(sharding.named(("batch", None), TRAIN_RULES, mesh), 2)


@pytest.mark.parametrize(
    ("sizes", "heads", "forward", "backward"),
    [
        ((2, 2, 2), 2, (None, "tensor"), ("fsdp", "tensor")),
        ((2, 2, 2), 3, (None, None), ("fsdp", "tensor")),  # 12 columns are divided by 2, 3 heads are not
        ((1, 8, 1), 3, (None, None), ("fsdp", None)),
    ],
)
def test_gather_weight_undoes_the_split_of_the_width_and_splits_the_gradient(sizes, heads, forward, backward):
    mesh = sharding.make_mesh(*sizes)
    axes, units = ("embed", "heads"), {"heads": heads}
    host = np.arange(96, dtype=np.float32).reshape(8, 12)
    weight = sharding.to_devices(host, sharding.named(axes, TRAIN_RULES, mesh, host.shape))

    def used(w):
        return sharding.gather_weight(w, axes, units)

    with jax.set_mesh(mesh):
        whole = jax.jit(used)(weight)
        gradient = jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(used(w)))))(weight)
    for array, spec in ((whole, forward), (gradient, backward)):
        assert array.sharding.is_equivalent_to(jax.NamedSharding(mesh, PartitionSpec(*spec)), 2)
    np.testing.assert_array_equal(whole, host)
    np.testing.assert_array_equal(gradient, 2 * host)


@pytest.mark.parametrize("sizes", [None, (8, 1, 1), (4, 1, 2)])
def test_gather_weight_leaves_alone_what_is_not_split_by_width(sizes):
    x = np.ones((8, 12), np.float32)
    if sizes is None:
        assert sharding.gather_weight(x, ("embed", "heads"), {"heads": 2}) is x
        return
    with jax.set_mesh(sharding.make_mesh(*sizes)):
        assert sharding.gather_weight(x, ("embed", "heads"), {"heads": 2}) is x
