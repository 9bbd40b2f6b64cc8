"""Surrogates and corrections: hand-computed numbers, float64, and the same whether samples share a row or not."""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_data import cases

from rljax import packing, surrogates
from rljax.policy import LossConfig, policy_loss
from rljax.types import PackedBatch

LENGTHS = (3, 1, 5, 4, 2)
LOSS = LossConfig(eps_clip_high=0.28)
KINDS = {
    "clip": LOSS,
    "dual": dataclasses.replace(LOSS, dual_clip=2.0),
    "gspo": dataclasses.replace(LOSS, surrogate="gspo"),
    "cispo": dataclasses.replace(LOSS, surrogate="cispo"),
    "reinforce": dataclasses.replace(LOSS, surrogate="reinforce", entropy_coef=0.1),
    "kl": dataclasses.replace(LOSS, kl_loss_coef=0.1, kl_unbiased=True, kl_loss_type="k3"),
    "token": dataclasses.replace(LOSS, is_correction="truncate", is_low=0.5, is_high=1.2),
    "sequence": dataclasses.replace(LOSS, is_correction="mask", is_level="sequence", is_high=1.5, is_low=0.2),
    "geometric": dataclasses.replace(LOSS, surrogate="gspo", is_correction="mask", is_level="geometric", is_high=1.1),
    "opsm": dataclasses.replace(LOSS, opsm_delta=0.05),
}


@functools.cache
def recorded():
    """For each sample: mask, log-probs by new, old, reference and sampler, entropy, advantage; float32."""
    rng, found = np.random.default_rng(11), []
    for length in LENGTHS:
        mask = rng.integers(0, 4, length) > 0
        mask[0] = True
        logp = rng.normal(-1, 0.5, length)
        arrays = {"logp": logp, "old": logp + rng.normal(0, 0.3, length), "ref": logp + rng.normal(0, 0.3, length)}
        arrays["rollout"] = arrays["old"] + rng.normal(0, 0.3, length)
        arrays["entropy"] = rng.uniform(0, 2, length)
        found.append((mask, {k: v.astype(np.float32) for k, v in arrays.items()}, np.float32(rng.normal(0, 1))))
    return found


def batch_of(indices, buckets=(32,)):
    """Samples in one row as far as they fit; logp and entropy ride in the extras."""
    masks = [mask for mask, _, _ in recorded()]
    weights, items = packing.loss_weights(masks, "sample_mean"), []
    for index in indices:
        mask, arrays, advantage = recorded()[index]
        items.append(packing.PackItem(
            tokens=np.arange(len(mask) + 2), prompt_len=2, loss_mask=mask.astype(int), loss_weight=weights[index],
            advantages=np.full(len(mask), advantage), old_logprobs=arrays["old"], ref_logprobs=arrays["ref"],
            rollout_logprobs=arrays["rollout"], extras={name: arrays[name] for name in ("logp", "entropy")}))
    (batch,) = packing.pack(items, buckets=buckets, max_tokens_per_device=1024, data_shards=1)
    return batch


@functools.partial(jax.jit, static_argnums=0)
def evaluate(loss, batch: PackedBatch):
    def total(logp):
        return policy_loss(loss, batch, logp, batch.extras["entropy"])

    gradient, sums = jax.grad(total, has_aux=True)(batch.extras["logp"])
    return gradient, sums


