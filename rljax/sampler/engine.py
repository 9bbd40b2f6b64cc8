"""The device side of sampling: `prefill`, `insert`, `generate`, with the weights always an argument.

A slot holds one sequence. Prefill computes keys and values of all context tokens but the last; decoding starts
by feeding that last token, so the first response token comes from the same program as every other. A sample that is
resumed has its prompt prefilled as at first and what it drew fed through decoding again, as forced tokens: keys and
values from prefill would differ in the last bit, since products of other shapes round differently.

The sampler's copy of the weights has one tree per layer instead of stacked leaves, and the cache one pair of
arrays per layer, written in place: slicing stacked weights inside a decoding loop would copy all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax import ops, sharding
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.sampler import sampling
from rljax.types import Params

CACHE_AXES = ("slots", "kv_heads", None, None)
RULES = {**sharding.ROLLOUT_RULES, "slots": ("data", "fsdp")}


@flax.struct.dataclass
class DecodeState:
    """What decoding carries from step to step; donated. Idle slots have remaining 0."""

    keys: list[jax.Array]  # per layer [S, K, C, h], compute dtype, after RoPE
    values: list[jax.Array]  # per layer [S, K, C, h]
    tokens: jax.Array  # [S] int32, the token to feed next
    positions: jax.Array  # [S] int32, its position
    remaining: jax.Array  # [S] int32, tokens that may still be drawn
    seeds: jax.Array  # [S] typed keys: fold_in(run's key, uid)
    knobs: sampling.Knobs  # [S] each


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static facts of an engine: two compiled programs per prompt bucket, and one for decoding."""

    slots: int
    cache_len: int  # C: context and response together
    prompt_buckets: tuple[int, ...]
    prefill_rows: int  # most prompts of one prefill program
    steps_per_dispatch: int
    stop_ids: tuple[int, ...]
    vocab_known: int  # ids from here on are never drawn
    dtype: Any = jnp.float32
    seed: int = 0
    prefill_chunk: int = 4096  # tokens of one prefill program, padding included; a whole prompt at least


def unstack(cfg: ModelConfig, params: Params, dtype: Any) -> Params:
    """The sampler's copy: cast to `dtype`, layers as a list of trees."""
    cast = jax.tree.map(lambda x: x.astype(dtype), params)
    layers = [jax.tree.map(lambda x: x[i], cast["layers"]) for i in range(cfg.num_layers)]  # noqa: B023
    return {**cast, "layers": layers}


def _per_layer(cfg: ModelConfig):
    windows, tables = decoder.layer_tables(cfg)
    return [(int(window), int(table)) for window, table in zip(windows, tables)]


