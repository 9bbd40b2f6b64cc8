"""trainer.py: one loss on every layout, the first update, skipped updates, frozen leaves, compilations, resume."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_surrogates
from shared_data import cases

from rljax import checkpoint, models, packing, sharding
from rljax.models.config import ModelConfig, Rope
from rljax.optimizer import OptimizerConfig
from rljax.policy import LossConfig, policy_loss, token_scores
from rljax.trainer import Trainer, finish_metrics

LENGTH, COUNT = 28, 12
BASE = ModelConfig(
    model_type="qwen3", vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, norm_eps=1e-6, tied=True, max_position_embeddings=128, attention_scale=0.25, windows=(0, 0),
    ropes=(Rope(1e4, 16),), rope_ids=(0, 0), qk_norm="head", initializer_range=0.1,
)
# One key/value head on two tensor shards, a vocabulary that they divide, and the other kinds of leaves.
ODD = dataclasses.replace(BASE, vocab_size=96, num_kv_heads=1, tied=False, qkv_bias=True, qk_norm="none",
                          windows=(7, 0), logits_softcap=8.0)
LOSS = LossConfig(kl_loss_coef=0.1, eps_clip_high=0.28, vocab_chunk=20)
ODD_LOSS = dataclasses.replace(LOSS, entropy_coef=0.05, temperature=0.8, dual_clip=3.0, kl_loss_type="k3")
OPTIM = OptimizerConfig(1e-3, warmup_steps=0)


@functools.cache
def trainer(cfg=BASE, loss=LOSS, sizes=(1, 1, 1)):
    count = int(np.prod(sizes))
    return Trainer(cfg, sharding.make_mesh(*sizes, devices=jax.devices()[:count]), loss, OPTIM)


@functools.cache
def weights(cfg):
    return jax.device_get(jax.jit(functools.partial(models.init, cfg))(jax.random.key(3)))


def with_optimizer(optim):
    """The trainer of one device with another optimizer: only the update is another program."""
    base, one = trainer(), Trainer(BASE, trainer().mesh, LOSS, optim)
    one._accumulate, one._score, one._zeros = base._accumulate, base._score, base._zeros
    return one


def fresh(one):
    return one.init(sharding.to_devices(weights(one.cfg), one.shardings))


@functools.cache
def samples(cfg=BASE, step=0):
    """Recorded samples of mixed length, tool output masked, old log-probs near the policy's at first."""
    rng = np.random.default_rng([7, step])
    masks = [rng.integers(0, 4, rng.integers(2, 12)) > 0 for _ in range(COUNT)]
    items = []
    for mask, weight in zip(masks, packing.loss_weights(masks, "sample_mean"), strict=True):
        prompt = int(rng.integers(1, 6))
        old = rng.normal(-4.5, 0.3, len(mask))
        items.append(packing.PackItem(
            tokens=rng.integers(0, cfg.vocab_size, prompt + len(mask)), prompt_len=prompt, loss_mask=mask.astype(int),
            loss_weight=weight, advantages=rng.normal(0.5, 1.0, len(mask)), old_logprobs=old,
            ref_logprobs=old + rng.normal(0, 0.3, len(mask)), rollout_logprobs=old + rng.normal(0, 0.01, len(mask)),
        ))
    return items


def filled(batches, rows):
    """Empty rows below, so that all layouts share one compiled shape."""
    def pad(x):
        return np.pad(x, ((0, rows - len(x)), (0, 0)))

    return [jax.tree.map(pad, batch) for batch in batches]