def plain(kind, loss):
    """The step's loss in float64, sample by sample, written as in the papers."""
    total, samples = 0.0, sum(mask.any() for mask, _, _ in recorded())
    for mask, arrays, advantage in recorded():
        x = {name: values.astype(np.float64)[mask] for name, values in arrays.items()}
        ratio, low, high = np.exp(x["logp"] - x["old"]), 1 - loss.eps_clip, 1 + loss.eps_clip_high
        if loss.surrogate == "gspo":
            ratio = np.full_like(ratio, np.exp(np.mean(x["logp"] - x["old"])))
        policy = np.maximum(-ratio * advantage, -np.clip(ratio, low, high) * advantage)
        if loss.dual_clip and advantage < 0:
            policy = np.minimum(policy, -loss.dual_clip * advantage)
        if loss.surrogate == "cispo":
            policy = -np.clip(ratio, low, high) * advantage * x["logp"]
        if loss.surrogate == "reinforce":
            policy = -advantage * x["logp"]
        gap = x["old"] - x["rollout"]
        weight = {"token": np.exp(gap), "sequence": np.full_like(gap, np.exp(gap.sum())),
                  "geometric": np.full_like(gap, np.exp(gap.mean()))}[loss.is_level]
        if loss.is_correction == "truncate":
            policy = policy * np.clip(weight, loss.is_low, loss.is_high)
        if loss.is_correction == "mask":
            policy = policy * np.where((weight < loss.is_low) | (weight > loss.is_high), 0, weight)
        if loss.opsm_delta and advantage < 0 and np.mean(x["old"] - x["logp"]) > loss.opsm_delta:
            policy = policy * 0
        d = x["ref"] - x["logp"]
        kl = (np.expm1(d) - d) * (ratio if loss.kl_unbiased else 1.0)
        total += np.mean(policy + loss.kl_loss_coef * kl - loss.entropy_coef * x["entropy"]) / samples
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_loss_in_float64_and_packed_or_not(kind):
    loss = KINDS[kind]
    batch = batch_of(range(len(LENGTHS)))
    assert (batch.segment_ids > 1).any()
    gradient, sums = evaluate(loss, batch)
    assert float(sums["loss"]) == pytest.approx(plain(kind, loss), rel=1e-5)
    parts = [evaluate(loss, batch_of([index])) for index in reversed(range(len(LENGTHS)))]
    for name, value in sums.items():
        values = [part[name] for _, part in parts]
        expected = float(max(values) if name.startswith("max/") else sum(values))
        assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    ids = np.asarray(batch.sample_index)
    for place, index in enumerate(reversed(range(len(LENGTHS)))):
        alone = np.asarray(parts[place][0])[batch_of([index]).sample_index >= 0]
        np.testing.assert_allclose(np.asarray(gradient)[ids == index], alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["clip", "gspo", "reinforce", "kl", "sequence"])
def test_gradients_against_finite_differences(kind):
    loss, batch = KINDS[kind], batch_of(range(len(LENGTHS)))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if x.dtype == np.float32 else jnp.asarray(x), batch)

        def total(logp):
            return policy_loss(loss, wide, logp, wide.extras["entropy"])[0]

        gradient = jax.grad(total)(wide.extras["logp"])
        for place in zip(*np.nonzero(batch.loss_mask)):
            step = jnp.zeros(gradient.shape).at[place].set(1e-3)
            slope = (total(wide.extras["logp"] + step) - total(wide.extras["logp"] - step)) / 2e-3
            assert float(gradient[place]) == pytest.approx(float(slope), rel=0.02, abs=1e-4), place


def test_gspo_gradient_flows_through_the_mean():
    """Inside the window: each token of a sample gets -A ratio / n^2 (its own weight 1/n, the mean's 1/n, n terms)."""
    loss = dataclasses.replace(LOSS, surrogate="gspo", eps_clip=0.9, eps_clip_high=9.0)
    gradient, _ = evaluate(loss, batch_of([2]))
    mask, arrays, advantage = recorded()[2]
    ratio = np.exp(np.mean((arrays["logp"] - arrays["old"])[mask]))
    found = np.asarray(gradient)[batch_of([2]).loss_mask > 0]
    np.testing.assert_allclose(found, -advantage * ratio / mask.sum() / len(LENGTHS), rtol=1e-5)


def test_correction_metrics_are_raw_ratios():
    loss = KINDS["token"]
    _, sums = evaluate(loss, batch_of(range(len(LENGTHS))))
    ratios = np.concatenate([np.exp(a["old"] - a["rollout"])[mask] for mask, a, _ in recorded()])
    assert float(sums["mean/tis"]) == pytest.approx(ratios.sum(), rel=1e-5)
    assert float(sums["mean/tis_clipfrac"]) == ((ratios < 0.5) | (ratios > 1.2)).sum() > 0
    assert float(sums["mean/tis_abs"]) == pytest.approx(np.abs(ratios - 1).sum(), rel=1e-5)


def one_sample(loss, logp, advantage, **arrays):
    """(sums, gradient by logp) of one sample of these tokens, all trained."""
    size = len(logp)
    given = {"old_logprobs": logp, "ref_logprobs": logp, "rollout_logprobs": logp, **arrays}
    item = packing.PackItem(
        tokens=np.arange(size + 1), prompt_len=1, loss_mask=np.ones(size), loss_weight=np.full(size, 1 / size),
        advantages=np.full(size, advantage), extras={"logp": np.asarray(logp), "entropy": np.zeros(size)},
        **{name: np.asarray(values, np.float32) for name, values in given.items()})
    (batch,) = packing.pack([item], buckets=(8,), max_tokens_per_device=8, data_shards=1)
    gradient, sums = evaluate(loss, batch)
    return sums, np.asarray(gradient)[0, 1 : size + 1]


