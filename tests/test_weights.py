"""A new run out of another's checkpoint: what it takes over, and what its reference is."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from run_helpers import saved_state
from test_presets import run

GRPO = ("train.global_batch_size=16", "reward.type=exact_match", "algo.kl_loss_coef=0", "rollout.num_rollouts=2")
PLAIN = ("grpo_qwen.py", *GRPO, "optim.lr=1e-3")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    run(folder, *PLAIN)
    return folder


def test_the_reference_is_where_the_new_run_starts_also_after_a_resume(first, tmp_path):
    name, *knobs = PLAIN
    knobs = [knob for knob in knobs if not knob.startswith(("optim.lr", "rollout.num"))]
    knobs += [f"checkpoint.load={first}", "algo.kl_metric=true", "optim.lr=0", "train.seed=5"]
    train, rollout = run(tmp_path, name, *knobs, "rollout.num_rollouts=3")
    assert len(rollout) == 1 and abs(train[0]["train/kl_loss"]) < 1e-6
    train, rollout = run(tmp_path, name, *knobs, "rollout.num_rollouts=4")  # goes on from its own checkpoint
    assert len(rollout) == 2 and abs(train[-1]["train/kl_loss"]) < 1e-6


def test_weights_alone_where_the_optimizer_is_of_another_kind(first, tmp_path, caplog):
    train, _ = run(tmp_path, "ppo_qwen.py", *GRPO[:3], f"checkpoint.load={first}", "model.trainable=layers/",
                   "rollout.num_rollouts=3", "algo.num_critic_only_steps=0")
    assert len(train) == 1 and train[0]["train/critic_grad_norm"] > 0
    before, after = saved_state(first), saved_state(tmp_path)
    name = "['policy']['params']['embed']"
    np.testing.assert_array_equal(before[name], after[name])  # frozen here, but no longer the built-in model's
    assert jax.tree.leaves(after["['critic']['params']['value_head']"])[0].any()  # the critic's head always trains