def packed(items, shards=1):
    """One micro-batch of 8 rows, several samples in each."""
    batches = packing.pack(items, buckets=(LENGTH,), max_tokens_per_device=8 * LENGTH // shards, data_shards=shards)
    assert len(batches) == 1 and (batches[0].segment_ids > 1).any()
    return filled(batches, 8)


def one_per_row(items, rows=8):
    """Micro-batches in which every sample has a row of its own."""
    lone = [packing.pack([item], buckets=(LENGTH,), max_tokens_per_device=1, data_shards=1)[0] for item in items]
    parts = [lone[start : start + rows] for start in range(0, len(lone), rows)]
    return filled([jax.tree.map(lambda *x: np.concatenate(x), *part) for part in parts], rows)


def steps(one, layouts):
    """For each step: (metrics, update of every leaf)."""
    state, found = fresh(one), []
    for batches in layouts:
        before = sharding.to_host(state.params)
        state, sums = one.step(state, batches, on_policy=False)
        found.append((finish_metrics(sharding.to_host(sums)),
                      jax.tree.map(np.subtract, sharding.to_host(state.params), before)))
    return found


def assert_same_training(found, expected, limit=1e-3):
    for (metrics, updates), (metrics_0, updates_0) in zip(found, expected, strict=True):
        assert metrics.keys() == metrics_0.keys()
        sums = {"train/loss", "train/grad_norm", "train/pg_loss", "train/kl_loss", "train/entropy_loss"}
        for name in metrics:
            tight = {"rel": 1e-5} if name in sums else {"rel": 1e-4, "abs": 1e-6}
            assert metrics[name] == pytest.approx(metrics_0[name], **tight), name
        for (path, one), other in zip(jax.tree.leaves_with_path(updates), jax.tree.leaves(updates_0), strict=True):
            assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other), path
            assert np.linalg.norm(other) > 0, path


@functools.cache
def reference(cfg, loss):
    """Three steps on one device, packed."""
    return steps(trainer(cfg, loss), [packed(samples(cfg, step)) for step in range(3)])


def test_one_device_packed_or_not_in_any_micro_batches():
    layouts = [one_per_row(samples()), one_per_row(samples(step=1)[::-1]), packed(samples(step=2)[::-1])]
    assert [len(batches) for batches in layouts] == [2, 2, 1]
    assert_same_training(steps(trainer(), layouts), reference(BASE, LOSS))


def test_eight_devices_packed_or_not():
    one = trainer(sizes=(2, 2, 2))
    layouts = [packed(samples(), shards=4), one_per_row(samples(step=1)), one_per_row(samples(step=2)[::-1])]
    assert {batch.tokens.shape for batches in layouts for batch in batches} == {(8, LENGTH)}
    assert_same_training(steps(one, layouts), reference(BASE, LOSS))
    assert one._accumulate["batch"]._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_surrogates.KINDS)
def test_every_surrogate_and_correction_on_eight_devices(kind):
    loss = dataclasses.replace(test_surrogates.KINDS[kind], vocab_chunk=20)
    layouts = [packed(samples(), shards=4), one_per_row(samples(step=1)), one_per_row(samples(step=2)[::-1])]
    # Adam's first update is near +-lr also where terms cancel to a gradient of 1e-9, whose sign is that of rounding.
    assert_same_training(steps(trainer(BASE, loss, (2, 2, 2)), layouts), reference(BASE, loss), limit=3e-3)


def test_eight_devices_with_heads_that_they_do_not_divide_and_remat():
    one = trainer(ODD, dataclasses.replace(ODD_LOSS, remat="full"), (2, 2, 2))
    layouts = [packed(samples(ODD, step), shards=4) for step in range(2)] + [one_per_row(samples(ODD, 2))]
    assert_same_training(steps(one, layouts), reference(ODD, ODD_LOSS))


def test_each_device_holds_its_share_of_parameters_and_moments():
    one = trainer(ODD, dataclasses.replace(ODD_LOSS, remat="full"), (2, 2, 2))
    state = fresh(one)
    matrices = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.size > 1000]
    assert len(matrices) == 3 * 9
    for leaf in matrices:
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // 4}
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert held < 0.26 * whole


