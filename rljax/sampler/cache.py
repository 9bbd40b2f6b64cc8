"""The device side of the key-value cache: two pools of pages, one for prompts and one for what slots draw.

A page holds P positions of one sequence. A prompt's pages are stored once and read by all its samples, its members;
every other page has one owner. Attention of one step sends queries to pages, not pages to queries: each pool is read
once, where it lies, and the partial results, a hundredth of its size, are gathered per slot in the order of their
positions. So where a page lies, and who lies beside it, changes no bit.

While a dispatch decodes, pools are only read: the keys and values of its steps are staged in [S, ..., T] arrays, and
written to pages at its end, T at a time. A pool is a list of chunks; those of which nobody reads a page are passed
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rljax import ops, sharding

PAGE_AXES = ("pages", "kv_heads", None, None)
RULES = {**sharding.ROLLOUT_RULES, "slots": ("data", "fsdp"), "pages": ("data", "fsdp")}
MOST_UNROLLED = 32
Partials = tuple[jax.Array, jax.Array, jax.Array]


@flax.struct.dataclass
class Pages:
    """Some pages of one layer, after RoPE. Of int8 pages, the scales restore each position's keys and values."""

    keys: jax.Array  # [N, K, h, P], the cache's dtype
    values: jax.Array  # [N, K, P, h]
    key_scale: jax.Array | None = None  # [N, K, P] float32
    value_scale: jax.Array | None = None


@flax.struct.dataclass
class Chunk:
    """A part of both pools, per layer."""

    own: list[Pages]
    prompt: list[Pages]


@flax.struct.dataclass
class Tables:
    """Where each slot's keys and values lie; made by the host for every dispatch. -1 = no page."""

    own: jax.Array  # [S, columns] int32, pages of its own, in order
    own_len: jax.Array  # [S] int32, positions filled there, a multiple of T
    prompt: jax.Array  # [S, columns] int32, pages of its prompt
    prompt_len: jax.Array  # [S] int32, positions filled there: the prompt but its last token
    member: jax.Array  # [S] int32, its number among the prompt's members


@flax.struct.dataclass
class Reads:
    """Who reads which page of one pool, for N pages of M members."""

    slots: jax.Array  # [N, M] int32
    last: jax.Array  # [N, M] int32: positions filled; 0 = nobody reads
    base: jax.Array  # [N, M] int32: the sequence's position at the page's first
    table: jax.Array  # [S, columns] int32, as in Tables
    member: jax.Array  # [S] int32


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 and float32 scale with x = int8 * scale: the largest along `axis` becomes 127. No scale is 0."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / 127.0
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(wide / scale).astype(jnp.int8), jnp.squeeze(scale, axis)


def _stored(keys: jax.Array, values: jax.Array, dtype: Any) -> Pages:
    """Keys [..., h, P] and values [..., P, h] as they are stored."""
    if dtype != jnp.int8:
        return Pages(keys.astype(dtype), values.astype(dtype))
    (keys, key_scale), (values, value_scale) = quantize(keys, -2), quantize(values, -1)
    return Pages(keys, values, key_scale, value_scale)


def zeros(pages: int, kv_heads: int, width: int, size: int, dtype: Any) -> Pages:
    """Free pages."""
    scale = jnp.zeros((pages, kv_heads, size), jnp.float32) if dtype == jnp.int8 else None
    return Pages(jnp.zeros((pages, kv_heads, width, size), dtype), jnp.zeros((pages, kv_heads, size, width), dtype),
                 scale, scale)


def reads(table: jax.Array, filled: jax.Array, start: jax.Array, member: jax.Array, pages: int, members: int, size: int
          ) -> Reads:
    """`Reads` of a pool of `pages`, from the slots' view: table [S, columns], filled, start (position of the first) and
    member [S]."""
    column = jnp.arange(table.shape[1])[None, :] * size
    at = (jnp.where(table >= 0, table, pages), jnp.broadcast_to(member[:, None], table.shape))
    empty = jnp.zeros((pages, members), jnp.int32)
    slot = jnp.broadcast_to(jnp.arange(len(table), dtype=jnp.int32)[:, None], table.shape)
    return Reads(
        empty.at[at].set(slot, mode="drop"),
        empty.at[at].set(jnp.clip(filled[:, None] - column, 0, size), mode="drop"),
        empty.at[at].set(start[:, None] + column, mode="drop"),
        table, member,
    )


def page_partials(q: jax.Array, chunks: Sequence[Pages], who: Reads, position: jax.Array, window: int, **how
                  ) -> Partials:
    """Attention of each slot's query over its pages of one pool, not merged yet: (out [S, columns, K, g, h], top and
    total [S, columns, K, g]), float32, as `ops.page_attention` has them.

    q [S, K, g, h]; position [S] of the query; window as in `decoder.LayerKind`; how: see `ops.page_attention`.
    """
    found, start = [], 0
    for pages in chunks:
        part = slice(start, start + pages.keys.shape[0])
        start = part.stop
        slots, last = who.slots[part], who.last[part]
        first = jnp.clip(position[slots] - window + 1 - who.base[part], 0, last) if window else jnp.zeros_like(last)
        found.append(_attend(q[slots].swapaxes(1, 2), pages, first, last, **how))
    at = (jnp.maximum(who.table, 0), slice(None), who.member[:, None])
    out, top, total = (jnp.concatenate(parts)[at] for parts in zip(*found, strict=True))
    there = (who.table >= 0)[:, :, None, None]
    return jnp.where(there[..., None], out, 0.0), jnp.where(there, top, ops.MASKED), jnp.where(there, total, 0.0)


