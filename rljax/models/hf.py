"""Hugging Face folders in: config.json and safetensors, each device reading only its own part. Out: `hf_save.py`."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from rljax.models import names
from rljax.models.config import ModelConfig
from rljax.models.families import from_hf

HARMLESS = "rotary_emb.inv_freq"  # a buffer that old versions saved; made from the config here
COMPARE_ROWS = 4096
DTYPES = ("BF16", "F16", "F32", "F64")  # others hold no weights as they stand: integers and float8 are quantised


class Tensor(Protocol):
    """A tensor in a file: shape known, values read by slices."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> np.ndarray: ...


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; ValueError naming the file where it is missing, broken or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def load_config(folder: pathlib.Path) -> ModelConfig:
    """`ModelConfig` of a folder, with the end tokens of generation_config.json too."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder with a Hugging Face model")
    extra = folder / "generation_config.json"
    eos = read_json(extra).get("eos_token_id") if extra.exists() else None
    try:
        return from_hf(read_json(folder / "config.json"), eos)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def open_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files by name, none of them read yet."""
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        tensors |= {name: file.get_slice(name) for name in file.keys()}
    return tensors


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise ValueError(f"{index} names {len(files)} files, of which {', '.join(absent)} are missing")
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(file.name for file in folder.iterdir())
    raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json; found {', '.join(found)}")


def load(folder: pathlib.Path, dtype: Any = jnp.float32, shardings: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Config and parameters of a folder; see `rljax.models.load`."""
    cfg = load_config(folder)
    return cfg, assemble(cfg, open_tensors(folder), dtype, shardings, str(folder))


def assemble(cfg: ModelConfig, tensors: Mapping[str, Tensor], dtype: Any, shardings: Any, where: str) -> dict[str, Any]:
    """The parameter tree from named file tensors, each shard made from the slices it needs.

    shardings: None (default device), a tree of shardings like the parameters, or a function of the config that
    makes one. Raises one ValueError with every missing, extra and wrong-shaped tensor.
    """
    plain, rest = names.text_names(tensors)
    if rest:
        warnings.warn(f"{where}: {len(rest)} tensors are not the language model's and were left out "
                      f"({rest[0]}{', ...' if len(rest) > 1 else ''})", stacklevel=3)
    found = {name: tensors[file_name] for name, file_name in plain.items()}
    _check(cfg, found, where)
    shardings = shardings(cfg) if callable(shardings) else shardings
    flat = {}
    for path, spec in names.leaves(cfg).items():
        read = _reader(cfg, path, spec.shape, found, np.dtype(dtype))
        if shardings is None:
            flat[path] = jnp.asarray(read((slice(None),) * len(spec.shape)))
        else:
            flat[path] = jax.make_array_from_callback(spec.shape, names.lookup(shardings, path), read)
    return names.unflatten(flat)


def _check(cfg: ModelConfig, found: Mapping[str, Tensor], where: str) -> None:
    """Every expected tensor there with its shape, and nothing else but known harmless extras."""
    expected = {name: names.tensor_shape(parts) for name, parts in names.pieces(cfg).items()}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    for name, tensor in found.items():
        shape = tuple(tensor.get_shape())
        if name in expected:
            if shape != expected[name]:
                problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
            if (dtype := tensor.get_dtype()) not in DTYPES:
                problems.append(f"{name} holds {dtype}, which is none of {', '.join(DTYPES)}")
        elif name == "lm_head.weight" and cfg.tied:
            if not _equal(tensor, found.get("model.embed_tokens.weight")):
                problems.append("lm_head.weight differs from the embedding, though tie_word_embeddings is true")
        elif not name.endswith(HARMLESS):
            problems.append(f"unexpected {name} {list(shape)}")
    if problems:
        raise ValueError(f"{where}: {len(problems)} tensors do not fit the config: " + "; ".join(problems))


def _equal(one: Tensor, other: Tensor | None) -> bool:
    """Equal values, compared a few rows at a time."""
    if other is None or one.get_shape() != other.get_shape():
        return False
    rows = one.get_shape()[0]
    parts = [slice(start, min(start + COMPARE_ROWS, rows)) for start in range(0, rows, COMPARE_ROWS)]
    return all(np.array_equal(one[part], other[part]) for part in parts)


def _reader(cfg: ModelConfig, path: tuple[str, ...], shape: tuple[int, ...], found: Mapping[str, Tensor],
            dtype: np.dtype) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """A function from an index into the leaf to its values: what `jax.make_array_from_callback` wants."""
    source = names.source(cfg, path)
    stacked = source.name.count("{")  # 0, or layer, or layer and expert

    def matrix(name: str, index: list[slice]) -> np.ndarray:
        order = index[::-1] if source.transpose else index
        rows = slice(order[0].start + source.first_row, order[0].stop + source.first_row)
        values = found[name][(rows, *order[1:])]
        return values.T if source.transpose else values

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]
        out = np.empty([part.stop - part.start for part in bounds], dtype)
        for offset in np.ndindex(*out.shape[:stacked]):
            at = [part.start + step for part, step in zip(bounds, offset, strict=False)]
            name = source.name.format(**dict(zip(("layer", "expert"), at, strict=False)))
            out[offset] = matrix(name, bounds[stacked:])
        return out

    return read