def test_weights_are_gathered_layer_by_layer_and_activations_never():
    one = trainer(sizes=(2, 2, 2))
    state, batch = fresh(one), one.put(packed(samples(), shards=4)[0])
    with jax.set_mesh(one.mesh):
        lowered = one._accumulate["batch"].lower(state.params, batch, one._zeros(), one._zero_sums("batch", batch))
        lines = lowered.compile().as_text().splitlines()
    layers, rows = BASE.num_layers, batch.tokens.shape[0]
    gathers = [line.split("all-gather(")[0].split("=", 1)[1] for line in lines if " all-gather(" in line]
    floats = [tuple(map(int, text.split("f32[")[1].split("]")[0].split(","))) for text in gathers if "f32[" in text]
    assert any(shape == (1, 64, 96 // 2) for shape in floats)  # gate_proj of one layer
    assert not [shape for shape in floats if shape[0] == layers and len(shape) == 3]
    assert not [shape for shape in floats if LENGTH in shape or rows * LENGTH in shape]


def test_first_update_against_the_reference_itself_is_reinforce():
    one = trainer()
    state, (batch,) = fresh(one), packed(samples())
    logp, entropy = one.score(state.params, batch)
    assert logp.shape == entropy.shape == batch.tokens.shape and logp.dtype == entropy.dtype == jnp.float32
    batch = batch.replace(old_logprobs=logp, ref_logprobs=logp, rollout_logprobs=logp)

    @jax.jit
    @jax.grad
    def reinforce(params):
        score, _ = token_scores(one.cfg, one.loss, (1, 1), params, batch)
        return -jnp.sum(batch.loss_weight * batch.advantages * score)

    with jax.set_mesh(one.mesh):
        zeros = one._zeros(), one._zero_sums("batch", batch)
        grads, sums = one._accumulate["batch"](state.params, one.put(batch), *zeros)
    for leaf, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(reinforce(weights(BASE))), strict=True):
        assert np.linalg.norm(leaf - expected) <= 1e-5 * np.linalg.norm(expected)
    metrics = finish_metrics({**sharding.to_host(sums), "nonfinite": 0})
    for name in ("kl_loss", "ppo_kl", "pg_clipfrac", "train_rollout_logprob_abs_diff"):
        assert abs(metrics[f"train/{name}"]) <= 1e-6, name
    weighted = -np.sum(batch.loss_weight * batch.advantages)
    assert metrics["train/pg_loss"] == pytest.approx(weighted, rel=1e-5)
    assert metrics["train/entropy_loss"] == pytest.approx(float(np.sum(batch.loss_weight * entropy)), rel=1e-5)


def test_on_policy_equals_scored_old_log_probs():
    one = trainer()
    state, batches = fresh(one), packed(samples())
    scored = [batch.replace(old_logprobs=one.score(state.params, batch)[0]) for batch in batches]
    with_scores, sums = one.step(state, scored, on_policy=False)
    itself, sums_itself = one.step(fresh(one), batches, on_policy=True)
    assert finish_metrics(sums_itself)["train/loss"] == pytest.approx(finish_metrics(sums)["train/loss"], rel=1e-5)
    for leaf, expected, start in zip(*map(jax.tree.leaves, (itself.params, with_scores.params, weights(BASE)))):
        assert np.linalg.norm(leaf - expected) <= 1e-3 * np.linalg.norm(expected - start)


def test_later_updates_of_a_rollout_clip_and_leave_the_old_policy():
    one = with_optimizer(dataclasses.replace(OPTIM, lr=2e-3))
    state, batches = fresh(one), packed(samples())
    batches = [batch.replace(old_logprobs=one.score(state.params, batch)[0]) for batch in batches]
    seen = []
    for _ in range(3):
        state, sums = one.step(state, batches, on_policy=False)
        seen.append(finish_metrics(sharding.to_host(sums)))
    assert seen[0]["train/pg_clipfrac"] == 0 < seen[1]["train/pg_clipfrac"]
    assert seen[1]["train/loss"] < seen[0]["train/loss"]
    assert int(state.step) == 3


@pytest.mark.parametrize(("field", "bad"), [("advantages", np.nan), ("loss_weight", np.inf)])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(field, bad):
    one = trainer()
    good = one_per_row(samples())
    state, _ = one.step(fresh(one), good, on_policy=False)
    before = sharding.to_host(state)
    spoilt = good[1].replace(**{field: np.where(good[1].loss_mask > 0, bad, 0.0).astype(np.float32)})
    for skipped in (1, 2):
        state, sums = one.step(state, [good[0], spoilt], on_policy=False)
        assert finish_metrics(sharding.to_host(sums))["train/nonfinite_skips"] == skipped
    after = sharding.to_host(state)
    assert (int(before.nonfinite), int(after.nonfinite)) == (0, 2)
    assert leaves_as_bytes(after.replace(nonfinite=before.nonfinite)) == leaves_as_bytes(before)
    state, sums = one.step(state, good, on_policy=False)
    assert finish_metrics(sharding.to_host(sums))["train/nonfinite_skips"] == 0
    assert (int(state.nonfinite), int(state.step)) == (0, 2)
    assert np.linalg.norm(state.params["embed"] - before.params["embed"]) > 0


def test_values_under_the_mask_are_never_read():
    one = trainer()
    (batch,) = packed(samples())
    free = batch.loss_mask == 0
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "loss_weight")
    dirty = batch.replace(**{name: np.where(free, np.nan, getattr(batch, name)).astype(np.float32) for name in names})
    (clean, sums), (other, sums_dirty) = (one.step(fresh(one), [b], on_policy=False) for b in (batch, dirty))
    assert leaves_as_bytes((clean, sums)) == leaves_as_bytes((other, sums_dirty))


