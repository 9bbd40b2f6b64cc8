"""From a config to the parts of a run: where the ConfigDict ends and plain arguments begin."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rljax import models, sharding, tokenizer
from rljax.config_rules import max_prompt_len, row_buckets
from rljax.data import PromptSource
from rljax.evaluate import EvalSet
from rljax.models import ModelConfig
from rljax.optimizer import OptimizerConfig
from rljax.rewards.pool import RewardPool
from rljax.sample import SamplingParams
from rljax.sampler.engine import Engine, EngineConfig
from rljax.sampler.scheduler import Scheduler
from rljax.trainer import LossConfig, Trainer
from rljax.types import Params

MOST_SLOTS = 512
CACHE_SHARE = 0.25  # of a device's memory, for the sampler's cache
PREFILL_TOKENS = 2048  # of one prefill program, where sampler.prefill_rows is auto


@dataclasses.dataclass
class Parts:
    """What the loop drives."""

    tokenizer: tokenizer.Tokenizer
    mesh: Mesh
    trainer: Trainer
    engine: Engine
    scheduler: Scheduler
    source: PromptSource
    eval_sets: list[EvalSet]
    sampling: SamplingParams
    num_rollouts: int
    updates_per_rollout: int


def build(config: ConfigDict) -> Parts:
    """All parts but weights and reward workers; reads data and tokenizer, so bad input is found here."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    cfg = models.load_config(config.model.path)
    tok = tokenizer.load(config.model.path, json.loads(config.model.chat_template_kwargs))
    source = prompt_source(config, tok, config.data.prompt_data, shuffle=config.data.shuffle)
    eval_sets = [eval_set(config, tok, entry) for entry in config.eval.data]
    num_rollouts = config.rollout.num_rollouts
    if config.rollout.num_epochs:
        num_rollouts = max(1, config.rollout.num_epochs * source.num_rows // config.rollout.batch_size)
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    updates = samples // (config.train.global_batch_size or samples)
    sampling = sampling_params(config, config.rollout, config.rollout.max_response_len)
    trainer = Trainer(
        cfg, mesh, loss_config(config), optimizer_config(config, num_rollouts * updates), config.optim.clip_grad
    )
    longest = max_prompt_len(config) + max([sampling.max_new_tokens, *(s.sampling.max_new_tokens for s in eval_sets)])
    engine = Engine(cfg, engine_config(config, cfg, tok, mesh, longest), mesh)
    scheduler = Scheduler(engine, functools.partial(tokenizer.find_stop, tok))
    return Parts(tok, mesh, trainer, engine, scheduler, source, eval_sets, sampling, num_rollouts, updates)


def compute_dtype(name: str) -> Any:
    """auto: bfloat16 on accelerators, float32 on a CPU."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def prompt_source(config: ConfigDict, tok: tokenizer.Tokenizer, path: str, *, shuffle: bool) -> PromptSource:
    """Stage 1's source of `path` under the `data` knobs."""
    data = config.data
    return PromptSource(
        path, tok, max_prompt_len=max_prompt_len(config), input_key=data.input_key, label_key=data.label_key,
        metadata_key=data.metadata_key, tool_key=data.tool_key, shuffle=shuffle, seed=data.seed,
        chat_template=config.model.chat_template,
    )


def eval_set(config: ConfigDict, tok: tokenizer.Tokenizer, entry: str) -> EvalSet:
    """One entry `name=path` of eval.data; knobs of -1 are the rollout's."""
    name, _, path = entry.partition("=")
    chosen = ConfigDict(config.rollout)
    for key in ("temperature", "top_p", "top_k"):
        if config.eval[key] >= 0:
            chosen[key] = config.eval[key]
    length = config.rollout.max_response_len if config.eval.max_response_len < 0 else config.eval.max_response_len
    source = prompt_source(config, tok, path, shuffle=False)
    return EvalSet(name, source, config.eval.n_samples, sampling_params(config, chosen, length))


def sampling_params(config: ConfigDict, knobs: ConfigDict, length: int) -> SamplingParams:
    """How one kind of request is drawn."""
    return SamplingParams(
        max_new_tokens=length, temperature=knobs.temperature, top_p=knobs.top_p, top_k=max(knobs.top_k, 0),
        min_p=knobs.min_p, stop=tuple(config.rollout.stop),
    )


def loss_config(config: ConfigDict) -> LossConfig:
    """The `algo` knobs that the device loss reads, with temperature and dtypes."""
    algo, dtype = config.algo, compute_dtype(config.model.compute_dtype)
    remat = config.model.remat == "full" or (config.model.remat == "auto" and jax.default_backend() != "cpu")
    return LossConfig(
        surrogate=algo.surrogate, eps_clip=algo.eps_clip, eps_clip_high=algo.eps_clip_high, dual_clip=algo.dual_clip,
        kl_loss_coef=algo.kl_loss_coef, kl_loss_type=algo.kl_loss_type, kl_metric=algo.kl_metric,
        entropy_coef=algo.entropy_coef, temperature=config.rollout.temperature, compute_dtype=dtype, remat=remat,
    )


def optimizer_config(config: ConfigDict, total_updates: int) -> OptimizerConfig:
    """The `optim` knobs, with what may move."""
    o = config.optim
    return OptimizerConfig(
        lr=o.lr, schedule=o.schedule, warmup_steps=o.warmup_steps, total_updates=total_updates,
        weight_decay=o.weight_decay, b1=o.b1, b2=o.b2, eps=o.eps,
        trainable=config.model.trainable, frozen=config.model.frozen,
    )


def engine_config(config: ConfigDict, cfg: ModelConfig, tok: tokenizer.Tokenizer, mesh: Mesh, longest: int):
    """Shapes of the sampler: the smallest cache bucket that holds `longest` tokens, and slots that fit in memory."""
    sampler = config.sampler
    fitting = [length for length in sampler.length_buckets if length >= longest]
    if not fitting:
        raise ValueError(f"sampler.length_buckets: the largest, {sampler.length_buckets[-1]}, holds no prompt and "
                         f"response of {longest} tokens")
    dtype = compute_dtype(config.model.compute_dtype if sampler.dtype == "auto" else sampler.dtype)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    slot_bytes = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * fitting[0] * dtype.itemsize
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    room = int(CACHE_SHARE * device_memory() * mesh.size // slot_bytes)
    slots = sampler.slots or _multiple(min(samples, MOST_SLOTS, max(room, shards)), shards)
    buckets = tuple(b for b in sampler.prompt_buckets if b < max_prompt_len(config))
    buckets += (next(b for b in sampler.prompt_buckets if b >= max_prompt_len(config)),)
    rows = sampler.prefill_rows or _multiple(min(config.rollout.batch_size, max(1, PREFILL_TOKENS // buckets[0])), shards)
    return EngineConfig(
        slots=slots, cache_len=fitting[0], prompt_buckets=buckets, prefill_rows=rows,
        steps_per_dispatch=sampler.steps_per_dispatch,
        stop_ids=tuple(sorted({*tok.stop_ids, *config.rollout.stop_token_ids})),
        vocab_known=min(tok.vocab_size, cfg.vocab_size), dtype=dtype, seed=config.train.seed,
    )


def _multiple(count: int, of: int) -> int:
    return max(of, -(-count // of) * of)


def device_memory() -> int:
    """Bytes of one device's memory; on a CPU, of the machine's memory divided by its devices."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def initial_params(config: ConfigDict, trainer: Trainer, path: str) -> Params:
    """Float32 weights in the trainer's layout: of `path`, or new ones where model.init is random."""
    if config.model.init == "random":
        fresh = jax.jit(functools.partial(models.init, trainer.cfg), out_shardings=trainer.shardings)
        return fresh(jax.random.key(config.train.seed))
    return models.load(path, shardings=trainer.shardings)[1]


def reward_pool(config: ConfigDict) -> RewardPool:
    """Stage 3's workers."""
    r = config.reward
    return RewardPool(r.type, workers=r.workers, timeout_s=r.timeout_s, memory_mb=r.memory_mb, fallback=r.fallback,
                      key=r.key)


def pack_shapes(config: ConfigDict, trainer: Trainer) -> dict[str, Any]:
    """Arguments of `packing.pack` under this config."""
    return {"buckets": row_buckets(config), "max_tokens_per_device": config.train.max_tokens_per_device,
            "data_shards": trainer.data_shards}


def checkpoint_dir(config: ConfigDict, run_dir: pathlib.Path) -> pathlib.Path:
    """checkpoint.dir, or the run's own."""
    return pathlib.Path(config.checkpoint.dir) if config.checkpoint.dir else run_dir / "checkpoints"
