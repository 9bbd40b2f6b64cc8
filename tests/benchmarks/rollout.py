"""What the host loop costs: 2,048 samples of up to 256 tokens through a fake engine, real reward workers, packing.

The engine draws nothing: it returns tokens at once, 16 a slot and dispatch, and ends each sample at a length of its
own, between 13 and 256 (20-fold). So what is left is the loop's own time: scheduling, rewards' bookkeeping, filters,
advantages, packing. Printed: its CPU seconds (this process, its threads included), and the utilisation of the slots
over the whole rollout and before its drain, when no request waits any more.

    python tests/benchmarks/rollout.py [--samples 2048] [--slots 64]
"""

from __future__ import annotations

import argparse
import collections
import time
import types

import numpy as np

from rljax import algorithms
from rljax import config as configs
from rljax.experience import Experience, Weights
from rljax.gather import Gathering, Prompts
from rljax.metrics import Timers
from rljax.rewards.pool import RewardPool
from rljax.rollout import Rollout
from rljax.sample import Sample, SamplingParams
from rljax.sampler.decode import Drawn, EngineConfig
from rljax.sampler.pages import PageTables
from rljax.sampler.scheduler import Scheduler

SHORTEST, LONGEST, END = 13, 256, 1


class Engine:
    """The engine's interface without a model: sample `uid` has length lengths[uid]."""

    def __init__(self, lengths: np.ndarray, slots: int):
        self.config = EngineConfig(slots=slots, cache_len=1024, prompt_buckets=(64,), prefill_rows=slots,
                                   steps_per_dispatch=16, stop_ids=(END,), vocab_known=1000)
        self.cfg = types.SimpleNamespace(vocab_size=1000)
        self.lengths, self.row_counts, self.pages = lengths, [slots], self.config.pages(1)

    def tables(self) -> PageTables:
        return PageTables(self.config.slots, *self.pages, self.config.columns, 1, self.config.page)

    def chunks(self) -> list:
        return []

    def bucket(self, length: int) -> int:
        return 64

    def rows(self, bucket: int) -> int:
        return self.config.prefill_rows

    def prefill(self, params, prompts, bucket):
        return prompts

    def insert(self, chunks, prefix, pages):
        pass

    def generate(self, params, chunks, slots, tables, forced) -> Drawn:
        left = self.lengths[slots.uids] - (slots.positions - tables.prompt_len)
        counts = np.where(slots.remaining > 0, np.minimum(left, forced.shape[1]), 0)
        tokens = np.full(forced.shape, 7, np.int32)
        ending = np.flatnonzero((counts > 0) & (left <= forced.shape[1]))
        tokens[ending, left[ending] - 1] = END
        none = np.zeros((*forced.shape, 0))
        return Drawn(tokens, np.full(tokens.shape, -0.5, np.float32), counts, none, none)


class Source:
    """Prompts of 20 tokens for ever."""

    def take(self, count: int) -> list[Sample]:
        return [Sample(uid=0, group=0, prompt="", label="7", prompt_tokens=[5] * 20) for _ in range(count)]


class Tokenizer:
    def decode(self, ids):
        return "The answer is 7"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=2048)
    options.add_argument("--slots", type=int, default=64)
    options = options.parse_args()
    config = configs.get_config()
    config.train.max_tokens_per_device = 8192
    size, groups = 8, options.samples // 8
    lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, options.samples)
    scheduler = Scheduler(Engine(lengths, options.slots))
    drain: list[tuple[int, int]] = []
    step = scheduler.step
    total = collections.Counter()

    def watched(params):
        total.update(scheduler.take_counts())
        if total["drawn"] and not scheduler.queue and not drain:
            drain.append((total["drawn"], total["slot_steps"]))
        return step(params)

    scheduler.step = watched
    with RewardPool("exact_match", workers=2) as pool:
        rollout = Rollout(scheduler, Tokenizer(), pool, Timers())
        begun, wall = time.process_time(), time.monotonic()
        gathering = Gathering(Prompts(Source(), size).take, groups, groups, groups, lambda group: "")
        found = rollout.gather({}, gathering, SamplingParams(LONGEST), 0)
        total.update(scheduler.take_counts())
        drawn, drawn_wall = time.process_time() - begun, time.monotonic() - wall
    samples = [sample for group in found.kept for sample in group]
    made = Experience(config, None, algorithms.find("grpo"), on_policy=True, shapes={
        "buckets": (512, 1024), "max_tokens_per_device": 8192, "data_shards": 1})
    begun = time.process_time()
    updates, _ = made.make(samples, Weights(None))
    packed = time.process_time() - begun
    tokens = sum(len(sample.response_tokens) for sample in samples)
    print(f"{len(samples)} samples, {tokens} tokens, {total['dispatches']} dispatches, {options.slots} slots")
    print(f"host CPU seconds: rollout {drawn:.2f} (wall {drawn_wall:.2f}), advantages and packing {packed:.2f}, "
          f"together {drawn + packed:.2f}")
    before, whole = drain[0][0] / max(drain[0][1], 1), total["drawn"] / total["slot_steps"]
    print(f"slot utilisation: {whole:.3f} over all, {before:.3f} before the drain; "
          f"{len(updates[0].batches)} micro-batches")


if __name__ == "__main__":
    main()