def prefill(cfg: ModelConfig, dtype: Any, params: Params, tokens: jax.Array, lengths: jax.Array):
    """Keys and values of whole prompts: tokens [rows, bucket], lengths [rows] -> two lists of [rows, K, bucket, h]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    cos, sin = decoder.rope_tables(cfg, positions)
    x = decoder.embed(cfg, params, tokens, dtype)
    keys, values = [], []

    def attend(q, k, v, window):
        keys.append(k.swapaxes(1, 2))
        values.append(v.swapaxes(1, 2))
        return ops.attention(q, k, v, segments, window, scale=cfg.attention_scale, softcap=cfg.attention_softcap)

    for weights, (window, table) in zip(params["layers"], _per_layer(cfg)):
        x = decoder.layer(cfg, decoder.LayerKind(window, cos[table], sin[table]), weights, x, attend)
    return keys, values


def insert(state: DecodeState, prefix, source: jax.Array, slots: dict[str, Any]) -> DecodeState:
    """Copy prefix rows into slots: slot s takes row source[s] of `prefix` (-1 = s stays as it is).

    `slots` has the new value of every per-slot field of DecodeState, [S] each. A bucket may be longer than the cache:
    what it holds beyond is padding.
    """
    taken = source >= 0

    def copy(cache, rows):
        width = min(rows.shape[2], cache.shape[2])
        rows = rows[:, :, :width]
        mine = jnp.where(taken[:, None, None, None], rows[jnp.maximum(source, 0)], cache[:, :, :width])
        return jax.lax.dynamic_update_slice(cache, mine, (0, 0, 0, 0))

    keys, values = prefix
    old = {name: getattr(state, name) for name in slots}
    fields = jax.tree.map(lambda new, old: jnp.where(taken, new, old), slots, old)
    return state.replace(
        keys=[copy(cache, rows) for cache, rows in zip(state.keys, keys)],
        values=[copy(cache, rows) for cache, rows in zip(state.values, values)],
        **fields,
    )


def _attend_cache(cfg: ModelConfig, q, keys, values, positions, window: int):
    """One query per slot over its cache: q [S, H, h], keys and values [S, K, C, h] -> [S, H, h]."""
    slots, heads, width = q.shape
    q = q.reshape(slots, keys.shape[1], -1, width)
    scores = jnp.einsum("skgh,skch->skgc", q, keys, preferred_element_type=jnp.float32) * cfg.attention_scale
    scores = ops.softcap(scores, cfg.attention_softcap)
    at = jnp.arange(keys.shape[2])[None, :]
    seen = at <= positions[:, None]
    if window:
        seen &= at > positions[:, None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, ops.MASKED), axis=-1)
    return jnp.einsum("skgc,skch->skgh", weights.astype(values.dtype), values).reshape(slots, heads, width)


def decode_step(cfg: ModelConfig, dtype: Any, params: Params, state: DecodeState) -> tuple[DecodeState, jax.Array]:
    """Feed each slot's token: the state with its keys and values written, and the next token's logits [S, V]."""
    cos, sin = decoder.rope_tables(cfg, state.positions)
    x = decoder.embed(cfg, params, state.tokens, dtype)
    row = jnp.arange(x.shape[0])
    caches = []

    def attend(q, k, v, window):
        old_keys, old_values = state.keys[len(caches)], state.values[len(caches)]
        keys = old_keys.at[row, :, state.positions].set(k.astype(old_keys.dtype))
        values = old_values.at[row, :, state.positions].set(v.astype(old_values.dtype))
        caches.append((keys, values))
        return _attend_cache(cfg, q, keys, values, state.positions, window)

    for weights, (window, table) in zip(params["layers"], _per_layer(cfg)):
        x = decoder.layer(cfg, decoder.LayerKind(window, cos[table], sin[table]), weights, x, attend)
    logits = decoder.logits(cfg, params, decoder.final_norm(cfg, params, x))
    return state.replace(keys=[k for k, _ in caches], values=[v for _, v in caches]), logits


def generate(cfg: ModelConfig, engine: EngineConfig, params: Params, state: DecodeState, forced: jax.Array):
    """Up to `steps_per_dispatch` tokens for every busy slot, stopping early when none is left.

    forced [S, steps] int32: tokens to take in place of a draw, which no stop id ends; -1 = draw. Returns (state,
    tokens [S, steps], log-probs [S, steps], counts [S]): slot s took counts[s] tokens.
    """
    stop_ids = jnp.asarray(engine.stop_ids, jnp.int32)
    steps = engine.steps_per_dispatch

    def body(carry):
        i, state, tokens, logprobs, counts = carry
        busy = state.remaining > 0
        state, logits = decode_step(cfg, engine.dtype, params, state)
        keys = jax.vmap(jax.random.fold_in)(state.seeds, state.positions + 1)
        uniform, filters = jax.vmap(jax.random.uniform)(keys), (busy & state.knobs.filtered()).any()
        token, logp = sampling.draw(logits, uniform, forced[:, i], filters, state.knobs, valid=engine.vocab_known)
        ended = (forced[:, i] < 0) & (token[:, None] == stop_ids[None, :]).any(-1)
        state = state.replace(
            tokens=jnp.where(busy, token, state.tokens),
            positions=jnp.where(busy, state.positions + 1, state.positions),
            remaining=jnp.where(busy & ~ended, state.remaining - 1, 0),
        )
        return i + 1, state, tokens.at[:, i].set(token), logprobs.at[:, i].set(logp), counts + busy

    def going(carry):
        return (carry[0] < steps) & (carry[1].remaining > 0).any()

    slots = state.tokens.shape[0]
    blank = jnp.zeros((slots, steps), jnp.int32)
    start = (jnp.int32(0), state, blank, blank.astype(jnp.float32), jnp.zeros(slots, jnp.int32))
    return jax.lax.while_loop(going, body, start)[1:]


class Engine:
    """The compiled programs of one model on one mesh. Holds no weights; the decode state is passed in and donated."""

    def __init__(self, cfg: ModelConfig, engine: EngineConfig, mesh: Mesh):
        shards = math.prod(mesh.shape[name] for name in ("data", "fsdp"))
        if engine.slots % shards or engine.prefill_rows % shards:
            raise ValueError(f"slots {engine.slots} and prefill rows {engine.prefill_rows} must be multiples of the "
                             f"mesh's {shards} data shards")
        self.cfg, self.config, self.mesh, self.shards = cfg, engine, mesh, shards
        cache_shape = (engine.slots, cfg.num_kv_heads, engine.cache_len, cfg.head_dim)
        self.cache = sharding.named(CACHE_AXES, RULES, mesh, cache_shape)
        self.slot = sharding.named(("slots",), RULES, mesh)  # also of [S, steps]
        per_layer = [self.cache] * cfg.num_layers
        slot_fields = {field.name: self.slot for field in dataclasses.fields(DecodeState)}
        slot_fields["knobs"] = sampling.Knobs(*[self.slot] * len(dataclasses.fields(sampling.Knobs)))
        self.state_shardings = DecodeState(**{**slot_fields, "keys": per_layer, "values": per_layer})
        self._cast = jax.jit(functools.partial(unstack, cfg, dtype=engine.dtype), out_shardings=_shardings(cfg, mesh))
        self._prefill = jax.jit(functools.partial(prefill, cfg, engine.dtype))
        self._insert = jax.jit(insert, donate_argnums=0, out_shardings=self.state_shardings)
        self._fresh = jax.jit(functools.partial(_fresh_state, cfg, engine), out_shardings=self.state_shardings)
        outputs = (self.state_shardings, self.slot, self.slot, self.slot)
        self._generate = jax.jit(functools.partial(generate, cfg, engine), donate_argnums=1, out_shardings=outputs)
        unforced = np.full((engine.slots, engine.steps_per_dispatch), -1, np.int32)
        self._unforced = sharding.to_devices(unforced, self.slot)

    def weights(self, params: Params) -> Params:
        """The rollout copy of the trainer's params: cast, unstacked, and laid out for decoding, in one program."""
        return self._cast(params)

    def fresh_state(self) -> DecodeState:
        """All slots idle."""
        return self._fresh()

    def bucket(self, length: int) -> int:
        """The smallest prompt bucket that holds `length` tokens; ValueError naming both numbers where none does."""
        for bucket in self.config.prompt_buckets:
            if length <= bucket:
                return bucket
        raise ValueError(f"a context of {length} tokens is longer than the largest prompt bucket, "
                         f"{self.config.prompt_buckets[-1]} (sampler.prompt_buckets)")

    def rows(self, bucket: int) -> int:
        """Rows of the prefill program of one prompt bucket: what `prefill_chunk` tokens hold, a multiple of the data
        shards and at least one each, at most `prefill_rows`."""
        rows = self.config.prefill_chunk // bucket // self.shards * self.shards
        return min(max(rows, self.shards), self.config.prefill_rows)

    def prefill(self, params: Params, contexts: Sequence[Sequence[int]]):
        """Prefix of up to `rows(bucket)` contexts of one bucket; the last token of each is left to decoding."""
        bucket = self.bucket(max(len(context) for context in contexts))
        tokens = np.zeros((self.rows(bucket), bucket), np.int32)
        lengths = np.zeros(self.rows(bucket), np.int32)
        for row, context in enumerate(contexts):
            tokens[row, : len(context) - 1] = context[:-1]
            lengths[row] = len(context) - 1
        return self._prefill(params, *sharding.to_devices((tokens, lengths), self.slot))

    def insert(self, state: DecodeState, prefix, source: np.ndarray, uids: np.ndarray, slots: dict[str, Any]):
        """`insert` with the random keys of `uids` [S] added to the per-slot fields."""
        source, uids, slots = sharding.to_devices((source, uids, slots), self.slot)
        return self._insert(state, prefix, source, {**slots, "seeds": self._seeds(uids)})

    def generate(self, params: Params, state: DecodeState, forced: np.ndarray | None = None):
        """`generate` on this mesh, with forced [S, steps] or none: (state, tokens, log-probs, counts)."""
        forced = self._unforced if forced is None else sharding.to_devices(forced, self.slot)
        return self._generate(params, state, forced)

    def keep(self, state: DecodeState, busy: np.ndarray) -> DecodeState:
        """Mark the slots where `busy` [S] is 0 as idle."""
        return self._keep(state, sharding.to_devices(busy, self.slot))

    @functools.cached_property
    def _keep(self):
        return jax.jit(
            lambda state, busy: state.replace(remaining=state.remaining * busy),
            donate_argnums=0, out_shardings=self.state_shardings,
        )

    @functools.cached_property
    def _seeds(self):
        root = jax.random.key(self.config.seed)
        return jax.jit(jax.vmap(lambda uid: jax.random.fold_in(root, uid)), out_shardings=self.slot)


