"""JetStream's engine interface over ours, and a gRPC server: JetStream's orchestrator decodes with our programs.

Written for google-jetstream 0.2.2 (https://github.com/AI-Hypercomputer/JetStream). There too the first token comes from
`generate` and not from prefill. Its orchestrator holds max_tokens against one length per `generate`, so an engine for
it has steps_per_dispatch 1. An exception in one of its threads kills the process: a request that cannot be decoded
ends without tokens instead, and a warning says why.

Nothing else imports this module: JetStream brings TensorFlow along, whose import takes seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import socket
import threading
from typing import Any

import flax.struct
import grpc
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rljax import sharding
from rljax.sample import SamplingParams
from rljax.sampler import requests
from rljax.sampler.cache import Chunk
from rljax.sampler.decode import Slots
from rljax.sampler.engine import Engine
from rljax.sampler.pages import PageTables
from rljax.sampler.requests import Request
from rljax.tokenizer import Tokenizer
from rljax.types import Params

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)
from jetstream.core import config_lib, orchestrator, server_lib  # noqa: E402  sets the root logger to print all
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # noqa: E402

_root.setLevel(_level)
_root.handlers[:] = _handlers

log = logging.getLogger(__name__)

PADDINGS = tuple(2**power for power in range(4, 16))  # the lengths to which the orchestrator can pad a prompt
NO_START = -1  # what it puts before a token request as its start token; prefill takes it off
GREEDY = SamplingParams(max_new_tokens=2**31 - 1, temperature=0.0)


def _delete(prefix: Any) -> None:
    """Free the arrays of an inserted prefix. The orchestrator's own calls jax.tree_map, which JAX no longer has."""
    for leaf in jax.tree.leaves(prefix):
        leaf.delete()


orchestrator.delete_pytree = _delete


@flax.struct.dataclass
class Prefix:
    """What prefill hands to insert."""

    cache: Any  # our engine's prefix; None for a request that cannot be decoded
    context: tuple[int, ...] = flax.struct.field(pytree_node=False)  # the whole prompt; its last token is fed first
    uid: int = flax.struct.field(pytree_node=False)  # seeds the draws


@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What the orchestrator carries from call to call, changed in place: the cache, the host's view of the slots."""

    chunks: list[Chunk]
    tables: PageTables
    slots: Slots
    taken: np.ndarray  # [S] bool: holds pages
    lengths: np.ndarray  # [S] int32, calls of generate since the slot was filled


class _Slots(int):
    """A number of slots n for which `free < n` holds for n free ones too.

    The orchestrator asserts it before each `generate`, while its detokenizing thread may just have freed the last slot
    in use; the failure would kill the process, where a step of idle slots does no harm.
    """

    def __gt__(self, free: int) -> bool:
        return int(self) >= free