@pytest.fixture(scope="module")
def rows():
    return {row["id"]: row for row in cases("numerics")}


def test_case_masked_weights_stay_in_the_denominator(rows):
    row = rows["NUM-044"]
    gaps = np.asarray(row["input"]["log_weights"])
    loss = dataclasses.replace(LOSS, is_correction="mask", is_low=0.5, is_high=2.0, old_logprobs="self")
    sums, gradient = one_sample(loss, np.full(4, -1.0), 1.0, rollout_logprobs=-1.0 - gaps)
    assert float(sums["pg_loss"]) == pytest.approx(row["expected"]["loss_with_fixed_weights"], rel=1e-5)
    assert (gradient != 0).tolist() == [bool(kept) for kept in row["expected"]["kept"]]


def test_case_a_missing_log_prob_of_the_sampler(rows):
    row = rows["NUM-046"]
    loss = dataclasses.replace(LOSS, is_correction="truncate")
    old = row["input"]["old_logprobs"]
    sums, gradient = one_sample(loss, old, 1.0, rollout_logprobs=row["input"]["rollout_logprobs"])
    np.testing.assert_allclose(-gradient * 2, row["expected"]["weights"], rtol=1e-5)
    assert all(np.isfinite(value) for value in sums.values()) and float(sums["missing_rollout_logprobs"]) == 1


def test_case_off_policy_sequences(rows):
    args = rows["FCT-080"]["input"]["args"]
    loss = dataclasses.replace(LOSS, opsm_delta=args["delta"])
    sums, gradient = one_sample(loss, args["logp"], args["advantages"][0], old_logprobs=args["old_logp"])
    assert float(sums["mean/opsm_clipfrac"]) == 2 and not gradient.any()
    sums, gradient = one_sample(loss, args["logp"], 1.0, old_logprobs=args["old_logp"])
    assert float(sums["mean/opsm_clipfrac"]) == 0 and gradient.all()


def test_a_huge_ratio_is_finite_in_loss_and_gradient():
    batch = batch_of(range(len(LENGTHS)))
    batch = batch.replace(old_logprobs=batch.old_logprobs - 500 * batch.loss_mask, rollout_logprobs=batch.old_logprobs)
    for loss in KINDS.values():
        gradient, sums = evaluate(loss, batch)
        assert np.isfinite(gradient).all() and all(np.isfinite(value) for value in sums.values())


def test_everything_masked_is_zero():
    batch = batch_of(range(len(LENGTHS)))
    batch = batch.replace(loss_mask=np.zeros_like(batch.loss_mask))
    for loss in KINDS.values():
        gradient, sums = evaluate(loss, batch)
        assert not np.asarray(gradient).any() and not any(float(value) for value in sums.values())


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    text = ("def doubled(loss, batch, logp):\n"
            "    return -2 * batch.advantages * logp * batch.extras['entropy'], {'heat': batch.extras['entropy']}\n")
    text += ("def summed(loss, batch, logp):\n    return -(logp * batch.advantages).sum(), {}\n"
             "def lone(loss, batch, logp):\n    return -logp\n")
    (tmp_path / "own_surrogate.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_surrogate", None)


def test_a_surrogate_of_ones_own_sees_the_extras(plugin):
    gradient, sums = evaluate(dataclasses.replace(LOSS, surrogate="own_surrogate:doubled"), batch_of([0, 1]))
    assert np.asarray(gradient).any()
    entropies = np.concatenate([arrays["entropy"][mask] for mask, arrays, _ in recorded()[:2]])
    assert float(sums["mean/extra/heat"]) == pytest.approx(entropies.sum(), rel=1e-5)


@pytest.mark.parametrize(("name", "words"), [
    ("summed", r"token loss has shape \(\), expected one number for each token, \(1, 32\)"),
    ("lone", r"own_surrogate:lone returned .*Tracer: expected \(token loss, dict\)"),
])  # fmt: skip
def test_results_that_do_not_fit(plugin, name, words):
    with pytest.raises(ValueError, match=words):
        evaluate(dataclasses.replace(LOSS, surrogate=f"own_surrogate:{name}"), batch_of([0, 1]))


@pytest.mark.parametrize("name", ["clipp", "own_surrogate:absent", "surrogates.py:clip"])
def test_bad_names(plugin, name):
    with pytest.raises(ValueError, match="algo.surrogate"):
        surrogates.find(name)
