"""The decoder: pure functions over a nested dict of parameters. The dimension legend stands in `sample.py`.

`layer` is the whole model. The caller owns the loop over layers (a scan here, unrolled with a cache in the
sampler) and attention itself, so training and decoding share every other operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax import ops, sharding
from rljax.models import moe
from rljax.models.config import ModelConfig

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]
Product = Callable[[jax.Array, jax.Array], jax.Array]

REMAT = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
ROWS = ("batch", None, None)  # logical axes of activations [R, T, D]
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Spec(NamedTuple):
    """One parameter leaf: everything about it derives from here."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension
    init: str  # normal, zeros, ones


class LayerKind(NamedTuple):
    """How one layer differs from its neighbours, for the tokens at hand."""

    window: Any  # int or traced int32 scalar: keys seen, own included; 0 = all
    cos: jax.Array  # [..., h/2] float32
    sin: jax.Array  # [..., h/2] float32


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """The parameter tree as `Spec` leaves. Matrices are [in, out]; layer leaves are stacked [L, ...]."""
    depth = cfg.num_layers
    stacked = {
        name: Spec((depth, *spec.shape), ("layers", *spec.axes), spec.init)
        for name, spec in (_norm_specs(cfg) | _attention_specs(cfg) | _mlp_specs(cfg)).items()
    }
    tree = {
        "embed": Spec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), "normal"),
        "layers": stacked,
        "final_norm": Spec((cfg.hidden_size,), (None,), _norm_init(cfg)),
    }
    if not cfg.tied:
        tree["lm_head"] = Spec((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), "normal")
    return tree


def _norm_init(cfg: ModelConfig) -> str:
    return "zeros" if cfg.unit_offset_norm else "ones"


def _norm_specs(cfg: ModelConfig) -> dict[str, Spec]:
    names = []
    if cfg.norms in ("pre", "both"):
        names += ["attn_norm", "mlp_norm"]
    if cfg.norms in ("post", "both"):
        names += ["attn_post_norm", "mlp_post_norm"]
    return {name: Spec((cfg.hidden_size,), (None,), _norm_init(cfg)) for name in names}


def _attention_specs(cfg: ModelConfig) -> dict[str, Spec]:
    width, queries, keys = cfg.hidden_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    tree = {
        "q_proj": Spec((width, queries), ("embed", "heads"), "normal"),
        "k_proj": Spec((width, keys), ("embed", "kv_heads"), "normal"),
        "v_proj": Spec((width, keys), ("embed", "kv_heads"), "normal"),
        "o_proj": Spec((queries, width), ("heads", "embed"), "normal"),
    }
    if cfg.qkv_bias:
        tree["q_bias"] = Spec((queries,), ("heads",), "zeros")
        tree["k_bias"] = Spec((keys,), ("kv_heads",), "zeros")
        tree["v_bias"] = Spec((keys,), ("kv_heads",), "zeros")
    if cfg.o_bias:
        tree["o_bias"] = Spec((width,), (None,), "zeros")
    if cfg.qk_norm != "none":
        full = cfg.qk_norm == "full"
        tree["q_norm"] = Spec((queries if full else cfg.head_dim,), ("heads" if full else None,), _norm_init(cfg))
        tree["k_norm"] = Spec((keys if full else cfg.head_dim,), ("kv_heads" if full else None,), _norm_init(cfg))
    return tree


def _mlp_specs(cfg: ModelConfig) -> dict[str, Spec]:
    width = cfg.hidden_size
    if cfg.num_experts:
        experts, inner = cfg.num_experts, cfg.expert_intermediate_size
        return {
            "router": Spec((width, experts), ("embed", None), "normal"),
            "gate_proj": Spec((experts, width, inner), ("experts", "embed", "mlp"), "normal"),
            "up_proj": Spec((experts, width, inner), ("experts", "embed", "mlp"), "normal"),
            "down_proj": Spec((experts, inner, width), ("experts", "mlp", "embed"), "normal"),
        }
    inner = cfg.intermediate_size
    tree = {
        "gate_proj": Spec((width, inner), ("embed", "mlp"), "normal"),
        "up_proj": Spec((width, inner), ("embed", "mlp"), "normal"),
        "down_proj": Spec((inner, width), ("mlp", "embed"), "normal"),
    }
    if cfg.mlp_bias:
        tree["gate_bias"] = Spec((inner,), ("mlp",), "zeros")
        tree["up_bias"] = Spec((inner,), ("mlp",), "zeros")
        tree["down_bias"] = Spec((width,), (None,), "zeros")
    return tree


