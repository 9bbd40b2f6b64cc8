"""Hugging Face folders out: config.json and safetensors that transformers loads, written beside and then renamed."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from rljax import sharding
from rljax.models import names
from rljax.models.config import ModelConfig
from rljax.models.families import ARCHITECTURES, from_hf

SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
NOT_TOKENIZER = ("config.json", "model.safetensors.index.json")


def save(path: str, config: ModelConfig, params: dict[str, Any], *, dtype: str = "float32",
         tokenizer_from: str | None = None) -> None:
    """Write a Hugging Face folder that transformers and `load` read back.

    dtype: float32, bfloat16 or float16. params may lie sharded over devices and processes: they are fetched one
    tensor at a time, and only process 0 writes (every process must call). tokenizer_from: a folder whose tokenizer
    and generation files are copied. A crash or a full disk leaves an older folder at `path` as it was. Raises
    ValueError for an unknown dtype, a config that is not what its config.json says, a value that float16 cannot
    hold, or an existing `path` that is not a model folder.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    raw = hf_config(config, dtype)
    final = pathlib.Path(path).expanduser().resolve()
    writes = jax.process_index() == 0
    if final.exists() and not (final / "config.json").exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ValueError(f"{final} exists and is not a model folder: it is not replaced")
    temporary = final.with_name(f".{final.name}.saving")
    try:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write_json(temporary / "config.json", raw)
            _write_json(temporary / "generation_config.json", _generation_config(config, raw))
            if tokenizer_from is not None:
                _copy_tokenizer(pathlib.Path(tokenizer_from), temporary)
        _write_weights(temporary, config, params, dtype, writes)
        if writes:
            replace(temporary, final)
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)


def hf_config(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The content of config.json; ValueError where `config` has left the one it was read from."""
    raw = json.loads(config.hf_json or "{}")
    if not raw or from_hf(raw) != config:
        raise ValueError("the model config differs from the config.json it carries (hf_json): change that and read it "
                         "with families.from_hf")
    raw.pop("torch_dtype", None)
    return {"architectures": [ARCHITECTURES[config.model_type]]} | raw | {"dtype": dtype}


def _generation_config(config: ModelConfig, raw: dict[str, Any]) -> dict[str, Any]:
    values = {key: raw[key] for key in ("bos_token_id", "pad_token_id") if raw.get(key) is not None}
    return values | ({"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {})


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_tokenizer(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Tokenizer, chat template and generation files: all small text files but the model's own."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix in TOKENIZER_SUFFIXES and file.name not in NOT_TOKENIZER:
            shutil.copyfile(file, target / file.name)


def _write_weights(folder: pathlib.Path, config: ModelConfig, params: dict[str, Any], dtype: str, writes: bool) -> None:
    """One file, or several of at most SHARD_BYTES with an index."""
    table = names.pieces(config)
    shards: list[list[str]] = [[]]
    total = room = 0
    for name, parts in table.items():
        size = int(np.prod(names.tensor_shape(parts))) * DTYPES[dtype].itemsize
        if shards[-1] and room + size > SHARD_BYTES:
            shards.append([])
            room = 0
        shards[-1].append(name)
        room, total = room + size, total + size
    weight_map = {}
    for number, members in enumerate(shards, 1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = {name: _tensor(params, table[name], name, dtype) for name in members}
        if writes:
            safetensors.numpy.save_file(values, folder / file, metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", folder / file)  # safetensors leaves it readable by its owner only
        weight_map |= dict.fromkeys(members, file)
    if writes and len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _tensor(params: dict[str, Any], parts: list[names.Piece], name: str, dtype: str) -> np.ndarray:
    """One file tensor on the host, from its parts."""
    values = []
    for part in parts:
        value = names.lookup(params, part.leaf)
        for at in part.index:
            value = _take(value, at) if isinstance(value, jax.Array) else value[at]
        value = np.asarray(sharding.to_host(value))
        values.append(value.T if part.source.transpose else value)
    whole = np.concatenate(values) if len(values) > 1 else values[0]
    if whole.shape != (expected := names.tensor_shape(parts)):
        raise ValueError(f"{name}: the parameters give shape {whole.shape}, the config {expected}")
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(whole.astype(DTYPES[dtype]))
    except FloatingPointError as error:
        raise ValueError(f"{name} has values beyond the range of {dtype}") from error


@jax.jit
def _take(stacked: jax.Array, index: int) -> jax.Array:
    """Row `index`, with the index as an argument so that one program serves all layers."""
    return jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False)


def replace(new: pathlib.Path, final: pathlib.Path) -> None:
    """Put folder `new` at `final` in one step; what was there before ends up under the name `new`.

    Linux exchanges the two names atomically. Where that call is missing, the old folder is renamed first and put
    back if the second renaming fails.
    """
    if not final.exists():
        os.rename(new, final)
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
    if exchange is not None and exchange(at_cwd, os.fsencode(new), at_cwd, os.fsencode(final), swap) == 0:
        return
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(final, old)
    try:
        os.rename(new, final)
    except OSError:
        os.rename(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)
