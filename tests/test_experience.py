"""From scored samples to updates: scores reach their own tokens, terms add up, what is left out counts nowhere."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rljax import algo_rules, algorithms, assemble, experience
from rljax import config as configs
from rljax.experience import Experience, Weights
from rljax.sample import COMPLETED, TRUNCATED, Sample

SHAPES = {"buckets": (16,), "max_tokens_per_device": 32, "data_shards": 1}
LENGTHS = (3, 5, 1, 4, 2, 6)


class Fake:
    """A model whose log-prob of token t is -t / scale, and whose value is t."""

    data_shards = 1

    def score(self, params, batch):
        return np.where(batch.loss_mask > 0, -batch.tokens / params, 0).astype(np.float32), batch.tokens * 0.5

    def values(self, params, batch):
        return np.where(batch.loss_mask > 0, batch.tokens * params, 0).astype(np.float32)


def samples(rewards=(1, 0, 0, 1, 1, 0)):
    rng, found = np.random.default_rng(0), []
    for uid, (length, reward) in enumerate(zip(LENGTHS, rewards)):
        tokens = rng.integers(1, 50, length).tolist()
        found.append(Sample(uid=uid, group=uid // 2, reward=reward, prompt_tokens=[7] * (1 + uid % 3), status=COMPLETED,
                            response_tokens=tokens, logprobs=[-0.5] * length, loss_mask=[1] * length,
                            versions=[0] * length))
    return found


def shapes_of(budget):
    return {**SHAPES, "max_tokens_per_device": budget}


def make(rows, weights=Weights(10.0), estimator="grpo", on_policy=False, critic=None, teacher=None, token_weights=None,
         shapes=None, **knobs):
    config = configs.get_config()
    for name, value in knobs.items():
        section, key = name.split("__")
        config[section][key] = value
    made = Experience(config, Fake(), algorithms.find(estimator), critic=critic, teacher=teacher, on_policy=on_policy,
                      token_weights=token_weights, shapes=shapes or SHAPES)
    return made.make(rows, weights)


def per_sample(rows, updates, field):
    """Each sample's response part of a field of the packed batches."""
    found = {}
    size = len(rows) // len(updates)
    for number, update in enumerate(updates):
        for batch in update.batches:
            values = batch.extras[field] if field in batch.extras else getattr(batch, field)
            for index in set(batch.sample_index[batch.sample_index >= 0].tolist()):
                row = rows[number * size + index]
                found[row.uid] = np.asarray(values)[batch.sample_index == index][len(row.prompt_tokens):]
    return [found[row.uid] for row in rows]


def test_scores_reach_their_tokens():
    rows = samples()
    updates, values = make(rows, Weights(10.0, reference=20.0), train__global_batch_size=2, algo__kl_loss_coef=0.1)
    assert len(updates) == 3
    found = [per_sample(rows, updates, f"{name}_logprobs") for name in ("old", "ref")]
    for row, old, ref in zip(rows, *found):
        np.testing.assert_allclose(old, -np.asarray(row.response_tokens) / 10, rtol=1e-6)
        np.testing.assert_allclose(ref, -np.asarray(row.response_tokens) / 20, rtol=1e-6)
    tokens = np.concatenate([row.response_tokens for row in rows])
    assert values["rollout/log_probs"] == pytest.approx(-tokens.mean() / 10, rel=1e-5)
    assert values["rollout/ref_log_probs"] == pytest.approx(-tokens.mean() / 20, rel=1e-5)
    assert values["rollout/entropy"] == pytest.approx(tokens.mean() / 2, rel=1e-5)
    assert values["rollout/kl"] > 0 and values["trained_tokens"] == len(tokens)


def test_no_pass_where_nothing_needs_it():
    class Never(Fake):
        def score(self, params, batch):
            raise AssertionError("a pass too many")

    config = configs.get_config()
    made = Experience(config, Never(), algorithms.find("grpo"), on_policy=True, shapes=SHAPES)
    updates, values = made.make(samples(), Weights(1.0))
    assert len(updates) == 1 and "rollout/log_probs" not in values
    config.algo.old_logprobs = "rollout"
    rows = samples()
    made = Experience(config, Never(), algorithms.find("grpo"), on_policy=False, shapes=SHAPES)
    updates, _ = made.make(rows, Weights(1.0))
    assert per_sample(rows, updates, "old_logprobs")[1].tolist() == [-0.5] * 5


