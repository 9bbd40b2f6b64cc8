"""The compiled programs of sampling: `prefill`, `insert`, `generate`, with the weights always an argument.

A slot holds one sequence. Prefill computes keys and values of all context tokens but the last; decoding starts
by feeding that last token, so the first response token comes from the same program as every other. A sample that is
resumed has its prompt prefilled as at first and what it drew fed through decoding again, as forced tokens: keys and
values from prefill would differ in the last bit, since products of other shapes round differently. Only what other
weights drew may be prefilled with the prompt.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax import sharding
from rljax.kernels import cpu
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
        if engine.kernel == "cpu":
            _check_cpu(engine, mesh)
        self.cfg, self.config, self.mesh, self.shards = cfg, engine, mesh, shards
        self.pages = engine.pages(shards)
        self.slot = sharding.named(("slots",), RULES, mesh)  # also of [S, ...]
        self.weights = Converter(cfg, mesh, engine.dtype, engine.int8_weights)
        self._cache_dtype = jnp.dtype(engine.cache_dtype or engine.dtype)
        self._layers = [_page_sharding(cfg, mesh, shards, self._cache_dtype)] * cfg.num_layers
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._warming = False
        self.row_counts = [engine.slots]  # of the decoding programs in use, ascending

    # --- the cache ---------------------------------------------------------------------------------------------------

    def tables(self) -> PageTables:
        """The host's side of an empty cache."""
        c = self.config
        return PageTables(c.slots, *self.pages, c.columns, c.members, c.page)

    def chunk_pages(self, index: int) -> tuple[int, int]:
        """Pages of chunk `index`, own and prompt: each chunk but the first two holds as many as all before it."""
        own, prompt = (pages >> (self.config.parts - max(index, 1)) for pages in self.pages)
        return own, prompt

    def chunks(self) -> list[Chunk]:
        """The cache, all of its pages free."""
        return [self._chunk(*self.chunk_pages(index)) for index in range(self.config.parts)]

    def _chunk(self, *counts: int) -> Chunk:
        cfg, page = self.cfg, self.config.page

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
        made = functools.partial(prefill.prefill, self.cfg, self.config.dtype, self.config.kernel, self.config.page)
        how = {"out_shardings": _prefix_sharding(self.cfg, self.mesh, self.slot.spec[0])}
        return self._run("prefill", (bucket,), made, how, params, *sharding.to_devices(batch, self.slot))

    def long_prefix(self, resumed: bool = False) -> Prefix:
        """Where a prompt longer than a chunk is gathered, or (`resumed`) a prompt and what was drawn after it."""
        cfg, c = self.cfg, self.config
        longest = c.prompt_buckets[-1] + (c.columns[0] * c.page if resumed else 0)
        length = -(-longest // c.prefill_chunk) * c.prefill_chunk
        length = -(-length // c.page) * c.page

        def make():
            shape = (1, cfg.num_kv_heads, cfg.head_dim, length)
            return ([jnp.zeros(shape, c.dtype) for _ in range(cfg.num_layers)],
                    [jnp.zeros(shape, c.dtype).swapaxes(2, 3) for _ in range(cfg.num_layers)])

        return self._run("long", (length,), make, {"out_shardings": _prefix_sharding(cfg, self.mesh, None)})

    def extend(self, params: Params, prefix: Prefix, sequence: Sequence[int], start: int) -> Prefix:
        """The chunk of `sequence` from `start` on, added to `long_prefix`, which is donated."""
        size = self.config.prefill_chunk
        tokens, _ = _padded([sequence[start : start + size]], 1, size)
        tokens, start = sharding.to_devices((tokens, np.int32(start)), sharding.replicated(self.mesh))
        how = {"donate_argnums": 1, "out_shardings": _prefix_sharding(self.cfg, self.mesh, None)}
        made = functools.partial(prefill.extend, self.cfg, self.config.dtype, self.config.kernel)
        return self._run("extend", (prefix[1][0].shape[2],), made, how, params, prefix, tokens, start)

    def insert(self, chunks: list[Chunk], prefix: Prefix, pages: Sequence[Sequence[int]]) -> None:
        """Write row r of `prefix` to pages[r] of the prompts' pool; `chunks` is changed in place."""
        rows, length = prefix[1][0].shape[0], prefix[1][0].shape[2]
        where = np.full((rows, length // self.config.page), -1, np.int32)
        for row, some in enumerate(pages):
            where[row, : len(some)] = some
        self._write(chunks, "prompt", cache.write_prompts, prefix, where)

    def insert_own(self, chunks: list[Chunk], prefix: Prefix, pages: Sequence[int], start: int) -> None:
        """Write a resumed `long_prefix` from position `start` on to `pages` of the slots' own pool."""
        where = np.full((1, self.config.columns[0]), -1, np.int32)
        where[0, : len(pages)] = pages
        start = sharding.to_devices(np.int32(start), sharding.replicated(self.mesh))
        self._write(chunks, "own", cache.write_from, prefix, where, start)

    def _write(self, chunks: list[Chunk], pool: str, write: Any, prefix: Prefix, where: np.ndarray, *start: jax.Array
               ) -> None:
        """`write` to those chunks of a pool that have pages of `where`."""
        how, first = {"donate_argnums": 0, "out_shardings": self._layers}, 0
        for index, chunk in enumerate(chunks):
            count = self.chunk_pages(index)[pool == "prompt"]
            inside = np.where((where >= first) & (where < first + count), where - first, -1)
            first += count
            if (inside >= 0).any():
                inside = sharding.to_devices(inside, sharding.replicated(self.mesh))
                sizes = (*prefix[1][0].shape[::2], count)
                written = self._run(f"insert {pool}", sizes, write, how, getattr(chunk, pool), prefix, inside, *start)
                chunks[index] = chunk.replace(**{pool: written})

    def prompt_logprobs(self, params: Params, prompt: Sequence[int]) -> list[float]:
        """Log-prob of each token of `prompt` after those before it, at temperature 1, in nats; 0 for the first."""
        bucket = self.bucket(len(prompt))
        batch = sharding.to_devices(_padded([prompt], self.shards, bucket), self.slot)
        made = functools.partial(prefill.prompt_logprobs, self.cfg, self.config.dtype, self.config.kernel)
        found = self._run("logprobs", (bucket,), made, {}, params, *batch)
        return sharding.to_host(found)[0, : len(prompt)].tolist()

    # --- decoding ----------------------------------------------------------------------------------------------------

    def generate(self, params: Params, chunks: list[Chunk], slots: Slots, tables: Tables, forced: np.ndarray) -> Drawn:
        """Start one dispatch for the slots of the arguments, as many as one of the `rows` programs takes; forced
        [rows, T] int32 (-1 = draw). `chunks` is changed in place."""
        how = {"donate_argnums": 1,
               "out_shardings": (Drawn(*[self.slot] * 5), (Chunk(self._layers, self._layers),) * len(chunks))}
        made = functools.partial(decode.generate, self.cfg, self.config)
        host = sharding.to_devices((slots, tables, forced), self.slot)
        drawn, chunks[:] = self._run("generate", (len(forced),), made, how, params, tuple(chunks), *host)
        return drawn

    # --- programs ----------------------------------------------------------------------------------------------------

    def _run(self, name: str, static: tuple[int, ...], function: Any, how: dict[str, Any], *args: Any) -> Any:
        """Call the program of this name and sizes; while warming up only compile it, and return shapes."""
        key = (name, *static)
        if key not in self._compiled:
            # Kernels find the mesh in the context.
            with jax.set_mesh(self.mesh) if self.config.kernel != "xla" else contextlib.nullcontext():
                lowered = jax.jit(function, **how).lower(*args)
                self._compiled[key] = lowered.compile(), lowered.out_info
        program, shapes = self._compiled[key]
        if not self._warming:
            return program(*args)
        return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes,
                            program.output_shardings)

    @property
    def programs(self) -> int:
        """How many programs are compiled."""
        return len(self._compiled)

    def warmup(self, params: Params) -> int:
        """Compile every program that the config's shapes can need but `prompt_logprobs`; returns how many there are.

        A decoding program for less than all slots is used from then on if it was seen to give the same bits.
        """
        c = self.config
        ladder = c.rows(self.shards)
        self._warming = True
        try:
            self._compile(params, ladder)
        finally:
            self._warming = False
        _return_freed_memory()
        if len(ladder) > 1 and self.pages[0] >= 2 * ladder[0]:  # pages for two dispatches
            chunks = self.chunks()
            bits = {rows: self._probe(params, chunks, rows, ladder[0]) for rows in ladder}
            self.row_counts = [rows for rows in ladder if np.array_equal(bits[rows], bits[c.slots])]
        return self.programs

    def _compile(self, params: Params, ladder: Sequence[int]) -> None:
        """Every program, in the order in which it is needed first."""
        c = self.config
        chunks = self.chunks()
        for rows in ladder:
            forced = np.full((rows, c.steps_per_dispatch), -1, np.int32)
            self.generate(params, chunks, Slots.idle(rows), self.tables().of([], rows), forced)
        prefixes = [self.prefill(params, [[0]], bucket) for bucket in c.prompt_buckets if self.rows(bucket)]
        if not self.rows(c.prompt_buckets[-1]):
            prefixes.append(self.extend(params, self.long_prefix(), [0], 0))
        own, prompt = (np.cumsum([0, *(self.chunk_pages(index)[kind] for index in range(c.parts - 1))]).tolist()
                       for kind in range(2))  # the first page of each chunk
        for prefix in prefixes:
            for page in prompt:
                self.insert(chunks, prefix, [[page]])
        if c.resumes:
            prefix = self.extend(params, self.long_prefix(resumed=True), [0], 0)
            for page in own:
                self.insert_own(chunks, prefix, [page], 0)

    def _probe(self, params: Params, chunks: list[Chunk], rows: int, busy: int) -> np.ndarray:
        """Log-probs of two dispatches of `busy` slots, by the program of `rows` slots: the second, if a slot's pages
        hold it, reads what the first wrote."""
        steps, tables, found = self.config.steps_per_dispatch, self.tables(), []
        nothing = tables.store(())
        slots, draw = Slots.idle(rows), np.random.default_rng(0)
        for slot in range(busy):
            nothing = nothing if None in nothing.members else tables.store(())
            tables.join(slot, nothing)
        slots.remaining[:busy], slots.uids[:busy] = steps, np.arange(busy)
        slots.knobs.temperature[:], slots.knobs.top_p[:] = 1.0, 1.0
        for start in range(0, min(2 * steps, self.config.columns[0] * self.config.page), steps):
            slots.tokens[:busy] = draw.integers(0, self.config.vocab_known, busy)
            slots.positions[:busy] = tables.own_len[:busy] = start
            for slot in range(busy):
                tables.grow(slot)
            forced = np.full((rows, steps), -1, np.int32)
            forced[:busy] = draw.integers(0, self.config.vocab_known, (busy, steps))
            drawn = self.generate(params, chunks, slots, tables.of(range(busy), rows), forced)
            found.append(np.asarray(drawn.logprobs)[:busy])
        return np.stack(found)


def _check_cpu(engine: EngineConfig, mesh: Mesh) -> None:
    """The kernels of a CPU know one device, one chunk of the cache, and float32, of pages also int8."""
    dtypes = jnp.dtype(engine.dtype), jnp.dtype(engine.cache_dtype or engine.dtype)
    if dtypes[0] != jnp.float32 or dtypes[1] not in (jnp.float32, jnp.int8) or engine.parts != 1 or mesh.size != 1:
        raise ValueError(f"kernel 'cpu' takes float32, a cache of float32 or int8, 1 part and 1 device: got "
                         f"{dtypes[0]}, {dtypes[1]}, {engine.parts} and {mesh.size}")
    if not cpu.available():
        raise ValueError("kernel 'cpu' is not there: a warning says why")


def _return_freed_memory() -> None:
    """What compiling took goes back to the system: glibc would keep it, 0.8 GB for a model of 30 layers."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
