"""Decoding with a real model: transformers' greedy tokens, the trainer's log-probs, the same bits from any row count."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import sampler_helpers as tiny
from sampler_helpers import draw, same
from test_gguf import smollm2, smollm2_goldens

from rljax import models
from rljax.optimizer import OptimizerConfig
from rljax.packing import PackItem, pack
from rljax.policy import LossConfig
from rljax.sample import SamplingParams
from rljax.sampler.engine import Engine, EngineConfig
from rljax.sampler.scheduler import Request, Scheduler
from rljax.trainer import Trainer

pytestmark = pytest.mark.slow


@functools.cache
def loaded():
    """(config, parameters, engine, its weights), warmed up."""
    cfg, params = models.load(smollm2())
    engine = Engine(cfg, EngineConfig(
        slots=32, cache_len=256, prompt_buckets=(128,), prefill_rows=2, steps_per_dispatch=8, stop_ids=(2,),
        vocab_known=cfg.vocab_size, members=4, row_levels=3, cache_tokens=8192,
        kernel=tiny.kernel()), tiny.one_device())
    weights = engine.weights(params)
    engine.warmup(weights)
    return cfg, params, engine, weights


def prompts():
    return [golden["prompt_ids"] for golden in smollm2_goldens()["greedy"]]


def test_greedy_equals_the_golden_tokens():
    _, _, engine, weights = loaded()
    goldens = smollm2_goldens()["greedy"]
    greedy = SamplingParams(24, temperature=0.0)
    requests = draw([Request(i, ids, greedy) for i, ids in enumerate(prompts())], weights, Scheduler(engine))
    assert [r.tokens for r in requests] == [golden["ids"] for golden in goldens]


def test_greedy_equals_transformers_on_fifty_prompts():
    """Made by tests/benchmarks/greedy.py: the two best logits of every step are apart."""
    _, _, engine, weights = loaded()
    rows = json.loads((pathlib.Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
    greedy = [Request(i, row["prompt"], SamplingParams(32, temperature=0.0)) for i, row in enumerate(rows)]
    draw(greedy, weights, Scheduler(engine))
    assert len(rows) == 50
    assert [r.tokens for r in greedy] == [row["greedy"] for row in rows]


def test_programs_of_fewer_rows_give_the_same_bits():
    """Alone a sample decodes in 8 rows, in the crowd in 32."""
    _, _, engine, weights = loaded()
    assert engine.row_counts == [8, 16, 32]
    crowd = draw([Request(uid, ids, SamplingParams(24)) for uid, ids in enumerate(prompts() * 8)], weights,
                 Scheduler(engine))
    for uid in (0, 9, 30):
        same(draw([Request(uid, crowd[uid].context, SamplingParams(24))], weights, Scheduler(engine))[0], crowd[uid])


def test_log_probs_equal_the_trainers():
    cfg, params, engine, weights = loaded()
    requests = draw([Request(uid, ids, SamplingParams(40)) for uid, ids in enumerate(prompts())], weights,
                    Scheduler(engine))
    trainer = Trainer(cfg, tiny.one_device(), LossConfig(), OptimizerConfig(lr=0.0))
    zeros = [np.zeros(len(r.tokens), np.float32) for r in requests]
    items = [PackItem(np.asarray(r.context + r.tokens), len(r.context), np.ones(len(r.tokens), np.int32), zero, zero,
                      zero, zero, np.asarray(r.logprobs, np.float32)) for r, zero in zip(requests, zeros, strict=True)]
    for batch in pack(items, buckets=(512,), max_tokens_per_device=512, data_shards=1):
        logp, _ = trainer.score(jax.device_put(params, trainer.shardings), batch)
        gap = np.abs(np.asarray(logp) - np.asarray(batch.rollout_logprobs))[np.asarray(batch.loss_mask) > 0]
        assert gap.max() < 1e-4
