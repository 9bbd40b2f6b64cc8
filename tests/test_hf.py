"""Hugging Face folders in and out: reload-equal, sharded, atomic, and every misfit named."""

from __future__ import annotations

import json
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from model_helpers import NAMES, golden, loaded, run
from shared_data import cases, shared

from rljax import models, sharding
from rljax.models import decoder, hf, hf_save, names

LOADING = {row["id"]: row for row in cases("model_loading")}


def assert_equal(one, other) -> None:
    flat, tree = jax.tree.flatten(one)
    rest, other_tree = jax.tree.flatten(other)
    assert tree == other_tree
    for left, right in zip(flat, rest, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def copy(name: str, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """A writable copy of a single-file golden model in `folder`; returns its tensors."""
    shutil.copytree(shared("golden", "models", name), folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    return safetensors.numpy.load_file(folder / "model.safetensors")


def rewrite(folder: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    (folder / "model.safetensors").unlink()
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(contiguous, folder / "model.safetensors")


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3_sharded"])
def test_saved_models_reload_equal_and_transformers_reads_them(name, tmp_path):
    from transformers import AutoConfig

    cfg, params = loaded(name)
    models.save(str(tmp_path / "saved"), cfg, params)
    again, reloaded = models.load(str(tmp_path / "saved"))
    assert again == cfg and again.eos_token_ids == cfg.eos_token_ids
    assert_equal(reloaded, params)
    original = safetensors.numpy.load_file(shared("golden", "models", name, "model.safetensors"))
    written = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    assert_equal(written, original)
    hf_config = AutoConfig.from_pretrained(tmp_path / "saved")
    golden_config = AutoConfig.from_pretrained(shared("golden", "models", name))
    assert type(hf_config) is type(golden_config) and hf_config.architectures
    # the golden folders were written by the same class: what transformers understands must be the same
    assert hf_config.to_dict() | {"_name_or_path": ""} == golden_config.to_dict() | {"_name_or_path": ""}


def test_sharded_files_with_an_index(tmp_path, monkeypatch):
    cfg, params = loaded("phi3")
    monkeypatch.setattr(hf_save, "SHARD_BYTES", 40_000)
    models.save(str(tmp_path / "saved"), cfg, params)
    files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert_equal(models.load(str(tmp_path / "saved"))[1], params)


@pytest.mark.parametrize("dtype, exact", [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_half_precision_files(dtype, exact, tmp_path):
    cfg, params = loaded("llama_tied")
    models.save(str(tmp_path / "saved"), cfg, params, dtype=dtype)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["dtype"] == dtype and "torch_dtype" not in config
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(exact), params)
    for asked in (jnp.float32, jnp.bfloat16):
        _, again = models.load(str(tmp_path / "saved"), dtype=asked)
        assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {jnp.dtype(asked)}
        assert_equal(again, jax.tree.map(lambda leaf: leaf.astype(np.dtype(asked)), rounded))


def test_values_beyond_float16_are_refused(tmp_path):
    cfg, params = loaded("llama_tied")
    with pytest.raises(ValueError, match="model.norm.weight.*float16"):
        models.save(str(tmp_path / "saved"), cfg, params | {"final_norm": params["final_norm"] + 1e6}, dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch):
    cfg, params = loaded("llama_tied")
    models.save(str(tmp_path / "saved"), cfg, params)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    for name in ("saved", "new"):
        with pytest.raises(OSError, match="No space"):
            models.save(str(tmp_path / name), cfg, params)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_equal(models.load(str(tmp_path / "saved"))[1], params)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_save_replaces_the_old_folder(atomic, tmp_path, monkeypatch):
    cfg, params = loaded("llama_tied")
    models.save(str(tmp_path / "saved"), cfg, params)
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    if not atomic:
        monkeypatch.setattr(hf_save.ctypes, "CDLL", lambda *args, **kwargs: object())
    models.save(str(tmp_path / "saved"), cfg, other)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_equal(models.load(str(tmp_path / "saved"))[1], other)


def test_a_folder_that_is_no_model_is_not_replaced(tmp_path):
    cfg, params = loaded("llama_tied")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a model folder"):
        models.save(str(tmp_path), cfg, params)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_tokenizer_files_come_along(tmp_path):
    cfg, params = loaded("llama_tied")
    source = tmp_path / "source"
    source.mkdir()
    for file in ("tokenizer.json", "chat_template.jinja", "merges.txt", "config.json", "weights.bin"):
        (source / file).write_text(file)
    models.save(str(tmp_path / "saved"), cfg, params, tokenizer_from=str(source))
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
        "tokenizer.json"]
    assert models.load_config(str(tmp_path / "saved")) == cfg


def test_a_config_that_left_its_file_is_refused(tmp_path):
    import dataclasses

    cfg, params = loaded("llama_tied")
    with pytest.raises(ValueError, match="hf_json"):
        models.save(str(tmp_path / "saved"), dataclasses.replace(cfg, norm_eps=0.5), params)
    with pytest.raises(ValueError, match="float8"):
        models.save(str(tmp_path / "saved"), cfg, params, dtype="float8")
    with pytest.raises(ValueError, match=r"model.norm.weight.*\(3,\).*\(48,\)"):
        models.save(str(tmp_path / "saved"), cfg, params | {"final_norm": np.ones(3, np.float32)})


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe"])
def test_each_device_reads_its_own_part(name, tmp_path):
    mesh = sharding.make_mesh(fsdp=4, tensor=2)

    def shardings(cfg):
        return sharding.tree_shardings(decoder.specs(cfg), sharding.TRAIN_RULES, mesh)

    cfg, plain = loaded(name)
    _, params = models.load(str(shared("golden", "models", name)), shardings=shardings)
    q = params["layers"]["q_proj"]
    assert q.sharding.shard_shape(q.shape) == (q.shape[0], q.shape[1] // 4, q.shape[2] // 2)
    assert_equal(params, plain)
    models.save(str(tmp_path / "saved"), cfg, params)
    _, again = models.load(str(tmp_path / "saved"), shardings=shardings(cfg))
    assert_equal(again, plain)


def test_only_the_wanted_slices_are_read():
    cfg, _ = loaded("qwen3")
    asked = []

    class Watched:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_shape(self):
            return self.tensor.get_shape()

        def get_dtype(self):
            return self.tensor.get_dtype()

        def __getitem__(self, index):
            values = self.tensor[index]
            asked.append((values.size, int(np.prod(self.get_shape()))))
            return values

    tensors = {name: Watched(value) for name, value in
               hf.open_tensors(shared("golden", "models", "qwen3")).items()}
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    hf.assemble(cfg, tensors, jnp.float32, sharding.tree_shardings(decoder.specs(cfg), sharding.TRAIN_RULES, mesh), "x")
    big = [(read, whole) for read, whole in asked if whole > cfg.num_heads * cfg.head_dim]
    assert big and all(read * 4 <= whole for read, whole in big)


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path):
    tensors = copy("qwen3", tmp_path / "model")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.7.odd.weight"] = np.zeros((2, 3), np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(5, np.float32)
    rewrite(tmp_path / "model", tensors)
    with pytest.raises(ValueError) as error:
        models.load(str(tmp_path / "model"))
    text = str(error.value)
    assert "missing model.layers.1.mlp.up_proj.weight" in text
    assert "unexpected model.layers.7.odd.weight [2, 3]" in text
    assert "model.layers.0.self_attn.q_norm.weight has shape [5], expected [24]" in text


@pytest.mark.parametrize("row", [LOADING[key] for key in ("LOD-004", "LOD-006") if key in LOADING],
                         ids=lambda row: row["id"])
def test_case_tied_embeddings(row, tmp_path):
    tied = row["input"]["tie_word_embeddings"]
    tensors = copy("llama_tied" if tied else "qwen2", tmp_path / "model")
    tensors.pop("lm_head.weight", None)
    rewrite(tmp_path / "model", tensors)
    if "raises" in row["expected"]:
        with pytest.raises(ValueError) as error:
            models.load(str(tmp_path / "model"))
        assert all(word in str(error.value) for word in row["expected"]["message_names"])
    else:
        cfg, params = models.load(str(tmp_path / "model"))
        assert decoder.head_weight(cfg, params) is params["embed"]


def test_a_copy_of_the_tied_head_and_rope_buffers_are_harmless(tmp_path):
    tensors = copy("llama_tied", tmp_path / "model")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    rewrite(tmp_path / "model", tensors)
    assert_equal(models.load(str(tmp_path / "model"))[1], loaded("llama_tied")[1])
    tensors["lm_head.weight"][3, 5] += 1
    rewrite(tmp_path / "model", tensors)
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        models.load(str(tmp_path / "model"))


@pytest.mark.parametrize("prefix", names.TEXT_PREFIXES)
def test_multimodal_prefixes(prefix, tmp_path):
    tensors = copy("llama_rope3", tmp_path / "model")
    renamed = {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
    renamed["vision_tower.x"] = np.zeros(2, np.float32)
    rewrite(tmp_path / "model", renamed)
    with pytest.warns(UserWarning, match="1 tensors are not the language model's.*vision_tower.x"):
        _, params = models.load(str(tmp_path / "model"))
    assert_equal(params, loaded("llama_rope3")[1])


def test_case_names_of_tensors():
    row = LOADING.get("LOD-007")
    if row is None:
        pytest.skip("model_loading.jsonl is missing")
    plain, rest = names.text_names(row["input"]["keys"])
    assert plain == {"model.layers.0.input_layernorm.weight": row["input"]["keys"][0]}
    assert rest == [row["input"]["keys"][1]]


def test_a_plain_checkpoint_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.load(str(shared("golden", "models", "qwen3_sharded")))


@pytest.mark.parametrize("break_it, named", [
    (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors", "config.json"]),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{broken"), ["model.safetensors"]),
    (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
    (lambda folder: (folder / "config.json").write_text("[]"), ["config.json", "list"]),
    (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    (lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})), ["gone.safetensors"]),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), ["weight_map"]),
], ids=["no weights", "broken weights", "broken config", "config is a list", "no config", "no shard", "no map"])
def test_broken_folders_are_named(break_it, named, tmp_path):
    copy("llama_tied", tmp_path / "model")
    break_it(tmp_path / "model")
    with pytest.raises(ValueError) as error:
        models.load(str(tmp_path / "model"))
    assert all(word in str(error.value) for word in named), str(error.value)


def test_end_tokens_of_both_files(tmp_path):
    copy("llama_tied", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    assert models.load_config(str(tmp_path / "model")).eos_token_ids == (0, 2, 7)


def test_loaded_shards_run():
    """The sharded parameters compute what the plain ones do."""
    mesh = sharding.make_mesh(fsdp=2, tensor=4)
    cfg, _ = loaded("qwen3")
    layout = sharding.tree_shardings(decoder.specs(cfg), sharding.TRAIN_RULES, mesh)
    _, params = models.load(str(shared("golden", "models", "qwen3")), shardings=layout)
    data = golden("qwen3")
    np.testing.assert_allclose(run(cfg, params, data["input_ids"]), data["logits"], atol=2e-4, rtol=0)
