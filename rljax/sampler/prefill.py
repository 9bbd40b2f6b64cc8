"""Keys and values of prompts: several short ones in one program, a long one chunk after chunk."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rljax import ops
from rljax.kernels import cpu
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.sampler.weights import product
from rljax.types import Params

Prefix = tuple[list[jax.Array], list[jax.Array]]  # per layer keys [rows, K, h, L] and values [rows, K, L, h]
QUERY_BLOCK, KEY_BLOCK = 128, 512  # queries and keys of a later chunk whose scores are held at once, at most


def per_layer(cfg: ModelConfig) -> list[tuple[int, int]]:
    """(window, RoPE table) of every layer."""
    windows, tables = decoder.layer_tables(cfg)
    return [(int(window), int(table)) for window, table in zip(windows, tables)]


def rope_tables(cfg: ModelConfig, kernel: str, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`decoder.rope_tables`, made once for all layers."""
    cos, sin = decoder.rope_tables(cfg, positions)
    return (cpu.hold(cos), cpu.hold(sin)) if kernel == "cpu" else (cos, sin)


def run(cfg: ModelConfig, dtype: Any, kernel: str, params: Params, tokens: jax.Array, lengths: jax.Array
        ) -> tuple[jax.Array, Prefix]:
    """Hidden states [rows, bucket, D] before the final norm, and the keys and values, of whole prompts.

    tokens [rows, bucket] int32, lengths [rows]. kernel: as `EngineConfig`'s.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos, sin = rope_tables(cfg, kernel, positions)
    x = decoder.embed(cfg, params, tokens, dtype)
    keys, values = [], []

    def attend(q, k, v, window):
        keys.append(k.transpose(0, 2, 3, 1))
        values.append(v.swapaxes(1, 2))
        if kernel == "cpu":
            return _by_kernel(cfg, q, keys[-1], values[-1], jnp.int32(0), window)
        segments = (positions < lengths[:, None]).astype(jnp.int32)
        return ops.attention(q, k, v, segments, window, scale=cfg.attention_scale, softcap=cfg.attention_softcap)

    for weights, (window, table) in zip(params["layers"], per_layer(cfg), strict=True):
        x = decoder.layer(cfg, decoder.LayerKind(window, cos[table], sin[table]), weights, x, attend, product)
    return x, (keys, values)


def prefill(cfg: ModelConfig, dtype: Any, kernel: str, size: int, params: Params, tokens: jax.Array,
            lengths: jax.Array) -> Prefix:
    """Keys and values of whole prompts, padded to pages of `size` positions."""
    _, (keys, values) = run(cfg, dtype, kernel, params, tokens, lengths)
    more = -tokens.shape[1] % size
    return ([jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, more))) for k in keys],
            [jnp.pad(v, ((0, 0), (0, 0), (0, more), (0, 0))) for v in values])


def extend(cfg: ModelConfig, dtype: Any, kernel: str, params: Params, prefix: Prefix, tokens: jax.Array,
           start: jax.Array) -> Prefix:
    """The next chunk of one long prompt: tokens [1, chunk], at positions from `start` on; prefix [1, K, h, L] and
    [1, K, L, h] is filled up to there, and L holds the chunk. What is beyond the prompt's end is padding that nobody
    reads."""
    positions = start + jnp.arange(tokens.shape[1])[None, :]
    cos, sin = rope_tables(cfg, kernel, positions)
    x = decoder.embed(cfg, params, tokens, dtype)
    keys, values = [], []

    def attend(q, k, v, window):
        old_keys, old_values = (part[len(keys)] for part in prefix)
        keys.append(jax.lax.dynamic_update_slice(old_keys, k.transpose(0, 2, 3, 1), (0, 0, 0, start)))
        values.append(jax.lax.dynamic_update_slice(old_values, v.swapaxes(1, 2), (0, 0, start, 0)))
        if kernel == "cpu":
            return _by_kernel(cfg, q, keys[-1], values[-1], start, window)
        return _attend_chunk(cfg, q, keys[-1], values[-1], start, window)

    for weights, (window, table) in zip(params["layers"], per_layer(cfg), strict=True):
        x = decoder.layer(cfg, decoder.LayerKind(window, cos[table], sin[table]), weights, x, attend, product)
    return keys, values


def _by_kernel(cfg: ModelConfig, q, keys, values, start: jax.Array, window: int) -> jax.Array:
    return cpu.prompt_attention(q, keys, values, start, window=window, scale=cfg.attention_scale,
                                softcap=cfg.attention_softcap)


def _attend_chunk(cfg: ModelConfig, q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array, window: int):
    """q [1, chunk, H, h] at positions from `start` on over keys [1, K, h, L]: [1, chunk, H, h].

    A block of queries reads the blocks of keys that it sees, one after the other, with a running maximum.
    """
    _, chunk, heads, width = q.shape
    kv_heads, length = keys.shape[1], keys.shape[3]
    block, size = min(QUERY_BLOCK, chunk), math.gcd(KEY_BLOCK, length)
    q = jnp.pad(q[0], ((0, -chunk % block), (0, 0), (0, 0)))
    q = q.reshape(-1, block, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)

    def one(taken):
        queries, first = taken  # [K, g, block, h]
        position = first + jnp.arange(block)[:, None]

        def add(index, sums):
            out, top, total = sums
            at = index * size + jnp.arange(size)[None, :]
            scores = jnp.einsum("kgqh,khl->kgql", queries, jax.lax.dynamic_slice_in_dim(keys[0], index * size, size, 2),
                                preferred_element_type=jnp.float32)
            scores = ops.softcap(scores * cfg.attention_scale, cfg.attention_softcap)
            seen = (at <= position) & ((at > position - window) if window else True)
            scores = jnp.where(seen, scores, ops.MASKED)
            best = jnp.maximum(top, scores.max(-1))
            weights, kept = jnp.where(seen, jnp.exp(scores - best[..., None]), 0.0), jnp.exp(top - best)
            more = jnp.einsum("kgql,klh->kgqh", weights.astype(values.dtype),
                              jax.lax.dynamic_slice_in_dim(values[0], index * size, size, 1),
                              preferred_element_type=jnp.float32)
            return out * kept[..., None] + more, best, total * kept + weights.sum(-1)

        *rows, _ = queries.shape
        zero = jnp.zeros(queries.shape, jnp.float32), jnp.full(rows, ops.MASKED), jnp.zeros(rows, jnp.float32)
        begin = jnp.maximum(first - window + 1, 0) // size if window else 0
        end = jnp.minimum((first + block - 1) // size + 1, length // size)
        out, _, total = jax.lax.fori_loop(begin, end, add, zero)
        total = jnp.where(total > 0, total, 1.0)  # padding may see nothing
        return (out / total[..., None]).astype(queries.dtype).transpose(2, 0, 1, 3)

    out = jax.lax.map(one, (q, start + block * jnp.arange(len(q))))
    return out.reshape(1, -1, heads, width)[:, :chunk]


def prompt_logprobs(cfg: ModelConfig, dtype: Any, kernel: str, params: Params, tokens: jax.Array,
                    lengths: jax.Array) -> jax.Array:
    """Log-prob of each prompt token after those before it, at temperature 1: [rows, bucket] float32, nats; the first
    and padding have 0."""
    hidden, _ = run(cfg, dtype, kernel, params, tokens, lengths)
    hidden = decoder.final_norm(cfg, params, hidden)
    position = jnp.arange(tokens.shape[1])[None, :]
    shifted = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return ops.token_logprobs(
        shifted, decoder.head_weight(cfg, params).astype(hidden.dtype), tokens,
        ((position > 0) & (position < lengths[:, None])).astype(jnp.int32), softcap=cfg.logits_softcap)[0]
