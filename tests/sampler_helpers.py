"""One tiny engine that the tests of sampler, rollout and evaluation share, and weights that write a given text."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import numpy as np

from rljax import sharding
from rljax.kernels import cpu
from rljax.models import ModelConfig, Rope, decoder
from rljax.sample import SamplingParams
from rljax.sampler.decode import Drawn
from rljax.sampler.engine import Engine, EngineConfig
from rljax.sampler.pages import PageTables
from rljax.sampler.scheduler import Request, Scheduler, complete

VOCAB, KNOWN, STOP_IDS = 128, 120, (0, 1, 7, 106)
CONFIG = ModelConfig(
    model_type="llama", vocab_size=VOCAB, hidden_size=VOCAB, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=32, norm_eps=1e-6, tied=False, max_position_embeddings=64, attention_scale=0.25,
    windows=(0, 6), ropes=(Rope(1e4, 16),), rope_ids=(0, 0), initializer_range=0.15,
)
SHAPE = EngineConfig(slots=8, cache_len=48, prompt_buckets=(8, 16, 32), prefill_rows=4, steps_per_dispatch=4,
                     stop_ids=STOP_IDS, vocab_known=KNOWN, seed=5, members=4, parts=3, row_levels=1, page_len=8)


def kernel() -> str:
    """What a run takes on this machine."""
    return "cpu" if cpu.available() else "xla"


QUICK = dataclasses.replace(SHAPE, parts=1, kernel=kernel())  # to compile


def one_device() -> Any:
    return sharding.make_mesh(devices=jax.devices()[:1])


@functools.cache
def engine() -> Engine:
    return Engine(CONFIG, SHAPE, one_device())


@functools.cache
def master(seed: int = 0) -> Any:
    """Random float32 parameters in the trainer's form."""
    return decoder.init(CONFIG, jax.random.key(seed))


@functools.cache
def weights(seed: int = 0) -> Any:
    return engine().weights(master(seed))


def table(logits: np.ndarray) -> Any:
    """Weights whose next-token logits depend on the last token alone: logits [V, V], row = last token."""
    width = np.sqrt(np.float32(VOCAB))  # the final norm makes this of a one-hot embedding
    params = jax.tree.map(np.zeros_like, jax.device_get(master()))
    params |= {"embed": np.eye(VOCAB, dtype=np.float32), "final_norm": np.ones(VOCAB, np.float32),
               "lm_head": (logits.T / width).astype(np.float32)}
    return engine().weights(params)


def chain(*stream: int) -> Any:
    """Weights that write `stream[1:]` after its first token, with certainty; other tokens repeat themselves."""
    logits = np.full((VOCAB, VOCAB), -200.0, np.float32)
    np.fill_diagonal(logits, 0.0)
    for token, following in zip(stream, stream[1:], strict=False):
        logits[token] = -200.0
        logits[token, following] = 0.0
    return table(logits)


def draw(requests: list[Request], params: Any = None, scheduler: Scheduler | None = None) -> list[Request]:
    scheduler = scheduler or Scheduler(engine())
    return complete(scheduler, weights() if params is None else params, requests)


def request(uid: int, length: int = 5, new: int = 10, **knobs: Any) -> Request:
    """A request with a context of its own."""
    context = np.random.default_rng(uid).integers(8, 100, length).tolist()
    return Request(uid, context, SamplingParams(max_new_tokens=new, **knobs))


def same(one: Request, other: Request) -> None:
    """Bit for bit."""
    assert one.tokens == other.tokens and one.logprobs == other.logprobs
    assert (one.end_reason, one.text) == (other.end_reason, other.text)


class Scripted:
    """Engine of the host's view alone: request `uid` writes `scripts[uid]`, then repeats itself; log-probs -0.5."""

    def __init__(self, scripts, slots=4, stop_ids=(1,), **config):
        shape = {"cache_len": 4096, "prompt_buckets": (1024,), "steps_per_dispatch": 4} | config
        self.config = EngineConfig(slots=slots, prefill_rows=slots, stop_ids=stop_ids, vocab_known=10**6, **shape)
        self.cfg = types.SimpleNamespace(vocab_size=10**6)
        self.scripts, self.row_counts, self.pages = scripts, [slots], self.config.pages(1)

    def tables(self):
        return PageTables(self.config.slots, *self.pages, self.config.columns, 1, self.config.page)

    def chunks(self):
        return []

    def bucket(self, length):
        return 1024

    def rows(self, bucket):
        return self.config.prefill_rows

    def prefill(self, params, prompts, bucket):
        return prompts

    def insert(self, chunks, prefix, pages):
        pass

    def long_prefix(self, resumed=False):
        return None

    def extend(self, params, prefix, sequence, start):
        return prefix

    def insert_own(self, chunks, prefix, pages, start):
        pass

    def generate(self, params, chunks, slots, tables, forced):
        count, steps = forced.shape
        tokens, counts = np.zeros((count, steps), np.int32), np.zeros(count, np.int32)
        remaining = slots.remaining.copy()
        for index in np.flatnonzero(remaining > 0):
            script = self.scripts.get(int(slots.uids[index]), [2])
            at = slots.positions[index] - tables.prompt_len[index]
            for step in range(steps):
                if remaining[index] <= 0:
                    break
                token = script[min(at + step, len(script) - 1)]
                if forced[index, step] >= 0:
                    assert forced[index, step] == token
                tokens[index, step] = token
                remaining[index] = 0 if token in self.config.stop_ids else remaining[index] - 1
                counts[index] += 1
        none = np.zeros((count, steps, 0))
        return Drawn(tokens, np.full((count, steps), -0.5, np.float32), counts, none, none)
