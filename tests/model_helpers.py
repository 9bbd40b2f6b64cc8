"""Golden models and one compiled program for each, shared by the tests of models, loading and saving."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import numpy as np
from shared_data import shared

from rljax import models

NAMES = ("gemma2", "gemma3_text", "llama_rope3", "llama_tied", "mistral", "olmo2", "phi3", "qwen2", "qwen2_tied",
         "qwen3", "qwen3_moe", "qwen3_sharded", "smollm3")
ROWS, LENGTH = 3, 29  # every golden input fits, so one program per model serves all tests


@functools.cache
def loaded(name: str) -> tuple[models.ModelConfig, dict[str, Any]]:
    return models.load(str(shared("golden", "models", name)))


def golden(name: str, file: str = "goldens.npz") -> dict[str, np.ndarray]:
    return dict(np.load(shared("golden", "models", name, file)))


def raw_config(name: str) -> dict[str, Any]:
    return json.loads(shared("golden", "models", name, "config.json").read_text())


@functools.partial(jax.jit, static_argnums=0)
def program(cfg: models.ModelConfig, params: Any, tokens: Any, positions: Any, segments: Any) -> jax.Array:
    return models.logits(cfg, params, models.forward(cfg, params, tokens, positions, segments))


def run(cfg: models.ModelConfig, params: Any, tokens: np.ndarray, segments: np.ndarray | None = None,
        positions: np.ndarray | None = None) -> np.ndarray:
    """Logits [rows, length, V] of tokens padded to the one shape; segments default to 1, positions to 0, 1, ..."""
    rows, length = tokens.shape
    segments = np.ones_like(tokens) if segments is None else segments
    positions = np.broadcast_to(np.arange(length), tokens.shape) if positions is None else positions

    def pad(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, ROWS - rows), (0, LENGTH - length))).astype(np.int32)

    return np.asarray(program(cfg, params, pad(tokens), pad(positions), pad(segments)))[:rows, :length]