def leaves_as_bytes(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_frozen_leaves_stay_bit_equal_outside_the_norm_and_without_moments():
    free, batches = trainer(), packed(samples())
    frozen = with_optimizer(dataclasses.replace(OPTIM, trainable="layers/|embed", frozen="_proj$"))
    start = jax.tree.map(lambda x: np.where(np.abs(x) < 0.01, np.float32(-0.0), x), weights(BASE))
    state = frozen.init(sharding.to_devices(start, frozen.shardings))
    with jax.set_mesh(free.mesh):
        zeros = free._zeros(), free._zero_sums("batch", batches[0])
        grads, _ = free._accumulate["batch"](state.params, free.put(batches[0]), *zeros)
    moving = {"embed", "layers/q_norm", "layers/k_norm", "layers/attn_norm", "layers/mlp_norm"}
    flat = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}
    expected = np.sqrt(sum(np.sum(np.square(flat[name], dtype=np.float64)) for name in moving))
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * sum(flat[name].size for name in moving)
    for step in range(2):
        state, sums = frozen.step(state, batches, on_policy=False)
        if step == 0:
            assert float(sums["grad_norm"]) == pytest.approx(expected, rel=1e-5)
    for (path, leaf), before in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(start), strict=True):
        name = "/".join(k.key for k in path)
        assert (leaves_as_bytes(leaf) == leaves_as_bytes(before)) == (name not in moving), name


