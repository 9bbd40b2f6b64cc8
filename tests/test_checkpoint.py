"""Checkpoints: what is restored is what was saved, on any mesh, and what is half written is never used."""

from __future__ import annotations

import json
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_helpers

from rljax import assemble, checkpoint, models, packing, sharding
from rljax.checkpoint import Checkpoints
from rljax.models.families import from_hf
from rljax.optimizer import OptimizerConfig
from rljax.policy import LossConfig
from rljax.trainer import Trainer
from rljax.types import TrainState

CFG = from_hf({**run_helpers.MODEL, "vocab_size": 32}, None)
OPTIM = OptimizerConfig(lr=1.0, warmup_steps=4, total_updates=100)


def make_trainer(devices: int) -> Trainer:
    mesh = sharding.make_mesh(data=1, fsdp=-1, devices=jax.devices()[:devices])
    return Trainer(CFG, mesh, LossConfig(), OPTIM)


SHAPES = make_trainer(1).state_shapes


def fresh(trainer: Trainer) -> TrainState:
    return trainer.init(jax.jit(lambda key: models.init(CFG, key), out_shardings=trainer.shardings)(jax.random.key(0)))


LENGTHS = (9, 1, 5, 5, 2, 8, 7, 3, 4, 6)  # ten samples, which four shards do not divide


def batches(shards: int):
    items = []
    for index, length in enumerate(LENGTHS):
        tokens = np.random.default_rng(index).integers(1, 32, length + 2).astype(np.int32)
        zeros = np.zeros(length, np.float32)
        items.append(packing.PackItem(
            tokens=tokens, prompt_len=2, loss_mask=np.ones(length, np.int32), old_logprobs=zeros, ref_logprobs=zeros,
            loss_weight=np.full(length, 0.1, np.float32), advantages=np.full(length, index - 4.4, np.float32),
            rollout_logprobs=zeros))  # fmt: skip
    return packing.pack(items, buckets=(16,), max_tokens_per_device=64, data_shards=shards)


def step(trainer: Trainer, state: TrainState) -> tuple[TrainState, dict]:
    return trainer.step(state, batches(trainer.data_shards), on_policy=True)


def leaves(state: TrainState) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes()


@pytest.fixture(scope="module")
def one():
    return make_trainer(1)


@pytest.fixture(scope="module")
def saved(one, tmp_path_factory):
    """(folder, the state's values, the state after one more update) of a checkpoint after three updates."""
    folder = tmp_path_factory.mktemp("saved")
    state = fresh(one)
    for _ in range(3):
        state, _ = step(one, state)
    values = leaves(state)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(7, state, {"rollouts": 7})
        state, metrics = step(one, state)  # donates what is being written
    return folder / "7", values, leaves(state), float(metrics["lr"])


def test_shapes_are_those_of_a_fresh_state(one):
    state = fresh(one)
    assert jax.tree.structure(state) == jax.tree.structure(SHAPES)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), SHAPES)


def test_restored_state_goes_on_bit_for_bit(one, saved, caplog):
    folder, values, after, rate = saved
    state, host = checkpoint.restore(folder, SHAPES, one.state_shardings)
    assert host == {"rollouts": 7}
    assert jax.tree.structure(state) == jax.tree.structure(SHAPES)
    assert_same(leaves(state), values)
    compiled = one._update._cache_size(), one._accumulate["self"]._cache_size()
    state, metrics = step(one, state)
    assert (one._update._cache_size(), one._accumulate["self"]._cache_size()) == compiled
    assert_same(leaves(state), after)
    assert int(state.step) == 4
    assert float(metrics["lr"]) == rate == 1.0  # the fourth of four warm-up steps
    assert "resuming under another" not in caplog.text


def test_another_number_of_devices(one, saved, tmp_path, caplog):
    folder, values, _, _ = saved
    four = make_trainer(4)
    state, _ = checkpoint.restore(folder, SHAPES, four.state_shardings)
    assert len(state.params["embed"].sharding.device_set) == 4
    assert state.params["embed"].addressable_shards[0].data.shape == (32, 4)
    assert_same(leaves(state), values)
    state, _ = step(four, state)
    wide = leaves(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    back, _ = checkpoint.restore(tmp_path / "1", SHAPES, one.state_shardings)
    assert_same(leaves(back), wide)
    assert len(back.params["embed"].sharding.device_set) == 1


def test_another_machine_is_announced(one, saved, tmp_path, caplog):
    folder = shutil.copytree(saved[0], tmp_path / "7")
    file = folder / "host" / "metadata"
    host = json.loads(file.read_text())
    host["machine"] |= {"cpus": 96, "xla_flags": "--xla_other"}
    file.write_text(json.dumps(host))
    checkpoint.restore(folder, SHAPES, one.state_shardings)
    assert "another cpus: 96 when saved" in caplog.text
    assert "another xla_flags: '--xla_other' when saved" in caplog.text
    assert "processor" not in caplog.text


def made(folder: pathlib.Path, template: pathlib.Path, *names: str) -> pathlib.Path:
    for name in names:
        shutil.copytree(template, folder / name)
    return folder


@pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "state/manifest.ocdbt", "host/metadata", "state", "host"])
def test_incomplete_checkpoint_is_not_the_newest(saved, tmp_path, caplog, lost):
    made(tmp_path, saved[0], "10", "20")
    gone = tmp_path / "20" / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert checkpoint.newest(tmp_path) == tmp_path / "10"
    with Checkpoints(tmp_path):
        assert checkpoint.newest(tmp_path) == tmp_path / "10"
    assert f"{tmp_path / '20'} is incomplete" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20.incomplete"]