def test_critic_values_returns_and_explained_variance():
    rows = samples()
    updates, values = make(rows, Weights(10.0, critic=0.01), "ppo", critic=Fake())
    old, returns = per_sample(rows, updates, "old_values"), per_sample(rows, updates, "returns")
    for row, value, target in zip(rows, old, returns):
        np.testing.assert_allclose(value, np.asarray(row.response_tokens) * 0.01, rtol=1e-5)
        np.testing.assert_allclose(target, row.reward, atol=1e-6)  # gamma = lambda = 1
    error = np.concatenate(returns) - np.concatenate(old)
    expected = 1 - error.var() / np.concatenate(returns).var()
    assert updates[0].explained_variance == pytest.approx(expected, rel=1e-5)
    assert values["rollout/returns"] == pytest.approx(np.concatenate(returns).mean(), rel=1e-5)
    assert values["rollout/values"] == pytest.approx(np.concatenate(old).mean(), rel=1e-5)


def test_a_critic_beside_another_estimator_learns_what_was_earned():
    rows = samples()
    updates, _ = make(rows, Weights(10.0, critic=0.01), "grpo", critic=Fake(), algo__critic=True, algo__gamma=0.5)
    for row, target in zip(rows, per_sample(rows, updates, "returns")):
        size = len(row.response_tokens)
        np.testing.assert_allclose(target, row.reward * 0.5 ** np.arange(size)[::-1], rtol=1e-6)


def test_explained_variance_by_hand():
    values, returns = [np.array([0.0, 1]), np.array([2.0, 9])], [np.array([0.0, 1]), np.array([2.0, 0])]
    assert experience.explained_variance(values, returns, [[1, 1], [1, 0]]) == 1
    assert experience.explained_variance([np.zeros(2)], [np.array([0.0, 2.0])], [[1, 1]]) == 0
    assert experience.explained_variance([np.zeros(2)], [np.ones(2)], [[1, 1]]) is None


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce", "reinforce_plus_plus",
                                       "reinforce_plus_plus_baseline", "ppo", "opd"])
def test_advantages_do_not_depend_on_packing(estimator):
    found = []
    for budget in (1, 32, 256):
        rows = samples()
        rows[1].loss_mask = [1, 0, 0, 1, 1]
        weights = Weights(10.0, reference=20.0, teacher=15.0, critic=0.01 if estimator == "ppo" else None)
        updates, _ = make(rows, weights, estimator, critic=Fake() if estimator == "ppo" else None, teacher=Fake(),
                          shapes=shapes_of(budget), train__global_batch_size=3, algo__kl_coef=0.1, algo__gamma=0.9,
                          algo__opd_kl_coef=0.5 if estimator == "opd" else 0.0)
        found.append(per_sample(rows, updates, "advantages"))
    for one in found[1:]:
        assert [values.tolist() for values in one] == [values.tolist() for values in found[0]]


@pytest.mark.parametrize("estimator", ["opd", "grpo"])
def test_distillation_is_added_to_any_estimator(estimator):
    rows = samples()
    rows[1].loss_mask = [1, 0, 1, 1, 1]
    updates, values = make(rows, Weights(10.0, teacher=20.0), estimator, on_policy=True, teacher=Fake(),
                           algo__opd_kl_coef=2.0)
    base = algorithms.estimate(algorithms.find(estimator), rows, configs.get_config().algo, [algorithms.Scores()] * 6)
    for row, one, found in zip(rows, base, per_sample(rows, updates, "advantages")):
        tokens = np.asarray(row.response_tokens) * np.asarray(row.loss_mask)
        np.testing.assert_allclose(found, one - 2.0 * (-tokens / 10 + tokens / 20), rtol=1e-5, atol=1e-6)
    assert "rollout/teacher_log_probs" in values


def test_whitened_advantages():
    rows = samples()
    found = np.concatenate(per_sample(rows, make(rows, algo__normalize_advantages=True)[0], "advantages"))
    assert abs(found.mean()) < 1e-6 and found.std(ddof=1) == pytest.approx(1, rel=1e-5)


def test_truncated_samples_count_in_their_group_and_nowhere_else():
    rows = samples()
    rows[0].status = TRUNCATED  # reward 1, its neighbour has 0
    updates, values = make(rows, algo__mask_truncated=True)
    weights, advantages = per_sample(rows, updates, "loss_weight"), per_sample(rows, updates, "advantages")
    assert not weights[0].any() and not advantages[0].any()
    assert sum(weight.sum() for weight in weights) == pytest.approx(1)  # the mean over five samples
    assert advantages[1][0] == pytest.approx(-0.7071, rel=1e-3)
    assert values["trained_tokens"] == sum(LENGTHS) - LENGTHS[0]


