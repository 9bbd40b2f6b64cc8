"""Decoding: `generate` draws up to T tokens for every slot in one program.

Between dispatches only the cache stays on the device (`cache.py`); tokens, positions and knobs of the slots come from
the host, which knows them anyway.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rljax.kernels import cpu
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.sample import MOST_BIASES
from rljax.sampler import cache, prefill, sampling, weights
from rljax.sampler.cache import Chunk, Pages, Tables
from rljax.types import Params

LEAST_ROWS = 8  # of a decoding program with less than all slots: fewer rows are no faster


@flax.struct.dataclass
class Slots:
    """What one dispatch needs to know of the slots, [S] each. Idle ones have remaining 0."""

    tokens: Any  # int32, the token to feed next
    positions: Any  # int32, its position
    remaining: Any  # int32, tokens that may still be drawn
    hold: Any  # int32, tokens to draw before a stop id may come
    uids: Any  # uint32, the random key's second part
    knobs: sampling.Knobs

    @classmethod
    def idle(cls, slots: int) -> Slots:
        """Host arrays of idle slots."""
        ints, floats = [np.zeros(slots, np.int32) for _ in range(5)], [np.zeros(slots, np.float32) for _ in range(3)]
        knobs = sampling.Knobs(floats[0], ints[4], floats[1], floats[2], np.zeros((slots, MOST_BIASES), np.int32),
                               np.zeros((slots, MOST_BIASES), np.float32))
        return cls(*ints[:4], np.zeros(slots, np.uint32), knobs)


@flax.struct.dataclass
class Drawn:
    """What a dispatch gave: slot s took counts[s] tokens."""

    tokens: Any  # [S, T] int32
    logprobs: Any  # [S, T] float32, nats
    counts: Any  # [S] int32
    top_ids: Any  # [S, T, alternatives] int32
    top_logprobs: Any  # [S, T, alternatives] float32


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static facts of an engine: they decide its programs, and so the bits of what it draws."""

    slots: int
    cache_len: int  # context and response together, of one sample
    prompt_buckets: tuple[int, ...]
    prefill_rows: int  # most prompts of one prefill program
    steps_per_dispatch: int
    stop_ids: tuple[int, ...]
    vocab_known: int  # ids from here on are never drawn
    dtype: Any = jnp.float32
    seed: int = 0
    prefill_chunk: int = 4096  # tokens of one prefill program, padding included
    new_tokens: int = 0  # most new tokens of a request; 0 = what cache_len leaves
    resumes: bool = False  # what older weights drew may be prefilled: see `Scheduler`
    members: int = 1  # samples that read one stored prompt
    cache_tokens: int = 0  # positions of both pools together; 0 = as many as the slots may need
    parts: int = 1  # of both pools; the XLA path passes over those that nobody reads
    # Decoding programs, each for half the slots of the one before; see `Engine.warmup`.
    row_levels: int = 1
    cache_dtype: Any = None  # None = dtype; or int8
    int8_weights: bool = False
    alternatives: int = 0  # most likely tokens whose log-probs are returned
    page_len: int = 64  # positions of a page, at most; it is a multiple of the steps of a dispatch
    # Of attention over pages (see `ops.page_attention`); "cpu", for one device, also of prompts' and of the products of
    # decoding.
    kernel: str = "xla"

    @property
    def page(self) -> int:
        """Positions of a page, P."""
        return self.steps_per_dispatch * max(1, self.page_len // self.steps_per_dispatch)

    @property
    def columns(self) -> tuple[int, int]:
        """Most pages of one slot: own, prompt."""
        prompt = min(self.prompt_buckets[-1], self.cache_len)
        return -(-min(self.new_tokens or self.cache_len, self.cache_len) // self.page), max(1, -(-prompt // self.page))

    def rows(self, shards: int) -> list[int]:
        """Slots of the decoding programs, ascending."""
        ladder = [self.slots >> level for level in range(self.row_levels)]
        return [n for n in reversed(ladder) if n == self.slots or n >= LEAST_ROWS and n % shards == 0]

    def pages(self, shards: int) -> tuple[int, int]:
        """Pages of the two pools, own and prompt. ValueError where cache_tokens does not hold one sample."""
        own, prompt = self.columns
        most_own = self.slots * own
        most_prompt = min(self.slots, 2 * -(-self.slots // self.members)) * prompt
        if self.cache_tokens:
            total = self.cache_tokens // self.page
            if total < own + prompt:
                raise ValueError(f"sampler.cache_tokens {self.cache_tokens} holds {total} pages of {self.page} tokens, "
                                 f"but a prompt may need {prompt} and its response {own} of their own: set "
                                 f"{(own + prompt) * self.page} or more")
            most_prompt = min(most_prompt, max(prompt, min(total // 3, total - own), total - most_own))
            most_own = min(most_own, total - most_prompt)
        unit = shards << (self.parts - 1)
        return -(-most_own // unit) * unit, -(-most_prompt // unit) * unit


def decode_step(cfg: ModelConfig, engine: EngineConfig, params: Params, tokens: jax.Array, positions: jax.Array,
                attend: Callable) -> jax.Array:
    """Feed each slot's token: logits [S, V] float32 of the next. attend(layer, q, k, v, window), as `decoder`'s."""
    product = functools.partial(weights.product, kernel=engine.kernel)
    cos, sin = prefill.rope_tables(cfg, engine.kernel, positions)
    x = decoder.embed(cfg, params, tokens, engine.dtype)
    for index, (leaves, (window, table)) in enumerate(zip(params["layers"], prefill.per_layer(cfg), strict=True)):
        kind = decoder.LayerKind(window, cos[table], sin[table])
        x = decoder.layer(cfg, kind, leaves, x, functools.partial(attend, index), product)
    head = functools.partial(product, dtype=jnp.float32)
    return decoder.logits(cfg, params, decoder.final_norm(cfg, params, x), head)


def _attention(cfg: ModelConfig, engine: EngineConfig, chunks: Sequence[Chunk], tables: Tables):
    """attend(step, positions, keys, values, index, q, window): over both pools and what is staged, up to `step`."""
    scores = {"scale": cfg.attention_scale, "softcap": cfg.attention_softcap}
    if engine.kernel == "cpu":
        return _one_kernel(cfg, scores, *chunks, tables)
    how = {**scores, "kernel": engine.kernel}
    own, prompt, staged = _who_reads(engine, chunks, tables)

    def attend(step, positions, keys, values, index, q, window):
        slots, heads, width = q.shape
        q = q.reshape(slots, cfg.num_kv_heads, -1, width)
        own_pages, prompt_pages = [c.own[index] for c in chunks], [c.prompt[index] for c in chunks]
        here = staged.replace(last=jnp.full_like(staged.last, step + 1))
        parts = [
            cache.page_partials(q, prompt_pages, prompt, positions, window, **how),
            cache.page_partials(q, own_pages, own, positions, window, **how),
            cache.page_partials(q, [Pages(keys, values)], here, positions, window, **scores),
        ]
        return cache.merge(parts).astype(q.dtype).reshape(slots, heads, width)

    return attend


def _one_kernel(cfg: ModelConfig, scores: dict[str, float], chunk: Chunk, tables: Tables):
    """`_attention` by a kernel that goes from slots to pages, and so needs no `Reads` and leaves nothing to merge."""

    def attend(step, positions, keys, values, index, q, window):
        grouped = q.reshape(q.shape[0], cfg.num_kv_heads, -1, q.shape[2])
        return cpu.attention(grouped, chunk.prompt[index], chunk.own[index], Pages(keys, values), tables, positions,
                             step, window=window, **scores).reshape(q.shape)

    return attend


def _who_reads(engine: EngineConfig, chunks: Sequence[Chunk], tables: Tables):
    """`Reads` of own pages, prompts' pages, and of what is staged, where slot s reads row s."""
    own_pages, prompt_pages = (sum(part[0].keys.shape[0] for part in parts)
                               for parts in ([c.own for c in chunks], [c.prompt for c in chunks]))
    zero, slots = jnp.zeros_like(tables.member), len(tables.member)
    own = cache.reads(tables.own, tables.own_len, tables.prompt_len, zero, own_pages, 1, engine.page)
    prompt = cache.reads(tables.prompt, tables.prompt_len, zero, tables.member, prompt_pages, engine.members,
                         engine.page)
    staged = cache.reads(jnp.arange(slots, dtype=jnp.int32)[:, None], zero, tables.prompt_len + tables.own_len, zero,
                         slots, 1, engine.steps_per_dispatch)
    return own, prompt, staged


def generate(cfg: ModelConfig, engine: EngineConfig, params: Params, chunks: tuple[Chunk, ...], slots: Slots,
             tables: Tables, forced: jax.Array) -> tuple[Drawn, tuple[Chunk, ...]]:
    """Up to T tokens for every busy slot, stopping early when none is left, and the chunks with what was fed.

    forced [S, T] int32: tokens to take in place of a draw, which no stop id ends; -1 = draw.
    """
    steps, count = engine.steps_per_dispatch, len(slots.tokens)
    stop_ids = jnp.asarray(engine.stop_ids, jnp.int32)
    root = jax.random.key(engine.seed)
    seeds = jax.vmap(lambda uid: jax.random.fold_in(root, uid))(slots.uids)
    attention = _attention(cfg, engine, chunks, tables)
    special = slots.knobs.special()

    def body(carry):
        step, tokens, positions, remaining, staged, drawn = carry
        busy, keys, values = remaining > 0, *staged

        def attend(index, q, k, v, window):
            keys[index] = jax.lax.dynamic_update_slice(keys[index], k[..., None].astype(q.dtype), (0, 0, 0, step))
            values[index] = jax.lax.dynamic_update_slice(values[index], v[:, :, None].astype(q.dtype), (0, 0, step, 0))
            return attention(step, positions, keys[index], values[index], index, q, window)

        keys, values = list(keys), list(values)
        logits = decode_step(cfg, engine, params, tokens, positions, attend)
        uniform = jax.vmap(jax.random.uniform)(jax.vmap(jax.random.fold_in)(seeds, positions + 1))
        barred = step < slots.hold
        given = forced[:, step]
        token, *rest = sampling.draw(logits, uniform, given, barred, (busy & (special | barred)).any(), slots.knobs,
                                     valid=engine.vocab_known, stop_ids=engine.stop_ids,
                                     alternatives=engine.alternatives)
        ended = (given < 0) & (token[:, None] == stop_ids[None, :]).any(-1)
        logp, ids, likely = rest
        drawn = Drawn(drawn.tokens.at[:, step].set(token), drawn.logprobs.at[:, step].set(logp), drawn.counts + busy,
                      drawn.top_ids.at[:, step].set(ids), drawn.top_logprobs.at[:, step].set(likely))
        return (step + 1, jnp.where(busy, token, tokens), jnp.where(busy, positions + 1, positions),
                jnp.where(busy & ~ended, remaining - 1, 0), (keys, values), drawn)

    empty, shape = jnp.zeros((count, steps), jnp.int32), (count, cfg.num_kv_heads, cfg.head_dim)
    top = jnp.zeros((count, steps, engine.alternatives), jnp.int32)
    drawn = Drawn(empty, empty.astype(jnp.float32), jnp.zeros(count, jnp.int32), top, top.astype(jnp.float32))
    staged = ([jnp.zeros((*shape, steps), engine.dtype)] * cfg.num_layers,
              [jnp.zeros((*shape[:2], steps, shape[2]), engine.dtype)] * cfg.num_layers)
    start = (jnp.int32(0), slots.tokens, slots.positions, slots.remaining, staged, drawn)
    *_, (keys, values), drawn = jax.lax.while_loop(lambda c: (c[0] < steps) & (c[3] > 0).any(), body, start)
    return drawn, cache.write_own(chunks, keys, values, tables)