def test_what_a_crash_left_is_removed_again_and_again(saved, tmp_path, caplog, one):
    state = fresh(one)
    for _ in range(2):
        made(tmp_path, saved[0], f"20{checkpoint.UNFINISHED}", "30")
        (tmp_path / "30" / "host" / "metadata").unlink()
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            assert checkpoint.newest(tmp_path) in (None, tmp_path / "20")
            checkpoints.save(20, state, {})
            checkpoints.wait()
            assert checkpoint.newest(tmp_path) == tmp_path / "20"
    assert caplog.text.count("was being written when its run ended: removed") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20", "30.incomplete"]


def test_newest_by_any_of_its_names(saved, tmp_path):
    made(tmp_path / "checkpoints", saved[0], "9", "10")
    newest = tmp_path / "checkpoints" / "10"
    assert checkpoint.newest(tmp_path) == checkpoint.newest(tmp_path / "checkpoints") == newest
    assert checkpoint.newest(tmp_path / "checkpoints" / "9").name == "9"
    assert checkpoint.newest(tmp_path / "absent") is None
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("async_save", [False, True])
def test_keep(one, tmp_path, async_save):
    state = fresh(one)
    with Checkpoints(tmp_path, keep=2, async_save=async_save) as checkpoints:
        for rollouts in (1, 2, 3, 4):
            checkpoints.save(rollouts, state, {"rollouts": rollouts})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_saving_twice_replaces_the_hosts_part(one, tmp_path):
    state = fresh(one)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {"evaluated": -1, "sets": ("a",)})
        checkpoints.save(3, state, {"evaluated": 3, "sets": ("a",)})
        written = (tmp_path / "3" / "host" / "metadata").stat().st_mtime_ns
        checkpoints.save(3, state, {"evaluated": 3, "sets": ("a",)})
        assert (tmp_path / "3" / "host" / "metadata").stat().st_mtime_ns == written
    assert checkpoint.restore(tmp_path / "3", SHAPES, one.state_shardings)[1] == {"evaluated": 3, "sets": ["a"]}


def test_another_model_is_refused_by_leaf(saved, one):
    wider = SHAPES.replace(params={**SHAPES.params, "final_norm": jax.ShapeDtypeStruct((24,), jnp.float32),
                                   "lm_head": jax.ShapeDtypeStruct((32, 16), jnp.float32)})
    places = jax.tree.map(lambda _: sharding.replicated(one.mesh), wider)
    with pytest.raises(ValueError, match="2 leaves do not fit") as error:
        checkpoint.restore(saved[0], wider, places)
    assert "missing params/lm_head [32, 16]" in str(error.value)
    assert "params/final_norm has shape [16], expected [24]" in str(error.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from inside orbax
def test_damaged_values_are_one_clear_error(saved, one, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "7")
    for file in (folder / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(ValueError, match=f"{folder}: cannot be read: .*move it away"):
        checkpoint.restore(folder, SHAPES, one.state_shardings)
    (folder / "host" / "metadata").write_text("{")
    with pytest.raises(ValueError, match="metadata: cannot be read"):
        checkpoint.read_host(folder)


def test_restoring_warns_of_nothing(saved, one, caplog):
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(saved[0], SHAPES, one.state_shardings)
    assert not caplog.records


def test_more_samples_than_shards_divide(one):
    """Ten samples over four shards: each is trained once, and loss and gradient are those of one shard."""
    found = []
    for trainer in (one, make_trainer(4)):
        packed = batches(trainer.data_shards)
        indices = np.concatenate([batch.sample_index[batch.loss_mask > 0] for batch in packed])
        np.testing.assert_array_equal(np.bincount(indices), LENGTHS)
        _, metrics = trainer.step(fresh(trainer), packed, on_policy=True)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_operations_and_peaks():
    matrices = 32 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32  # the tied head, q k v o, the three of the MLP
    assert assemble.flops_per_token(CFG) == 6 * matrices
    assert assemble.peak_flops("TPU v5 lite") == 197e12
    assert assemble.peak_flops("TPU v5p") == 459e12
    assert assemble.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert assemble.peak_flops("cpu") is None