def test_overlong_penalty():
    assert [experience.overlong_penalty(n, 100, 20, 0.5) for n in (0, 80, 90, 100, 120)] == [0, 0, -0.25, -0.5, -0.5]
    rows = samples()
    make(rows, rollout__max_response_len=6, reward__overlong_buffer_len=2)
    assert [row.reward for row in rows] == [1, -0.5, 0, 1, 1, -1]
    assert rows[5].rewards == {"overlong": -1.0}


def test_repetition_penalty():
    rows = samples()
    rows[5].response_tokens, rows[5].logprobs = [3, 4] * 6, [-1.0] * 12
    rows[5].loss_mask, rows[5].versions = [1] * 12, [0] * 12
    make(rows, reward__repetition_penalty=0.25, algo__loss_length=0)
    assert [row.reward for row in rows] == [1, 0, 0, 1, 1, -0.25] and rows[0].rewards == {"repetition": 0.0}


def test_format_penalty():
    rows = samples()
    rows[0].text = "<think>so</think><answer>1</answer>"
    make(rows, reward__format_penalty=0.5)
    assert [row.reward for row in rows] == [1, -0.5, -0.5, 0.5, 0.5, -0.5] and rows[1].rewards == {"form": -0.5}


def test_an_update_with_nothing_to_train_is_left_out(caplog):
    rows = samples()
    for row in rows[2:4]:
        row.loss_mask = [0] * len(row.loss_mask)
    updates, _ = make(rows, train__global_batch_size=2)
    assert len(updates) == 2 and "1 of 3 updates have no token to train" in caplog.text
    rows = samples()
    rows[0].status = rows[1].status = TRUNCATED  # they count in the baseline though their update is left out
    for row in rows:
        row.group = 0
    updates, _ = make(rows, train__global_batch_size=2, algo__mask_truncated=True, algo__normalize_std=False)
    assert len(updates) == 2 and updates[0].batches[0].advantages.min() == -0.5
    for row in rows:
        row.loss_mask = [0] * len(row.loss_mask)
    assert make(rows)[0] == [] and make([])[0] == []


def test_hooks_reach_the_batch():
    rows = samples()
    for row in rows:
        row.train_metadata = {"heat": list(range(len(row.response_tokens))), "turns": 3, "note": "abc"}
    updates, values = make(rows)
    assert values["rollout/extra/heat"] == pytest.approx(np.concatenate([np.arange(n) for n in LENGTHS]).mean())
    assert [found.tolist() for found in per_sample(rows, updates, "heat")] == [list(range(n)) for n in LENGTHS]
    assert set(updates[0].batches[0].extras) == {"heat"}
    del rows[2].train_metadata["heat"]
    rows[4].train_metadata["heat"] = [1]
    with pytest.raises(ValueError, match="'heat'.*on 2 of 6 samples: 2, 4"):
        make(rows)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    text = ("def half(samples, algo):\n    return [[0.5] * len(s.response_tokens) for s in samples]\n"
            "def short(samples, algo):\n    return [[0.5] for s in samples]\n"
            "def note(samples, config):\n    samples[0].train_metadata['seen'] = config.rollout.batch_size\n")
    (tmp_path / "own_hooks.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_hooks", None)


def test_token_weights_and_post_processing_of_ones_own(plugin):
    config = configs.get_config()
    config.algo.loss_aggregation, config.reward.post_process = "own_hooks:half", "own_hooks:note"
    rows = samples()
    rows[0].loss_mask = [0, 1, 1]
    updates, _ = make(rows, token_weights=assemble.token_weights(config))
    assert per_sample(rows, updates, "loss_weight")[0].tolist() == [0, 0.5, 0.5]
    assemble.post_process(config)(rows)
    assert rows[0].train_metadata == {"seen": 32}
    config.algo.loss_aggregation = "own_hooks:short"
    with pytest.raises(ValueError, match="own_hooks:short returned weights of lengths"):
        make(samples(), token_weights=assemble.token_weights(config), algo__loss_aggregation="own_hooks:short")
    config.reward.post_process = "own_hooks:absent"
    with pytest.raises(ValueError, match="reward.post_process"):
        assemble.post_process(config)


def test_post_process_of_dcpo_comes_with_its_estimator():
    config = configs.get_config()
    assert assemble.post_process(config) is None and assemble.token_weights(config) is None
    config.algo.advantage_estimator = "dcpo"
    assert assemble.post_process(config) is not None
    assert not algo_rules.needs_critic(config)
    config.algo.advantage_estimator = "ppo"
    assert algo_rules.needs_critic(config)