def _shardings(cfg: ModelConfig, mesh: Mesh) -> Params:
    """Shardings of the unstacked copy."""
    specs = decoder.specs(cfg)
    one_layer = jax.tree.map(
        lambda leaf: sharding.named(leaf.axes[1:], sharding.ROLLOUT_RULES, mesh, leaf.shape[1:]),
        specs["layers"], is_leaf=lambda leaf: hasattr(leaf, "axes"),
    )
    rest = {name: specs[name] for name in specs if name != "layers"}
    return {**sharding.tree_shardings(rest, sharding.ROLLOUT_RULES, mesh), "layers": [one_layer] * cfg.num_layers}


def _fresh_state(cfg: ModelConfig, engine: EngineConfig) -> DecodeState:
    slots = engine.slots
    shape = (slots, cfg.num_kv_heads, engine.cache_len, cfg.head_dim)
    integers, floats = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.float32)
    return DecodeState(
        keys=[jnp.zeros(shape, engine.dtype) for _ in range(cfg.num_layers)],
        values=[jnp.zeros(shape, engine.dtype) for _ in range(cfg.num_layers)],
        tokens=integers, positions=integers, remaining=integers,
        seeds=jax.random.split(jax.random.key(0), slots),
        knobs=sampling.Knobs(temperature=floats, top_k=integers, top_p=floats, min_p=floats),
    )