def init(cfg: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: matrices normal with std `initializer_range`, norms neutral, biases 0."""
    flat, tree = jax.tree.flatten(specs(cfg), is_leaf=lambda leaf: isinstance(leaf, Spec))
    leaves = []
    for index, spec in enumerate(flat):
        if spec.init == "normal":
            drawn = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32)
            leaves.append((drawn * cfg.initializer_range).astype(dtype))
        else:
            leaves.append(jnp.full(spec.shape, float(spec.init == "ones"), dtype))
    return jax.tree.unflatten(tree, leaves)


def embed(cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Token embeddings [..., D] in `dtype`; a scale (Gemma) is first rounded to `dtype`, as the original does."""
    x = params["embed"][tokens].astype(dtype)
    return x if cfg.embed_scale == 1.0 else x * jnp.asarray(cfg.embed_scale, dtype)


def rms_norm(cfg: ModelConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * w, or * (1 + w) where the family stores offsets; statistics in float32."""
    wide = x.astype(jnp.float32)
    scale = weight.astype(jnp.float32) + (1.0 if cfg.unit_offset_norm else 0.0)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + cfg.norm_eps)
    return (wide * scale).astype(x.dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn x [..., heads, h] by cos, sin [..., h/2] in float32: dimension i together with i + h/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_tables(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each [n_tables, ..., h/2] float32, for positions [...]; the last is the identity if a layer has
    no RoPE."""
    angles = [positions.astype(jnp.float32)[..., None] * rope.inv_freq() for rope in cfg.ropes]
    cos = [jnp.cos(angle) * rope.attention_factor for angle, rope in zip(angles, cfg.ropes, strict=True)]
    sin = [jnp.sin(angle) * rope.attention_factor for angle, rope in zip(angles, cfg.ropes, strict=True)]
    if -1 in cfg.rope_ids:
        shape = (*positions.shape, cfg.head_dim // 2)
        cos, sin = [*cos, jnp.ones(shape, jnp.float32)], [*sin, jnp.zeros(shape, jnp.float32)]
    return jnp.stack(cos), jnp.stack(sin)


def layer_tables(cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """(windows, table_ids), each [L] int32: what a scan over layers carries beside the parameters."""
    ids = [len(cfg.ropes) if index == -1 else index for index in cfg.rope_ids]
    return np.asarray(cfg.windows, np.int32), np.asarray(ids, np.int32)


def matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [N, in] times a matrix [in, out] of any dtype: [N, out] in x's."""
    return x @ matrix.astype(x.dtype)


def layer(cfg: ModelConfig, kind: LayerKind, params: Params, x: jax.Array, attend: Attend,
          product: Product = matmul) -> jax.Array:
    """One decoder layer over x [..., D], with one layer's leaves.

    attend(q [..., H, h], k [..., K, h], v [..., K, h], window) -> [..., H, h] belongs to the caller: it holds the
    cache and masks, and applies `attention_scale` and `attention_softcap`. q and k have had norms and RoPE.
    product(x [N, in], matrix) -> [N, out] in x's dtype is for a caller whose matrices are not [in, out].
    """
    h = rms_norm(cfg, x, params["attn_norm"]) if "attn_norm" in params else x
    h = _attention(cfg, kind, params, h, attend, product)
    x = x + (rms_norm(cfg, h, params["attn_post_norm"]) if "attn_post_norm" in params else h)
    h = rms_norm(cfg, x, params["mlp_norm"]) if "mlp_norm" in params else x
    h = _mlp(cfg, params, h, product)
    return x + (rms_norm(cfg, h, params["mlp_post_norm"]) if "mlp_post_norm" in params else h)


def scale_name(matrix: str) -> str:
    """The leaf [out] float32 beside an int8 matrix `..._proj` that makes it whole: matrix * scale."""
    return matrix.removesuffix("_proj") + "_scale"


def _linear(x: jax.Array, params: Params, name: str, product: Product) -> jax.Array:
    """x @ w, plus the bias if there is one, in x's dtype."""
    # Over one flat dimension of tokens: on a CPU the gradient of w takes half the time.
    y = product(x.reshape(-1, x.shape[-1]), params[f"{name}_proj"])
    if f"{name}_scale" in params:
        y = y * params[f"{name}_scale"].astype(y.dtype)
    y = y.reshape(*x.shape[:-1], -1)
    return y + params[f"{name}_bias"].astype(x.dtype) if f"{name}_bias" in params else y


def _attention(cfg: ModelConfig, kind: LayerKind, params: Params, x: jax.Array, attend: Attend, product: Product
               ) -> jax.Array:
    q, k, v = (_linear(x, params, name, product) for name in "qkv")
    if cfg.qk_norm == "full":
        q, k = rms_norm(cfg, q, params["q_norm"]), rms_norm(cfg, k, params["k_norm"])
    q = q.reshape(*x.shape[:-1], cfg.num_heads, cfg.head_dim)
    k = k.reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim)
    v = v.reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim)
    if cfg.qk_norm == "head":
        q, k = rms_norm(cfg, q, params["q_norm"]), rms_norm(cfg, k, params["k_norm"])
    q, k = apply_rope(q, kind.cos, kind.sin), apply_rope(k, kind.cos, kind.sin)
    out = attend(q, k, v, kind.window)
    return _linear(out.reshape(*x.shape[:-1], cfg.num_heads * cfg.head_dim), params, "o", product)


def _mlp(cfg: ModelConfig, params: Params, x: jax.Array, product: Product) -> jax.Array:
    activation = ACTIVATIONS[cfg.activation]
    if cfg.num_experts:
        return moe.mlp(params, x, activation, cfg.experts_per_token, cfg.norm_topk_prob)
    gate, up = (_linear(x, params, name, product) for name in ("gate", "up"))
    return _linear(activation(gate) * up, params, "down", product)


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """The norm between the last layer and the head, [..., D]."""
    return rms_norm(cfg, x, params["final_norm"])


def head_weight(cfg: ModelConfig, params: Params) -> jax.Array:
    """[V, D]: the embedding itself (one array, one gradient) where it is tied."""
    return params["embed"] if cfg.tied else params["lm_head"]


def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: Any = None,
    remat: str = "none",
) -> jax.Array:
    """Hidden states after the final norm, [R, T, D] in `dtype`, of packed rows.

    tokens, positions, segment_ids: [R, T] int32, segment 0 = padding. Attention is causal inside a segment.
    `dtype` is the compute dtype (None = that of the parameters); each layer's parameters are cast inside the scan,
    so the cast copy is one layer large. `remat`: what the backward pass makes again: none, dots (all but the products
    with weights) or full (every layer).
    """
    dtype = params["embed"].dtype if dtype is None else dtype
    cos, sin = rope_tables(cfg, positions)
    windows, tables = layer_tables(cfg)
    described = specs(cfg)["layers"]
    heads = {"heads": cfg.num_heads, "kv_heads": cfg.num_kv_heads}

    def attend(q, k, v, window):
        q, k, v = (sharding.constrain(x, ("batch", None, name, None))
                   for x, name in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads")))
        return ops.attention(q, k, v, segment_ids, window, scale=cfg.attention_scale, softcap=cfg.attention_softcap)

    def step(x, scanned):
        weights, window, table = scanned
        # What is the same in all layers stays static, so that an attention kernel can specialise on it.
        window = cfg.windows[0] if len(set(cfg.windows)) == 1 else window
        table = 0 if cos.shape[0] == 1 else table
        # Rows stay where they are and one layer's weights come to them (fsdp); GSPMD alone would split the width.
        weights = {name: sharding.gather_weight(leaf.astype(dtype), described[name].axes[1:], heads)
                   for name, leaf in weights.items()}
        x = layer(cfg, LayerKind(window, cos[table], sin[table]), weights, x, attend)
        return sharding.constrain(x, ROWS), None

    if remat != "none":
        step = jax.checkpoint(step, prevent_cse=False, policy=REMAT[remat])
    # Each device looks up its part of the width for all rows of its group: only activations travel, not the table.
    x = embed(cfg, params, sharding.constrain(tokens, ("group", None)), dtype)
    x = sharding.constrain(sharding.constrain(x, ("group", None, "embed")), ROWS)
    x, _ = jax.lax.scan(step, x, (params["layers"], windows, tables))
    return final_norm(cfg, {"final_norm": params["final_norm"].astype(dtype)}, x)


def _head_product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


def logits(cfg: ModelConfig, params: Params, hidden: jax.Array, product: Product = _head_product) -> jax.Array:
    """[..., V] float32 from hidden [..., D]: the product in hidden's dtype, summed in float32, then the soft cap.

    product(hidden, weight [V, D]) -> [..., V] float32 is for a caller that knows a faster one.
    """
    weight = head_weight(cfg, params).astype(hidden.dtype)
    return ops.softcap(product(hidden, weight), cfg.logits_softcap)