@pytest.fixture
def compilations():
    """A list that grows by one name with every program that is compiled from now on."""
    seen, on = [], [True]

    def listen(name, _, **details):
        if on[0] and name == "/jax/core/compile/backend_compile_duration":
            seen.append(details.get("fun_name", name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    on[0] = False


def test_one_compilation_for_each_shape_and_none_on_its_second_use(compilations):
    small = dataclasses.replace(BASE, num_layers=1, windows=(0,), rope_ids=(0,), vocab_size=31, hidden_size=32)
    one = trainer(small, dataclasses.replace(LOSS, vocab_chunk=31))
    items = samples(small)
    state = fresh(one)
    first = [one_per_row(items, rows) for rows in (4, 6)]
    for batches in first:
        state, _ = one.step(state, batches, on_policy=False)
        one.score(state.params, batches[0])
    assert one._accumulate["batch"]._cache_size() == one._score._cache_size() == 2
    assert one._update._cache_size() == one._zeros._cache_size() == 1
    assert one._accumulate["self"]._cache_size() == 0
    assert compilations
    del compilations[:]
    for rows in (6, 4):
        batches = one_per_row(items[::-1], rows)
        scored = [batch.replace(old_logprobs=one.score(state.params, batch)[0]) for batch in batches]
        state, sums = one.step(state, scored, on_policy=False)
        finish_metrics(sharding.to_host(sums))
    assert compilations == []


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_a_restored_state_goes_on_bit_for_bit_and_compiles_nothing(tmp_path, compilations, sizes):
    one = trainer(sizes=sizes)
    layouts = [packed(samples(step=step), shards=max(1, int(np.prod(sizes[:2])))) for step in range(3)]
    state = fresh(one)
    for batches in layouts[:2]:
        state, _ = one.step(state, batches, on_policy=False)
    with checkpoint.Checkpoints(tmp_path, async_save=False) as store:
        store.save(2, state, {"updates": 2})
    restored, _ = checkpoint.restore(tmp_path / "2", state, one.state_shardings)
    assert jax.tree.structure(restored) == jax.tree.structure(state) == jax.tree.structure(fresh(one))
    assert leaves_as_bytes(restored) == leaves_as_bytes(state)
    del compilations[:]
    results = [one.step(s, layouts[2], on_policy=False) for s in (state, restored)]
    assert compilations == []
    assert leaves_as_bytes(results[0]) == leaves_as_bytes(results[1])
    assert int(results[1][0].step) == 3


def test_case_schedule_goes_on_after_resume():
    rows = [row for row in cases("checkpoint") if row["id"] == "CKP-004"]
    if not rows:
        pytest.skip("case CKP-004 is missing")
    given = rows[0]["input"]
    optim = dataclasses.replace(OPTIM, lr=given["lr"], warmup_steps=given["warmup_steps"])
    one = with_optimizer(optim)
    state = fresh(one)
    for _ in range(given["updates_before"]):
        state, _ = one._update(state, one._zeros())
    counts = [int(leaf) for path, leaf in jax.tree.leaves_with_path(state.opt_state) if "count" in str(path[-1])]
    assert counts and set(counts) == {rows[0]["expected"]["optimizer_count"]} == {int(state.step)}
    _, metrics = one._update(state, one._zeros())
    assert float(metrics["lr"]) == pytest.approx(rows[0]["expected"]["next_lr"])


def test_half_precision_compute_keeps_float32_weights_moments_and_gradients():
    half = trainer(loss=dataclasses.replace(LOSS, compute_dtype=jnp.bfloat16))
    batches = packed(samples())
    state, sums = half.step(fresh(half), batches, on_policy=False)
    metrics = finish_metrics(sharding.to_host(sums))
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        assert leaf.dtype == (jnp.float32 if leaf.ndim else jnp.int32)
    assert {leaf.dtype for leaf in jax.tree.leaves(half._zeros())} == {jnp.dtype(jnp.float32)}
    expected = reference(BASE, LOSS)[0][0]
    for name, tolerance in (("loss", 0.02), ("grad_norm", 0.15), ("entropy_loss", 0.01)):
        assert metrics[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=tolerance), name
        assert metrics[f"train/{name}"] != expected[f"train/{name}"], name


def test_remat_changes_nothing_but_memory():
    one = trainer(loss=dataclasses.replace(LOSS, remat="full"))
    assert_same_training(steps(one, [packed(samples(step=step)) for step in range(3)]), reference(BASE, LOSS))


def supervised_batches(token_losses, masks, mode, length=None):
    """One micro-batch for each sample, whose log-probs are minus the losses given; yields (batch, logp)."""
    for losses_, mask, weight in zip(token_losses, masks, packing.loss_weights(masks, mode, length), strict=True):
        zeros = np.zeros(len(mask), np.float32)
        item = packing.PackItem(np.zeros(len(mask) + 1, int), 1, np.asarray(mask), weight, *[zeros] * 4)
        (batch,) = packing.pack([item], buckets=(8,), max_tokens_per_device=8, data_shards=1)
        logp = np.zeros((1, 8), np.float32)
        logp[0, 1 : len(mask) + 1] = -np.array(losses_, np.float32)
        yield batch, logp


STEP_LOSSES = ("aggregate_loss", "step_loss", "perplexity")


@pytest.mark.parametrize(
    "row", [r for r in cases("numerics") if r["input"].get("quantity") in STEP_LOSSES], ids=lambda row: row["id"]
)
def test_case_loss_of_a_step(row):
    args = dict(row["input"]["args"])
    if row["input"]["quantity"] == "perplexity":
        counts = args["row_tokens"]
        args = {"token_losses": [[nll] * n for nll, n in zip(args["row_nll"], counts)],
                "loss_masks": [[1] * n for n in counts], "mode": "token_mean"}
    token_losses = args.get("token_losses") or args["sample_losses"]
    total = 0.0
    for batch, logp in supervised_batches(token_losses, args["loss_masks"], args["mode"], args.get("length")):
        loss, sums = policy_loss(LossConfig("sft"), batch, logp, np.zeros_like(logp))
        assert float(sums["loss"]) == float(loss)
        total += float(loss)
    value = np.exp(total) if row["input"]["quantity"] == "perplexity" else total
    assert value == pytest.approx(row["expected"]["value"], rel=1e-5, abs=1e-6)
