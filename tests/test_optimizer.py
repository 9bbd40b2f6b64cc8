"""optimizer.py: the learning rate at every update, AdamW by hand, which leaves move and which are decayed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_data import cases

from rljax import optimizer, sharding
from rljax.optimizer import OptimizerConfig

PARAMS = {
    "embed": np.full((4, 2), 0.5, np.float32),
    "final_norm": np.full(2, 0.5, np.float32),
    "layers": {name: np.full((1, 2, 2) if name.endswith("proj") else (1, 2), 0.5, np.float32)
               for name in ("q_proj", "q_bias", "q_norm", "attn_post_norm", "down_proj")},
}


def rates(config, updates):
    return [float(optimizer.learning_rate(config, jnp.int32(count))) for count in range(updates)]


@pytest.mark.parametrize("row", [r for r in cases("numerics") if r["input"].get("quantity") == "warmup_rates"],
                         ids=lambda row: row["id"])
def test_case_warmup(row):
    args = row["input"]["args"]
    config = OptimizerConfig(args["lr"], warmup_steps=args["warmup_steps"])
    np.testing.assert_allclose(rates(config, args["updates"]), row["expected"]["value"], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [2.0] * 6),
        ("linear", 0, [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        ("linear", 2, [1.0, 2.0, 2.0, 1.0, 0.0, 0.0]),
        ("cosine", 0, [2.0, 1 + np.sqrt(0.5), 1.0, 1 - np.sqrt(0.5), 0.0, 0.0]),
        ("cosine", 4, [0.5, 1.0, 1.5, 2.0, 2.0, 0.0]),
    ],
)
def test_schedules(schedule, warmup, expected):
    config = OptimizerConfig(2.0, schedule=schedule, warmup_steps=warmup, total_updates=4)
    np.testing.assert_allclose(rates(config, 6), expected, atol=1e-6)


def test_the_rate_is_float32_and_compiles():
    config = OptimizerConfig(1e-6, schedule="cosine", warmup_steps=3, total_updates=9)
    rate = jax.jit(lambda count: optimizer.learning_rate(config, count))(jnp.int32(0))
    assert rate.dtype == jnp.float32
    assert float(rate) == pytest.approx(1e-6 / 3)


def adamw(config, values, gradients):
    """Three updates of one number by the paper's formula, in float64."""
    m = v = 0.0
    for count, gradient in enumerate(gradients, start=1):
        m = config.b1 * m + (1 - config.b1) * gradient
        v = config.b2 * v + (1 - config.b2) * gradient**2
        step = m / (1 - config.b1**count) / (np.sqrt(v / (1 - config.b2**count)) + config.eps)
        values -= config.lr * (step + config.weight_decay * values)
    return values


def apply(config, gradients):
    """Parameters after one update for each gradient, which all leaves share."""
    tx = optimizer.make_optimizer(config, PARAMS)
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(jax.tree.map(lambda p: jnp.full(p.shape, gradient), params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


def test_adamw_by_hand_with_decay_on_matrices_only():
    config = OptimizerConfig(0.01, weight_decay=0.5, b1=0.8, b2=0.9, eps=0.1)
    params, _ = apply(config, [0.3, -0.1, 0.7])
    decayed = adamw(config, 0.5, [0.3, -0.1, 0.7])
    plain = adamw(dataclasses.replace(config, weight_decay=0.0), 0.5, [0.3, -0.1, 0.7])
    assert abs(decayed - plain) > 1e-3
    for name, leaf in {**params.pop("layers"), **params}.items():
        expected = decayed if name in ("embed", "q_proj", "down_proj") else plain
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, err_msg=name)


def test_frozen_leaves_have_no_update_and_no_moments():
    config = OptimizerConfig(0.01, trainable="layers/", frozen="_norm$")
    params, state = apply(config, [0.3, 0.1])
    moved = {name for name in PARAMS["layers"] if (params["layers"][name] != 0.5).any()}
    assert moved == {"q_proj", "q_bias", "down_proj"}
    assert (params["embed"] == 0.5).all() and (params["final_norm"] == 0.5).all()
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sum(sizes) == 2 * sum(PARAMS["layers"][name].size for name in moved)


def test_masks():
    mask = optimizer.trainable_mask(OptimizerConfig(1.0, trainable="^(embed|layers/q_)", frozen="bias"), PARAMS)
    assert mask["embed"] and mask["layers"]["q_proj"] and mask["layers"]["q_norm"]
    assert not (mask["final_norm"] or mask["layers"]["q_bias"] or mask["layers"]["down_proj"])
    assert optimizer.leaf_names(PARAMS)["layers"]["q_proj"] == "layers/q_proj"


@pytest.mark.parametrize(("trainable", "frozen"), [("nothing", ""), (".*", "."), ("embed", "embed")])
def test_nothing_to_train_is_an_error_that_names_what_there_is(trainable, frozen):
    config = OptimizerConfig(1.0, trainable=trainable, frozen=frozen)
    with pytest.raises(ValueError, match=r"model\.trainable.*model\.frozen.*layers/q_proj"):
        optimizer.trainable_mask(config, PARAMS)


def test_moments_lie_where_their_parameters_do():
    mesh = sharding.make_mesh(2, 2, 2)
    split = sharding.named(("vocab", "embed"), sharding.TRAIN_RULES, mesh)
    whole = sharding.replicated(mesh)
    places = jax.tree.map(lambda p: split if p.shape == (4, 2) else whole, PARAMS)
    config = OptimizerConfig(1.0, frozen="final_norm")
    tx = optimizer.make_optimizer(config, PARAMS)
    shardings = optimizer.state_shardings(tx, PARAMS, places, whole)
    state = jax.jit(tx.init, out_shardings=shardings)(PARAMS)
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4, 2)]
    assert len(matrices) == 2 and all(leaf.sharding.is_equivalent_to(split, 2) for leaf in matrices)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state) if leaf.ndim)
