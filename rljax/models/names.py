"""Which Hugging Face tensor each parameter leaf comes from: read by loading, saving and the GGUF reader."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from rljax.models.config import ModelConfig
from rljax.models.decoder import Spec, specs

TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
LAYER = "model.layers.{layer}."
NORMS = {
    "pre": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {"attn_norm": "input_layernorm", "attn_post_norm": "post_attention_layernorm",
             "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one matrix or vector of a leaf lies in the file."""

    name: str  # with {layer} and {expert} still open
    transpose: bool = False  # the file has [out, in]
    first_row: int = 0  # in the file's tensor: fused projections are parts of one


@dataclasses.dataclass(frozen=True)
class Piece:
    """One file tensor's part in one leaf."""

    leaf: tuple[str, ...]  # path in the parameter tree
    index: tuple[int, ...]  # layer, or layer and expert; () for a leaf outside the layers
    shape: tuple[int, ...]  # of the part, as it lies in the file
    source: Source


def leaves(cfg: ModelConfig) -> dict[tuple[str, ...], Spec]:
    """`specs` by path."""
    flat: dict[tuple[str, ...], Spec] = {}
    for name, value in specs(cfg).items():
        if isinstance(value, Spec):
            flat[name,] = value
        else:
            flat |= {(name, inner): spec for inner, spec in value.items()}
    return flat


def source(cfg: ModelConfig, leaf: tuple[str, ...]) -> Source:
    """The file tensor(s) of one leaf."""
    outside = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    name = leaf[-1]
    if len(leaf) == 1:
        return Source(outside[name])
    if name in NORMS[cfg.norms]:
        return Source(f"{LAYER}{NORMS[cfg.norms][name]}.weight")
    kind, _, part = name.partition("_")
    block = "self_attn" if kind in "qkvo" else "mlp"
    if part == "norm":
        return Source(f"{LAYER}self_attn.{name}.weight")
    if name == "router":
        return Source(f"{LAYER}mlp.gate.weight", transpose=True)
    if part == "bias":
        return Source(f"{LAYER}{block}.{kind}_proj.bias")
    if cfg.model_type == "phi3" and kind not in ("o", "down"):
        return _fused(cfg, kind)
    if cfg.num_experts and block == "mlp":
        block = "mlp.experts.{expert}"
    return Source(f"{LAYER}{block}.{name}.weight", transpose=True)


def _fused(cfg: ModelConfig, kind: str) -> Source:
    """phi3: q, then k, then v rows in one tensor; gate, then up rows in another."""
    queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    first = {"q": 0, "k": queries, "v": queries + keys, "gate": 0, "up": cfg.intermediate_size}[kind]
    name = "self_attn.qkv_proj" if kind in "qkv" else "mlp.gate_up_proj"
    return Source(f"{LAYER}{name}.weight", transpose=True, first_row=first)


def pieces(cfg: ModelConfig) -> dict[str, list[Piece]]:
    """Every tensor of the file, layer by layer, with the leaf parts it consists of, in row order."""
    table: dict[str, list[Piece]] = {}
    flat = leaves(cfg)
    for layer in range(-1, cfg.num_layers):  # -1: what stands outside the layers
        for path, spec in flat.items():
            if (len(path) == 1) != (layer == -1):
                continue
            for index in _indices(spec, layer):
                where = source(cfg, path)
                shape = spec.shape[len(index):]
                name = where.name.format(**dict(zip(("layer", "expert"), index, strict=False)))
                part = Piece(path, index, shape[::-1] if where.transpose else shape, where)
                table.setdefault(name, []).append(part)
    return {name: sorted(parts, key=lambda part: part.source.first_row) for name, parts in table.items()}


def _indices(spec: Spec, layer: int) -> Iterator[tuple[int, ...]]:
    if layer == -1:
        return iter([()])
    experts = range(spec.shape[1]) if "experts" in spec.axes else None
    return iter([(layer,)]) if experts is None else itertools.product([layer], experts)


def tensor_shape(parts: list[Piece]) -> tuple[int, ...]:
    """Shape of a file tensor from its parts, which lie one after another along the rows."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def text_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """({plain name: name in the file}, the rest) of a checkpoint's tensor names.

    In a multimodal checkpoint the language model's prefix is taken off, and what belongs to other parts is the
    rest; in a plain one every name is its own.
    """
    names = list(names)
    prefix = next((one for one in TEXT_PREFIXES if any(name.startswith(one) for name in names)), None)
    if prefix is None:
        return {name: name for name in names}, []
    plain = {f"model.{name.removeprefix(prefix)}": name for name in names if name.startswith(prefix)}
    head = next((name for name in names if name in ("lm_head.weight", "language_model.lm_head.weight")), None)
    if head is not None:
        plain["lm_head.weight"] = head
    return plain, sorted(set(names) - set(plain.values()))


def unflatten(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """The nested parameter tree from values by path."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def lookup(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    """The value of a nested tree at a path."""
    for name in path:
        tree = tree[name]
    return tree
