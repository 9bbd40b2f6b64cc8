"""The compiled programs of sampling: `prefill`, `insert`, `generate`, with the weights always an argument.

A slot holds one sequence. Prefill computes keys and values of all context tokens but the last; decoding starts
by feeding that last token, so the first response token comes from the same program as every other. A sample that is
resumed has its prompt prefilled as at first and what it drew fed through decoding again, as forced tokens: keys and
values from prefill would differ in the last bit, since products of other shapes round differently.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax import sharding
from rljax.models.config import ModelConfig
from rljax.sampler import cache, decode, prefill
from rljax.sampler.cache import PAGE_AXES, RULES, Chunk, Pages, Tables
from rljax.sampler.decode import Drawn, EngineConfig, Slots
from rljax.sampler.pages import PageTables
from rljax.sampler.prefill import Prefix
from rljax.sampler.weights import Converter
from rljax.types import Params

__all__ = ["Engine", "EngineConfig"]



class Engine:
    """The compiled programs of one model on one mesh. Holds no weights; the cache is passed in and donated.

    A program is compiled by `warmup`, or else by its first call; it takes no other shapes than those.
    """

    def __init__(self, cfg: ModelConfig, engine: EngineConfig, mesh: Mesh):
        shards = math.prod(mesh.shape[name] for name in ("data", "fsdp"))
        if engine.slots % shards or engine.prefill_rows % shards:
            raise ValueError(f"slots {engine.slots} and prefill rows {engine.prefill_rows} must be multiples of the "
                             f"mesh's {shards} data shards")
        self.cfg, self.config, self.mesh, self.shards = cfg, engine, mesh, shards
        self.pages = engine.pages(shards)
        self.slot = sharding.named(("slots",), RULES, mesh)  # also of [S, ...]
        self.weights = Converter(cfg, mesh, engine.dtype, engine.int8_weights)
        self._cache_dtype = jnp.dtype(engine.cache_dtype or engine.dtype)
        self._layers = [_page_sharding(cfg, mesh, shards, self._cache_dtype)] * cfg.num_layers
        self._compiled: dict[tuple[Any, ...], Any] = {}

    # --- the cache ---------------------------------------------------------------------------------------------------

    def tables(self) -> PageTables:
        """The host's side of an empty cache."""
        c = self.config
        return PageTables(c.slots, *self.pages, c.columns, c.members, c.page)

    def chunk_pages(self, index: int) -> tuple[int, int]:
        """Pages of chunk `index`, own and prompt: each chunk but the first two holds as many as all before it."""
        own, prompt = (pages >> (self.config.levels - max(index, 1)) for pages in self.pages)
        return own, prompt

    def level(self, used: tuple[int, int]) -> int:
        """How many chunks hold the first `used` pages of the pools, own and prompt."""
        levels = range(1, self.config.levels)
        return next((n for n in levels if used[0] <= self.held(n)[0] and used[1] <= self.held(n)[1]), levels.stop)

    def held(self, level: int) -> tuple[int, int]:
        """Pages of the first `level` chunks, own and prompt."""
        own, prompt = zip(*(self.chunk_pages(index) for index in range(level)), strict=True)
        return sum(own), sum(prompt)

    def chunk(self, index: int) -> Chunk:
        """Chunk `index`, all of its pages free."""
        cfg, page, counts = self.cfg, self.config.page, self.chunk_pages(index)

        def make():
            pools = ([cache.zeros(count, cfg.num_kv_heads, cfg.head_dim, page, self._cache_dtype)
                      for _ in range(cfg.num_layers)] for count in counts)
            return Chunk(*pools)

        return self._run("chunk", counts, make, {"out_shardings": Chunk(self._layers, self._layers)})

    # --- prompts -----------------------------------------------------------------------------------------------------

    def bucket(self, length: int) -> int:
        """The smallest prompt bucket that holds `length` tokens; ValueError naming both numbers where none does."""
        for bucket in self.config.prompt_buckets:
            if length <= bucket:
                return bucket
        raise ValueError(f"a context of {length} tokens is longer than the largest prompt bucket, "
                         f"{self.config.prompt_buckets[-1]} (sampler.prompt_buckets)")

    def rows(self, bucket: int) -> int:
        """Prompts of one prefill program of this bucket: what `prefill_chunk` tokens hold, a multiple of the data
        shards and at least one each, at most `prefill_rows`; 0 where a prompt goes chunk after chunk."""
        if bucket > self.config.prefill_chunk:
            return 0
        rows = self.config.prefill_chunk // bucket // self.shards * self.shards
        return min(max(rows, self.shards), self.config.prefill_rows)

    def prefill(self, params: Params, prompts: Sequence[Sequence[int]], bucket: int) -> Prefix:
        """Keys and values of up to `rows(bucket)` prompts (without the token that decoding feeds first)."""
        batch = _padded(prompts, self.rows(bucket), bucket)
        made = functools.partial(prefill.prefill, self.cfg, self.config.dtype, self.config.page)
        how = {"out_shardings": _prefix_sharding(self.cfg, self.mesh, self.slot.spec[0])}
        return self._run("prefill", (bucket,), made, how, params, *sharding.to_devices(batch, self.slot))

    def long_prefix(self) -> Prefix:
        """Where a prompt longer than a chunk is gathered."""
        cfg, c = self.cfg, self.config
        length = -(-c.prompt_buckets[-1] // c.prefill_chunk) * c.prefill_chunk
        length = -(-length // c.page) * c.page

        def make():
            shape = (1, cfg.num_kv_heads, cfg.head_dim, length)
            return ([jnp.zeros(shape, c.dtype) for _ in range(cfg.num_layers)],
                    [jnp.zeros(shape, c.dtype).swapaxes(2, 3) for _ in range(cfg.num_layers)])

        return self._run("long", (), make, {"out_shardings": _prefix_sharding(cfg, self.mesh, None)})

    def extend(self, params: Params, prefix: Prefix, prompt: Sequence[int], start: int) -> Prefix:
        """The chunk of `prompt` from `start` on, added to `long_prefix`, which is donated."""
        size = self.config.prefill_chunk
        tokens, _ = _padded([prompt[start : start + size]], 1, size)
        tokens, start = sharding.to_devices((tokens, np.int32(start)), sharding.replicated(self.mesh))
        how = {"donate_argnums": 1, "out_shardings": _prefix_sharding(self.cfg, self.mesh, None)}
        made = functools.partial(prefill.extend, self.cfg, self.config.dtype)
        return self._run("extend", (), made, how, params, prefix, tokens, start)

    def insert(self, chunks: list[Chunk], prefix: Prefix, pages: Sequence[Sequence[int]]) -> None:
        """Write row r of `prefix` to pages[r] of the prompts' pool; `chunks` is changed in place."""
        rows, length = prefix[1][0].shape[0], prefix[1][0].shape[2]
        where = np.full((rows, length // self.config.page), -1, np.int32)
        for row, some in enumerate(pages):
            where[row, : len(some)] = some
        start = 0
        for index, chunk in enumerate(chunks):
            count = self.chunk_pages(index)[1]
            inside = np.where((where >= start) & (where < start + count), where - start, -1)
            start += count
            if (inside >= 0).any():
                inside = sharding.to_devices(inside, sharding.replicated(self.mesh))
                how = {"donate_argnums": 0, "out_shardings": self._layers}
                written = self._run("insert", (rows, length, count), cache.write_prompts, how, chunk.prompt, prefix,
                                    inside)
                chunks[index] = chunk.replace(prompt=written)

    def prompt_logprobs(self, params: Params, prompt: Sequence[int]) -> list[float]:
        """Log-prob of each token of `prompt` after those before it, at temperature 1, in nats; 0 for the first."""
        bucket = self.bucket(len(prompt))
        batch = sharding.to_devices(_padded([prompt], self.shards, bucket), self.slot)
        made = functools.partial(prefill.prompt_logprobs, self.cfg, self.config.dtype)
        found = self._run("logprobs", (bucket,), made, {}, params, *batch)
        return np.asarray(found)[0, : len(prompt)].tolist()

    # --- decoding ----------------------------------------------------------------------------------------------------

    def generate(self, params: Params, chunks: list[Chunk], slots: Slots, tables: PageTables, forced: np.ndarray
                 ) -> Drawn:
        """Start one dispatch, forced [S, T] int32 (-1 = draw); `chunks` is changed in place."""
        level = self.level(tables.highest())
        while len(chunks) < level:
            chunks.append(self.chunk(len(chunks)))
        host = (slots, self._tables(tables, level), forced)
        drawn, chunks[:level] = self._generate(level, params, tuple(chunks[:level]),
                                               *sharding.to_devices(host, self.slot))
        return drawn

    def _tables(self, tables: PageTables, level: int) -> Tables:
        """The columns that a program of this level can need."""
        own, prompt = self.held(level)
        return Tables(tables.own[:, :own], tables.own_len, tables.prompt[:, :prompt], tables.prompt_len, tables.member)

    def _generate(self, level: int, *args: Any):
        how = {"donate_argnums": 1,
               "out_shardings": (Drawn(*[self.slot] * 5), (Chunk(self._layers, self._layers),) * level)}
        return self._run("generate", (level,), functools.partial(decode.generate, self.cfg, self.config), how, *args)

    # --- programs ----------------------------------------------------------------------------------------------------

    def _run(self, name: str, static: tuple[int, ...], function: Any, how: dict[str, Any], *args: Any) -> Any:
        """Call the program of this name and sizes."""
        key = (name, *static)
        if key not in self._compiled:
            # Kernels find the mesh in the context.
            with jax.set_mesh(self.mesh) if self.config.kernel != "xla" else contextlib.nullcontext():
                self._compiled[key] = jax.jit(function, **how).lower(*args).compile()
        return self._compiled[key](*args)

    @property
    def programs(self) -> int:
        """How many programs are compiled."""
        return len(self._compiled)

    def warmup(self, params: Params) -> int:
        """Compile, and run once, every program that the config's shapes can need but `prompt_logprobs`; returns how
        many there are. `params` are the engine's weights."""
        c, chunks = self.config, []
        for level in range(1, c.levels + 1):
            chunks.append(self.chunk(level - 1))
            tables = self.tables()
            if level > 1:
                tables.own[0, 0] = self.held(level - 1)[0]
            self.generate(params, chunks, Slots.idle(c.slots), tables, np.full((c.slots, c.steps_per_dispatch), -1,
                                                                             np.int32))
        prefixes = [self.prefill(params, [[0]], bucket) for bucket in c.prompt_buckets if self.rows(bucket)]
        if not self.rows(c.prompt_buckets[-1]):
            prefixes.append(self.extend(params, self.long_prefix(), [0], 0))
        for prefix in prefixes:
            for index in range(c.levels):
                page = sum(self.chunk_pages(before)[1] for before in range(index))
                self.insert(chunks, prefix, [[page]])
        return self.programs


def _padded(prompts: Sequence[Sequence[int]], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, width] int32, zeros behind, and lengths [rows] int32."""
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths


def _page_sharding(cfg: ModelConfig, mesh: Mesh, shards: int, dtype: Any) -> Pages:
    """Pages over the data axes, heads over tensor; a scale is split as its pages are."""
    whole = sharding.named(PAGE_AXES, RULES, mesh, (shards, cfg.num_kv_heads, 1, 1))
    scale = NamedSharding(mesh, PartitionSpec(*whole.spec[:2])) if dtype == jnp.int8 else None
    return Pages(whole, whole, scale, scale)


def _prefix_sharding(cfg: ModelConfig, mesh: Mesh, rows: Any) -> Prefix:
    """Rows over the mesh axes `rows`, heads over tensor."""
    heads = sharding.named(PAGE_AXES, RULES, mesh, (10**9, cfg.num_kv_heads, 1, 1)).spec[1]
    layers = [NamedSharding(mesh, PartitionSpec(rows, heads))] * cfg.num_layers
    return layers, layers
