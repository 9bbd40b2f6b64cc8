"""critic.py: values stand before their tokens, the head starts at 0, and the loss is that of the formula."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
import test_trainer as base

from rljax import critic, losses, sharding
from rljax.models import decoder
from rljax.policy import LossConfig
from rljax.trainer import Updater

LOSS = LossConfig()


@functools.cache
def made(sizes=(1, 1, 1), cfg=base.BASE):
    devices = jax.devices()[: int(np.prod(sizes))]
    return critic.Critic(cfg, sharding.make_mesh(*sizes, devices=devices), LOSS, 0.2, base.OPTIM)


def started(one):
    policy = base.trainer(one.cfg, sizes=tuple(one.mesh.shape.values()))
    return one.start(sharding.to_devices(base.weights(one.cfg), policy.shardings))


def with_targets(items):
    rng = np.random.default_rng(1)
    for item in items:
        size = len(item.loss_mask)
        item.extras.update(old_values=rng.normal(0, 0.1, size), returns=rng.normal(0.5, 1, size))
    return items


def batches(shards=1, step=0):
    items = [dataclasses.replace(item, extras={}) for item in base.samples(step=step)]
    return base.packed(with_targets(items), shards)


def test_the_head_gives_zero_at_first_and_an_untied_vocabulary_head_is_left_out():
    one = made()
    values = one.values(started(one).params, batches()[0])
    assert values.shape == batches()[0].tokens.shape and not np.asarray(values).any()
    assert set(critic.specs(base.ODD)) == {"embed", "layers", "final_norm", "value_head"}
    assert "lm_head" in decoder.specs(base.ODD)


def test_a_value_is_made_from_the_token_before():
    one, (batch,) = made(), batches()
    params = {**base.weights(base.BASE), "value_head": np.linspace(-1, 1, base.BASE.hidden_size, dtype=np.float32)}
    found = np.asarray(one.values(params, batch))
    hidden = decoder.forward(base.BASE, params, batch.tokens, batch.positions, batch.segment_ids)
    expected = np.asarray(hidden)[:, :-1] @ params["value_head"]
    mask = batch.loss_mask > 0
    np.testing.assert_allclose(found[mask], np.pad(expected, ((0, 0), (1, 0)))[mask], atol=1e-5)
    assert not found[~mask].any()


def test_loss_and_the_same_training_on_eight_devices():
    results = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        one = made(sizes)
        state, seen = started(one), []
        for step in range(3):
            state, sums = one.step(state, batches(max(1, sizes[0] * sizes[1]), step))
            seen.append(critic.finish_metrics(sharding.to_host(sums)))
        results.append((seen, sharding.to_host(state.params)))
    (batch,) = batches()
    old, returns = batch.extras["old_values"], batch.extras["returns"]
    error, _ = losses.value_loss(np.zeros_like(returns), old, returns, 0.2)
    first = results[0][0][0]
    assert first["train/value_loss"] == pytest.approx(float((batch.loss_weight * error).sum()), rel=1e-5)
    assert 0 < first["train/value_clipfrac"] < 1 and first["train/critic_lr"] == pytest.approx(base.OPTIM.lr)
    for ours, theirs in zip(*(seen for seen, _ in results), strict=True):
        for name in ("train/value_loss", "train/critic_grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    start = base.weights(base.BASE)
    for name, leaf in results[0][1]["layers"].items():
        moved = np.linalg.norm(leaf - start["layers"][name])
        assert np.linalg.norm(leaf - results[1][1]["layers"][name]) <= 1e-3 * moved, name


def test_repeated_updates_fit_the_returns():
    one = made()
    state, seen = started(one), []
    for _ in range(12):
        state, sums = one.step(state, batches())
        seen.append(critic.finish_metrics(sharding.to_host(sums))["train/value_loss"])
    assert seen[-1] < 0.8 * seen[0]
    assert isinstance(one, Updater) and int(state.step) == 12