class JetStreamEngine(engine_api.Engine):
    """Our engine as JetStream's orchestrator calls it: prefill from one thread, insert and generate from another."""

    def __init__(self, engine: Engine, params: Params, tokenizer: Tokenizer, draws: SamplingParams = GREEDY):
        """params: from `engine.weights`. draws: how every request draws, for JetStream's requests do not say; its
        max_new_tokens bounds each beside the request's own max_tokens. ValueError for what cannot be served."""
        if engine.config.steps_per_dispatch != 1:
            raise ValueError(f"steps_per_dispatch is {engine.config.steps_per_dispatch}; JetStream's max_tokens would "
                             f"be kept only to multiples of it, it must be 1")
        if engine.config.row_levels != 1:
            raise ValueError(f"row_levels is {engine.config.row_levels}; JetStream decodes all slots, it must be 1")
        if engine.rows(engine.config.prompt_buckets[-1]) == 0:
            raise ValueError(f"prompts of {engine.config.prompt_buckets[-1]} tokens would go in parts of prefill_chunk "
                             f"{engine.config.prefill_chunk}; JetStream prefills them whole, it must be as large")
        if draws.stop:
            raise ValueError(f"stop strings {draws.stop!r}: JetStream ends a request by token id alone")
        c = engine.config
        if any(have < c.slots * need for have, need in zip(engine.pages, c.columns, strict=True)):
            raise ValueError(f"pages {engine.pages} do not hold {c.slots} slots of {c.columns}, own and prompt; "
                             f"JetStream fills every slot: the engine needs cache_tokens 0 and members 1")
        requests.check_knobs(0, draws, c)
        self.engine, self.params, self.tokenizer, self.draws = engine, params, tokenizer, draws
        self._uids = itertools.count()
        # Programs with collectives must reach all devices in one order, whichever thread starts them.
        self._lock = threading.Lock()

    def prefill(self, *, params: Params, existing_prefix: Prefix | None = None, padded_tokens: np.ndarray,
                true_length: int) -> Prefix:
        """Prefix of one prompt: the first `true_length` of padded_tokens [padding] int. The n-th call has uid n."""
        if existing_prefix is not None:
            raise ValueError("a prompt is prefilled whole: existing_prefix is not supported")
        uid = next(self._uids)
        try:
            context = self._context(padded_tokens, true_length)
        except ValueError as error:
            log.warning("request %d gets no tokens: %s", uid, error)
            return Prefix(None, (), uid)
        with self._lock:
            return Prefix(self.engine.prefill(params, [context[:-1]], self.engine.bucket(len(context))), context, uid)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Fill `slot` with `prefix`, or empty it where the request cannot be decoded: then it ends at once."""
        state = decode_state
        self._leave(state, slot)
        state.lengths[slot] = 0
        if prefix.cache is None:
            return state
        prompt = state.tables.store(prefix.context[:-1])
        state.tables.join(slot, prompt)
        state.taken[slot] = True
        with self._lock:
            self.engine.insert(state.chunks, prefix.cache, [prompt.pages])
        c = self.engine.config
        room = min(c.cache_len - len(prefix.context), c.new_tokens or c.cache_len)
        draws = dataclasses.replace(self.draws, max_new_tokens=min(room, self.draws.max_new_tokens))
        requests.fill(state.slots, slot, Request(prefix.uid, list(prefix.context), draws))
        return state

    def generate(self, params: Params, decode_state: DecodeState) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One token for every busy slot. A slot that ended, or whose cache is full, has one that is not valid."""
        state, slots = decode_state, decode_state.slots
        for slot in np.flatnonzero(state.taken & (slots.remaining == 0)):
            self._leave(state, slot)
        for slot in np.flatnonzero(state.taken):
            state.tables.grow(slot)
        forced = np.full((len(state.taken), 1), -1, np.int32)
        with self._lock:
            tables = state.tables.of(range(len(state.taken)), len(state.taken))
            drawn = jax.device_get(self.engine.generate(params, state.chunks, slots, tables, forced))
        tokens, busy = drawn.tokens[:, 0], drawn.counts
        state.lengths[:] += 1
        state.tables.own_len[:] += busy
        slots.tokens[:] = np.where(busy, tokens, slots.tokens)
        slots.positions[:] += busy
        slots.hold[:] -= busy
        slots.remaining[:] = np.where(np.isin(tokens, self.engine.config.stop_ids), 0, slots.remaining - busy)
        data = sharding.to_devices(np.stack([tokens, busy, state.lengths], axis=1), self.engine.slot)
        result = engine_api.ResultTokens(data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3),
                                         samples_per_slot=1)
        return state, result

    def init_decode_state(self) -> DecodeState:
        """All slots idle."""
        count = self.engine.config.slots
        return DecodeState(self.engine.chunks(), self.engine.tables(), Slots.idle(count), np.zeros(count, bool),
                           np.zeros(count, np.int32))

    def _leave(self, state: DecodeState, slot: int) -> None:
        """Free the slot's pages, if it has any."""
        if state.taken[slot]:
            state.tables.leave(slot)
            state.tables.drop()
            state.taken[slot], state.slots.remaining[slot] = False, 0

    def _context(self, padded: np.ndarray, length: int) -> tuple[int, ...]:
        """The prompt; ValueError where it is cut or empty, does not fit, or has a token that the model lacks."""
        if length > len(padded):
            raise ValueError(f"a context of {length} tokens; JetStream cuts it to {len(padded)}")
        context = tuple(int(token) for token in padded[:length])
        context = context[context[:1] == (NO_START,) :]
        cache, vocab = self.engine.config.cache_len, self.engine.cfg.vocab_size
        if not 0 < len(context) < cache:
            raise ValueError(f"a context of {len(context)} tokens; it must have at least 1 and fewer than the cache's "
                             f"{cache}")
        if unknown := [token for token in context if not 0 <= token < vocab]:
            raise ValueError(f"token {unknown[0]} is none of the model's {vocab}")
        self.engine.bucket(len(context))
        return context

    def load_params(self) -> Params:
        """The weights this was made with."""
        return self.params

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Where a prefix goes on its way from one engine to another: to all devices, for insert to lay out."""
        return sharding.replicated(self.engine.mesh)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Where the tokenizer was loaded from."""
        return tokenizer_pb2.TokenizerParameters(path=str(self.tokenizer.hf.name_or_path))

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> JetStreamTokenizer:
        """The tokenizer this was made with; it is not loaded again from `metadata`."""
        return JetStreamTokenizer(self.tokenizer, self.engine.config.stop_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots, as the orchestrator counts them."""
        return _Slots(self.engine.config.slots)

    @property
    def samples_per_slot(self) -> int:
        """One sequence in a slot."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The smallest of PADDINGS that holds the largest prompt bucket and NO_START: the orchestrator dies of any
        other length, and cuts longer prompts, which prefill then rejects."""
        longest = self.engine.config.prompt_buckets[-1] + 1
        return next((padding for padding in PADDINGS if padding >= longest), PADDINGS[-1])

    @property
    def mesh(self) -> Mesh:
        """The mesh of our engine."""
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """None: the host's arrays go to the mesh directly."""


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer as the orchestrator calls it: text requests are encoded, every token is decoded by itself."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: tuple[int, ...]):
        self.tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)

    def encode(self, s: str, *, is_bos: bool = True, **padding: Any) -> tuple[np.ndarray, int]:
        """Ids [length] int32 of a plain-text prompt and their number; `padding` is left to prefill.

        Text that has no ids gives none, and a warning."""
        try:
            ids = self.tokenizer.encode_prompts([s])[0] if is_bos else self.tokenizer.encode(s)
        except ValueError as error:
            log.warning("a text request cannot be encoded: %s", error)
            ids = []
        return np.asarray(ids, np.int32), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of the tokens, which stand inside a text: the space with which one begins is kept. A byte token by
        itself stays `<0xE5>`: the orchestrator joins bytes to characters."""
        if len(token_ids) == 1:
            piece = self.tokenizer.hf.convert_ids_to_tokens(token_ids[0])
            if token_utils.is_byte_token(piece):
                return piece
        before = self.tokenizer.decode(token_ids)
        return self.tokenizer.decode([*token_ids, *token_ids])[len(before) :]

    @property
    def pad_id(self) -> int:
        """What a prompt is padded with."""
        return self.tokenizer.pad_id

    @property
    def bos_id(self) -> int:
        """NO_START: a token request is taken as it is, and `encode` writes the start token of a text itself."""
        return NO_START

    @property
    def eos_id(self) -> int:
        """The smallest stop id; -1 where there is none."""
        return min(self._stop_ids, default=-1)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The engine's stop ids; the orchestrator leaves them out of its answers."""
        return self._stop_ids


def serve(engine: Engine, params: Params, tokenizer: Tokenizer, port: int, draws: SamplingParams = GREEDY,
          credentials: grpc.ServerCredentials | None = None) -> server_lib.JetStreamServer:
    """Start JetStream's orchestrator and its gRPC server on `port`, by default for clients on this machine alone.

    Arguments as of `JetStreamEngine`; `grpc.insecure_server_credentials()` lets everyone in. Returns the running
    server: `wait_for_termination()` serves until the process is told to end, `stop()` ends its threads; requests still
    open are then cancelled, after ten seconds. Raises OSError where the port is taken, ValueError as JetStreamEngine.
    """
    adapter = JetStreamEngine(engine, params, tokenizer, draws)
    with socket.socket() as probe:  # a server that cannot listen would leave its threads behind
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
    devices = list(engine.mesh.devices.flat)
    config = config_lib.ServerConfig(interleaved_slices=(f"mesh={len(devices)}",),
                                     interleaved_engine_create_fns=(lambda _: adapter,))
    return server_lib.run(port, config, devices, credentials or grpc.local_server_credentials(), jax_padding=False)
