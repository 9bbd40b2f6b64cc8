"""Models: one decoder described by `ModelConfig`, read from Hugging Face folders and GGUF files.

To add a family: a reader and a row in `families.FAMILIES`; new tensor names go to `names.py`.
"""

from __future__ import annotations

import pathlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from rljax import hub
from rljax.models import hf
from rljax.models.config import ModelConfig, Rope
from rljax.models.decoder import forward, init, logits, specs
from rljax.models.hf_save import save

__all__ = ["ModelConfig", "Rope", "forward", "init", "load", "load_config", "logits", "save", "specs"]


def load_config(path: str) -> ModelConfig:
    """`ModelConfig` of a Hugging Face folder, a GGUF file, a hub id or a built-in name, without the weights."""
    local = hub.resolve(str(path))
    return _reader(local).load_config(local)


def load(path: str, *, dtype: Any = jnp.float32, shardings: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, parameters) of a Hugging Face folder, a GGUF file, a hub id or a built-in name.

    Weights in bf16, f16 or f32 are cast to `dtype`. shardings: None (the default device), a tree of
    `jax.sharding.Sharding` like the parameters, or a function from the config to such a tree; every device then
    reads only its own part. Raises ValueError naming each missing, extra or wrong-shaped tensor.
    """
    local = hub.resolve(str(path))
    return _reader(local).load(local, dtype, shardings)


def _reader(path: pathlib.Path) -> ModuleType:
    if path.suffix != ".gguf":
        return hf
    from rljax.models import gguf  # not at the top: `python -m rljax.models.gguf` would find itself imported already

    return gguf
