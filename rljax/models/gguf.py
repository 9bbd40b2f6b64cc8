"""GGUF files in: config and weights as from a Hugging Face folder, and `python -m rljax.models.gguf FILE FOLDER`.

A reader turns the metadata into the config.json that the family's Hugging Face model would have, and shows every
tensor under its Hugging Face name with rows in that order, so that everything after it is shared with `hf.py`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

from rljax.models import gguf_tokenizer, hf
from rljax.models.config import ModelConfig, Rope
from rljax.models.families import from_hf
from rljax.models.hf_save import save

TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
       "output.weight": "lm_head.weight"}
BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
# Keys after the architecture's prefix, and the config.json key they become; None = checked or read by name below.
# Any other key is refused.
SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.value_length": None, "rope.dimension_count": None, "vocab_size": None, "rope.scaling.type": None,
    "rope.scaling.factor": None, "rope.scaling.original_context_length": None, "rope.scaling.finetuned": None,
}
REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.layer_norm_rms_epsilon")
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}  # are the rows of q and k interleaved?
LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2: the file keeps only the frequencies that follow


class Rows:
    """One tensor of the file as `hf.Tensor`: rows are dequantised when they are read, in Hugging Face's order."""

    def __init__(self, tensor: Any, heads: int = 0):
        """heads > 0: within each head, file row 2j + r is Hugging Face row j + r * (head size / 2)."""
        self.tensor = tensor
        self.shape = [int(size) for size in tensor.shape[::-1]]  # a GGUF shape lists the fastest dimension first
        self.order = None if heads == 0 else np.arange(self.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def get_shape(self) -> list[int]:
        """Sizes, rows first."""
        return self.shape

    def get_dtype(self) -> str:
        """What `__getitem__` gives."""
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        data = self.tensor.data[rows if self.order is None else self.order[rows]]
        values = _package().quants.dequantize(data, self.tensor.tensor_type)
        return values[(slice(None), *rest)]


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("reading a GGUF file needs the package gguf: pip install 'rljax[gguf]'") from error
    return gguf


def _open(path: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """(reader, metadata); ValueError naming a file that is no GGUF."""
    try:
        reader = _package().GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"cannot read {path} as a GGUF file: {error}") from error
    return reader, {name: field.contents() for name, field in reader.fields.items()}


def hf_raw(metadata: dict[str, Any], shapes: dict[str, list[int]], freqs: np.ndarray | None = None) -> dict[str, Any]:
    """The config.json that belongs to a GGUF file's metadata and tensor shapes (rows first).

    freqs: the tensor rope_freqs.weight, by which frequencies are divided. Raises ValueError naming an unsupported
    architecture, key or scaling.
    """
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported; there are {', '.join(ARCHITECTURES)}")
    given = {name.removeprefix(f"{arch}."): value for name, value in metadata.items() if name.startswith(f"{arch}.")}
    unknown = sorted(name for name, value in given.items() if name not in SIZES and value not in (0, None))
    missing = [name for name in REQUIRED if name not in given]
    if unknown or missing:
        raise ValueError(f"GGUF metadata of {arch}: unsupported keys {unknown}, missing keys {missing}")
    raw = {key: _plain(given[name]) for name, key in SIZES.items() if key is not None and name in given}
    head_dim = raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    for name in ("rope.dimension_count", "attention.value_length"):
        if given.get(name, head_dim) != head_dim:
            raise ValueError(f"GGUF metadata: {arch}.{name} = {given[name]} differs from the head size {head_dim}")
    raw["model_type"] = arch
    raw["vocab_size"] = shapes.get("token_embd.weight", [given.get("vocab_size", 0)])[0]
    raw["tie_word_embeddings"] = "output.weight" not in shapes
    raw |= _rope(arch, given, raw, freqs) | _special_ids(metadata)
    if arch != "qwen2":
        raw["attention_bias"] = "blk.0.attn_q.bias" in shapes
    return raw


def _plain(value: Any) -> Any:
    """A number as JSON holds it: float32 values by their shortest decimal, 1e-05 and not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(arch: str, given: dict[str, Any], raw: dict[str, Any], freqs: np.ndarray | None) -> dict[str, Any]:
    theta = raw.pop("rope_theta", 10000.0)
    entry = {"rope_type": "default", "rope_theta": theta}
    kind = given.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        entry |= {"rope_type": kind, "factor": _plain(given.get("rope.scaling.factor"))}
        if kind == "yarn" and "rope.scaling.original_context_length" in given:
            entry["original_max_position_embeddings"] = given["rope.scaling.original_context_length"]
    elif kind != "none":
        raise ValueError(f"GGUF metadata: {arch}.rope.scaling.type = {kind!r} is not supported")
    if freqs is not None:
        entry |= _llama3(theta, raw["head_dim"], freqs)
    return {"rope_parameters": entry}


def _llama3(theta: float, dim: int, freqs: np.ndarray) -> dict[str, Any]:
    """The llama3 scaling whose frequencies the file's tensor holds."""
    plain = Rope(theta=theta, dim=dim).inv_freq()
    for factor in LLAMA3_FACTORS:
        scaled = Rope(theta=theta, dim=dim, kind="llama3", factor=factor, original_max_position=8192).inv_freq()
        if freqs.shape == scaled.shape and np.allclose(plain / scaled, freqs, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192}
    raise ValueError("GGUF tensor rope_freqs.weight is not a llama3 scaling by "
                     f"{' or '.join(map(str, LLAMA3_FACTORS))}: load the Hugging Face folder instead")


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    ids = {key: metadata[f"tokenizer.ggml.{name}_token_id"]
           for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id"))
           if f"tokenizer.ggml.{name}_token_id" in metadata}
    ends = [metadata[name] for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if name in metadata]
    return ids | {"eos_token_id": sorted(set(ends)) or None}


def read(path: pathlib.Path) -> tuple[dict[str, Any], ModelConfig, dict[str, Rows]]:
    """(metadata, config, tensors by Hugging Face name) of a GGUF file, no tensor read yet."""
    reader, metadata = _open(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    freqs = found.pop("rope_freqs.weight", None)
    try:
        shapes = {name: [int(size) for size in tensor.shape[::-1]] for name, tensor in found.items()}
        raw = hf_raw(metadata, shapes, None if freqs is None else np.asarray(freqs.data, np.float32))
        cfg = from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    heads = {"attn_q": cfg.num_heads, "attn_k": cfg.num_kv_heads} if ARCHITECTURES[cfg.model_type] else {}
    return metadata, cfg, {hf_name(name): Rows(tensor, heads.get(_block(name), 0)) for name, tensor in found.items()}


def _block(name: str) -> str:
    """attn_q of blk.3.attn_q.weight; the name itself outside the blocks."""
    return name.split(".")[2] if name.startswith("blk.") and name.count(".") == 3 else name


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name without one stays as it is, and loading then names it."""
    if name in TOP:
        return TOP[name]
    if _block(name) not in BLOCK:
        return name
    _, layer, block, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK[block]}.{kind}"


def load_config(path: pathlib.Path) -> ModelConfig:
    """`ModelConfig` of a GGUF file."""
    return read(path)[1]


def load(path: pathlib.Path, dtype: Any = jnp.float32, shardings: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and dequantised parameters of a GGUF file; see `rljax.models.load`."""
    _, cfg, tensors = read(path)
    return cfg, hf.assemble(cfg, tensors, dtype, shardings, str(path))


def convert(path: pathlib.Path, folder: str, dtype: str = "float32") -> None:
    """Write a GGUF file as a Hugging Face folder with its tokenizer and chat template."""
    metadata, cfg, tensors = read(path)
    params = hf.assemble(cfg, tensors, jnp.float32, None, str(path))
    with tempfile.TemporaryDirectory() as temporary:
        gguf_tokenizer.write(metadata, pathlib.Path(temporary))
        save(folder, cfg, params, dtype=dtype, tokenizer_from=temporary)


def main(arguments: list[str]) -> None:
    """`python -m rljax.models.gguf FILE FOLDER [--dtype bfloat16]`."""
    parser = argparse.ArgumentParser(prog="python -m rljax.models.gguf", description=main.__doc__)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    options = parser.parse_args(arguments)
    convert(options.file, options.folder, options.dtype)
    print(f"{options.file} -> {options.folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