def _attend(q: jax.Array, pages: Pages, first: jax.Array, last: jax.Array, *, kernel: str = "xla", **scores
            ) -> Partials:
    """`ops.page_attention`, by a kernel on each device's own pages and heads."""

    def run(q, pages, first, last):
        return ops.page_attention(q, pages.keys, pages.values, first, last, key_scale=pages.key_scale,
                                  value_scale=pages.value_scale, kernel=kernel, **scores)

    if kernel == "xla":
        shape = jax.eval_shape(run, q, pages, first, last)
        unseen = [0.0, ops.MASKED, 0.0]  # kernels skip single pages
        return jax.lax.cond((last > 0).any(), run, lambda *_: tuple(
            jnp.full(part.shape, value) for part, value in zip(shape, unseen, strict=True)), q, pages, first, last)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(q, pages, first, last)
    both = sharding.partition_spec(PAGE_AXES[:2], RULES, mesh, (mesh.size * last.shape[0], q.shape[1]))
    pages_only = PartitionSpec(both[0])
    return jax.shard_map(run, mesh=mesh, in_specs=(both, both, pages_only, pages_only), out_specs=both,
                         check_vma=False)(q, pages, first, last)  # Pallas does not say how its results vary


def merge(parts: Sequence[Partials]) -> jax.Array:
    """Softmax attention [S, K, g, h] of partials over disjoint keys: sum of exp(top - max) * out over that of total."""
    out, top, total = (jnp.concatenate(some, axis=1) for some in zip(*parts, strict=True))
    best, count = top.max(axis=1), top.shape[1]

    def add(index, sums):
        weight = jnp.exp(top[:, index] - best)
        return sums[0] + weight[..., None] * out[:, index], sums[1] + weight * total[:, index]

    zero = jnp.zeros_like(out[:, 0]), jnp.zeros_like(best)
    # One part after the other: exponentials and sums over an array of all would round by its shape.
    sums, masses = jax.lax.fori_loop(0, count, add, zero, unroll=min(count, MOST_UNROLLED))
    return sums / masses[..., None]


def write_prompts(pages: Sequence[Pages], prefix: tuple[Sequence[jax.Array], Sequence[jax.Array]], where: jax.Array
                  ) -> list[Pages]:
    """Prompts into pages of one chunk: of prefix, per layer keys [rows, K, h, n * P] and values [rows, K, n * P, h],
    row r's part j goes to page where[r, j], of [rows, n] int32 (-1 = nowhere)."""
    rows, parts = where.shape
    count, size = pages[0].keys.shape[0], pages[0].keys.shape[-1]
    index = jnp.where(where >= 0, where, count).reshape(-1)
    written = []
    for old, k, v in zip(pages, *prefix, strict=True):
        k = k.reshape(*k.shape[:3], parts, size).transpose(0, 3, 1, 2, 4).reshape(-1, *k.shape[1:3], size)
        v = v.reshape(*v.shape[:2], parts, size, -1).swapaxes(1, 2).reshape(-1, v.shape[1], size, v.shape[3])
        new = _stored(k, v, old.keys.dtype)
        written.append(jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), old, new))
    return written


def write_from(pages: Sequence[Pages], prefix: tuple[Sequence[jax.Array], Sequence[jax.Array]], where: jax.Array,
               start: jax.Array) -> list[Pages]:
    """`write_prompts` of the positions from `start` on, as many as the pages of `where` [rows, n] hold."""
    length = where.shape[1] * pages[0].keys.shape[-1]
    keys, values = ([jax.lax.dynamic_slice_in_dim(x, start, length, axis) for x in part]
                    for part, axis in zip(prefix, (3, 2), strict=True))
    return write_prompts(pages, (keys, values), where)


def write_own(chunks: Sequence[Chunk], keys: Sequence[jax.Array], values: Sequence[jax.Array], tables: Tables
              ) -> tuple[Chunk, ...]:
    """What a dispatch staged, per layer keys [S, K, h, T] and values [S, K, T, h], behind what each slot has."""
    steps, size = keys[0].shape[-1], chunks[0].own[0].keys.shape[-1]
    column = jnp.minimum(tables.own_len // size, tables.own.shape[1] - 1)
    page = jnp.take_along_axis(tables.own, column[:, None], axis=1)[:, 0]
    block = tables.own_len % size // steps
    written, start = [], 0
    for chunk in chunks:
        count, layers = chunk.own[0].keys.shape[0], []
        index = jnp.where((page >= start) & (page < start + count), page - start, count)
        start += count
        for old, k, v in zip(chunk.own, keys, values, strict=True):
            layers.append(_write_block(old, _stored(k, v, old.keys.dtype), index, block, steps))
        written.append(chunk.replace(own=layers))
    return tuple(written)


def _write_block(old: Pages, new: Pages, index: jax.Array, block: jax.Array, steps: int) -> Pages:
    """Block number block[s], of `steps` positions, of page index[s] becomes new[s]; past the end it is dropped."""

    def put(pages, part, axis):
        if pages is None:
            return None
        shape = pages.shape[:axis] + (-1, steps) + pages.shape[axis + 1 :]
        at = (index,) + (slice(None),) * (axis - 1) + (block,)
        return pages.reshape(shape).at[at].set(part, mode="drop").reshape(pages.shape)

    return Pages(put(old.keys, new.keys, 3), put(old.values, new.values, 2),
                 put(old.key_scale, new.key_scale, 2), put(old.value_scale, new.value_scale, 2))
