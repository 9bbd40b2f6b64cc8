"""From a config to the parts of a run: where the ConfigDict ends and plain arguments begin."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rljax import algorithms, checkpoint, checks, models, packing, plugins, sharding, surrogates, tokenizer
from rljax import config as configs
from rljax.algo_rules import needs_critic, needs_reference
from rljax.config_rules import max_prompt_len, row_buckets
from rljax.critic import Critic
from rljax.data import Mixture, PromptSource, parse_mixture
from rljax.evaluation import EvalSet
from rljax.experience import TokenWeights
from rljax.kernels import cpu
from rljax.models import ModelConfig
from rljax.optimizer import OptimizerConfig
from rljax.policy import LossConfig
from rljax.rewards.pool import RewardPool
from rljax.sample import Sample, SamplingParams
from rljax.sampler.engine import Engine, EngineConfig
from rljax.sampler.scheduler import Scheduler
from rljax.trainer import Scorer, Trainer

log = logging.getLogger(__name__)
MOST_SLOTS = 512
POST_PROCESSES = ("dcpo",)
DATA_KEYS = ("input_key", "label_key", "metadata_key", "prompt_suffix")  # that an evaluation set may have of its own
CACHE_SHARE = 0.25  # of a device's memory, for the sampler's cache
USUAL_SHARE = 4  # a response's usual length is the longest one's by this number: so many slots share the cache
PAGE, CPU_PAGE = 128, 64  # positions; accelerators read whole registers of 128
KERNELS = ("tpu", "gpu")  # backends with one of attention over pages
MOST_MEMBERS = 16  # of a stored prompt; a larger group stores it again
CHUNK, CPU_CHUNK = 4096, 512  # tokens of a prefill program
CPU_PARTS, CPU_ROW_LEVELS = 3, 3  # see EngineConfig
SHORT_CACHE = 1024  # positions of a sample, up to which the whole cache is read as fast as parts of it
PEAKS = {  # part of a device kind -> bfloat16 operations per second, dense, by the makers; the first that fits counts
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12, "A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12,
}  # fmt: skip


@dataclasses.dataclass
class Parts:
    """What the loop drives."""

    tokenizer: tokenizer.Tokenizer
    mesh: Mesh
    trainer: Trainer
    critic: Critic | None
    teacher: Scorer | None
    engine: Engine
    scheduler: Scheduler
    source: PromptSource | Mixture
    eval_sets: list[EvalSet]
    sampling: SamplingParams
    estimator: algorithms.Estimator
    token_weights: TokenWeights | None  # the user's loss aggregation
    post_process: Callable[[list[Sample]], None] | None  # of rewards
    needs_reference: bool
    num_rollouts: int
    updates_per_rollout: int
    flops_per_token: float  # of training, see `flops_per_token`
    peak_flops: float | None  # of one device, None where it is not known


def build(config: ConfigDict) -> Parts:
    """All parts but weights and reward workers; reads data and tokenizer first, so bad input is found here."""
    algo, estimator = config.algo, algorithms.find(config.algo.advantage_estimator)
    surrogates.find(algo.surrogate)  # the loss looks it up again while it is traced, after the first rollout
    cfg = models.load_config(config.model.path)
    checks.reference(config, cfg)
    checks.critic(config, cfg)
    tok = tokenizer.load(config.model.path, json.loads(config.model.chat_template_kwargs))
    conversations = algo.advantage_estimator == "sft" and not config.data.label_key
    source = prompt_source(config, tok, config.data.prompt_data, shuffle=config.data.shuffle,
                           conversations=conversations)
    if algo.advantage_estimator == "sft":
        checks.labels(config, tok, source, cfg.vocab_size)
    checks.teacher(config, tok)
    eval_sets = [eval_set(config, tok, entry) for entry in config.eval.data if config.eval.interval]
    checks.vocabulary(config, cfg, [source, *(one.source for one in eval_sets)])
    num_rollouts = config.rollout.num_rollouts
    if config.rollout.num_epochs:
        num_rollouts = max(1, config.rollout.num_epochs * source.num_rows // config.rollout.batch_size)
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    updates = samples // (config.train.global_batch_size or samples)
    optim = optimizer_config(config, num_rollouts * updates)
    checks.length(config, num_rollouts, updates)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    sampling = sampling_params(config, config.rollout, config.rollout.max_response_len)
    loss = loss_config(config)
    trainer = Trainer(cfg, mesh, loss, optim, config.optim.clip_grad)
    critic = teacher = None
    if needs_critic(config):
        its = dataclasses.replace(optim, lr=config.optim.critic_lr, trainable=".*", frozen="")
        critic = Critic(cfg, mesh, loss, algo.value_clip, its, config.optim.clip_grad)
    if algo.opd_kl_coef > 0:
        teacher = Scorer(models.load_config(config.model.teacher_path), mesh, loss)
    new_tokens = max([sampling.max_new_tokens, *(s.sampling.max_new_tokens for s in eval_sets)])
    engine = Engine(cfg, engine_config(config, cfg, tok, mesh, new_tokens), mesh)
    scheduler = Scheduler(engine, functools.partial(tokenizer.find_stop, tok))
    return Parts(
        tok, mesh, trainer, critic, teacher, engine, scheduler, source, eval_sets, sampling, estimator,
        token_weights(config), post_process(config), needs_reference(config), num_rollouts, updates,
        flops_per_token(cfg), peak_flops(jax.devices()[0].device_kind),
    )


def token_weights(config: ConfigDict) -> TokenWeights | None:
    """The user's function that `algo.loss_aggregation` names, None for a built-in mode."""
    name = config.algo.loss_aggregation
    if name in packing.LOSS_MODES:
        return None
    return plugins.find("algo.loss_aggregation", name, "", packing.LOSS_MODES, "")


def post_process(config: ConfigDict) -> Callable[[list[Sample]], None] | None:
    """What sees all samples of a rollout once they are scored: reward.post_process, with dcpo that of dcpo."""
    name = config.reward.post_process or ("dcpo" if config.algo.advantage_estimator == "dcpo" else "")
    if not name:
        return None
    function = plugins.find("reward.post_process", name, algorithms.__name__, POST_PROCESSES, "post_process")
    return lambda samples: function(samples, config)


def flops_per_token(cfg: ModelConfig) -> float:
    """6 x the parameters of the matrices that one token meets (forward 2, backward 4): the head once, the looked-up
    embedding not, of experts those that a token is sent to. Attention over the context is left out."""
    flat = jax.tree_util.tree_flatten_with_path(models.specs(cfg), is_leaf=lambda leaf: hasattr(leaf, "axes"))[0]
    matrices = 0.0
    for path, leaf in flat:
        if leaf.init != "normal" or (path[-1].key == "embed" and not cfg.tied):
            continue
        used = cfg.experts_per_token / cfg.num_experts if "experts" in leaf.axes else 1.0
        matrices += math.prod(leaf.shape) * used
    return 6.0 * matrices


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations per second of one device; None for a kind that PEAKS does not know."""
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)


def starting_checkpoint(config: ConfigDict, run_dir: pathlib.Path) -> pathlib.Path | None:
    """The checkpoint that a run in `run_dir` goes on from, None for a new run.

    The run's own newest one comes first, also where checkpoint.load names another: so the same command continues a
    run that was interrupted. Raises ValueError where the directory belongs to a run of another config, where
    checkpoint.load = none meets a run, and where it names a place without a whole checkpoint.
    """
    load, own = config.checkpoint.load, checkpoint.newest(checkpoint_dir(config, run_dir))
    _refuse_other_config(config, run_dir, own)
    recorded = [run_dir / name for name in ("metrics.jsonl", "samples.jsonl")]
    if load == "none" and (own or any(file.exists() and file.stat().st_size for file in recorded)):
        raise ValueError(f"checkpoint.load = none, but {own or run_dir} holds a run, whose record and checkpoints "
                         f"would be overwritten: choose another log.dir, or delete that one")
    if own is not None or load in ("auto", "none"):
        return own
    folder = checkpoint.newest(pathlib.Path(load).expanduser())
    if folder is None:
        raise ValueError(f"checkpoint.load = {load!r}: there is no whole checkpoint in it; expected a run's directory, "
                         f"its checkpoints, or one of them")
    for change in configs.diff(checkpoint.read_host(folder)["config"], config.to_dict()):
        log.info("a new run from %s, whose config differs: %s", folder, change)
    return folder


def _refuse_other_config(config: ConfigDict, run_dir: pathlib.Path, own: pathlib.Path | None) -> None:
    """ValueError naming each knob that differs from the run's and may not."""
    saved = {}
    if (file := run_dir / "config.json").exists():
        try:
            saved[run_dir] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from error
    if own is not None:
        saved[own] = checkpoint.read_host(own)["config"]
    for place, before in saved.items():
        if changed := configs.diff(before, config.to_dict()):
            raise ValueError(f"{place} is of a run with another config; choose another log.dir, or set back "
                             + ", and ".join(changed))


def compute_dtype(name: str) -> Any:
    """auto: bfloat16 on accelerators, float32 on a CPU."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def prompt_source(config: ConfigDict, tok: tokenizer.Tokenizer, path: str, *, shuffle: bool,
                  conversations: bool = False) -> PromptSource | Mixture:
    """Stage 1's source of `path`, a mixture where it names several, under the `data` knobs."""
    data, parts = config.data, parse_mixture(path)
    if len(parts) > 1:
        sources = [prompt_source(config, tok, one, shuffle=shuffle, conversations=conversations) for _, one in parts]
        return Mixture(sources, [weight for weight, _ in parts])
    return PromptSource(
        parts[0][1], tok, max_prompt_len=max_prompt_len(config), input_key=data.input_key, label_key=data.label_key,
        metadata_key=data.metadata_key, tool_key=data.tool_key, shuffle=shuffle, seed=data.seed,
        chat_template=config.model.chat_template, prompt_suffix=data.prompt_suffix, conversations=conversations,
    )


def eval_set(config: ConfigDict, tok: tokenizer.Tokenizer, entry: str) -> EvalSet:
    """One entry `name=path` of eval.data, with its eval.overrides; knobs of -1 are the rollout's."""
    name, _, path = entry.partition("=")
    config = copy.deepcopy(config)  # ConfigDict(config) would share the sections
    own = json.loads(config.eval.overrides).get(name, {})
    for key, value in own.items():
        if key != "reward":
            config["data" if key in DATA_KEYS else "eval"][key] = value
    chosen = ConfigDict(config.rollout)
    for key in ("temperature", "top_p", "top_k"):
        if config.eval[key] >= 0:
            chosen[key] = config.eval[key]
    length = config.rollout.max_response_len if config.eval.max_response_len < 0 else config.eval.max_response_len
    try:
        source = prompt_source(config, tok, path, shuffle=False)
    except ValueError as error:
        raise ValueError(f"eval.data {entry!r}: {error}. Evaluation sets are read with the data knobs: set eval.data "
                         f"to name=path of your own, eval.overrides for another key, or eval.interval=0") from error
    return EvalSet(name, source, config.eval.n_samples, sampling_params(config, chosen, length), own.get("reward", ""))


def sampling_params(config: ConfigDict, knobs: ConfigDict, length: int) -> SamplingParams:
    """How one kind of request is drawn."""
    return SamplingParams(
        max_new_tokens=length, temperature=knobs.temperature, top_p=knobs.top_p, top_k=max(knobs.top_k, 0),
        min_p=knobs.min_p, stop=tuple(config.rollout.stop), min_new_tokens=min(config.rollout.min_new_tokens, length),
        logit_bias=tuple((int(token), float(bias)) for token, bias in json.loads(config.rollout.logit_bias).items()),
    )


def loss_config(config: ConfigDict) -> LossConfig:
    """The `algo` knobs that the device loss reads, with temperature and dtypes."""
    algo, dtype = config.algo, compute_dtype(config.model.compute_dtype)
    by_default = "dots" if jax.default_backend() == "cpu" else "full"
    remat = by_default if config.model.remat == "auto" else config.model.remat
    return LossConfig(
        surrogate=algo.surrogate, eps_clip=algo.eps_clip, eps_clip_high=algo.eps_clip_high, dual_clip=algo.dual_clip,
        kl_loss_coef=algo.kl_loss_coef, kl_loss_type=algo.kl_loss_type, kl_unbiased=algo.kl_unbiased,
        kl_metric=algo.kl_metric, entropy_coef=algo.entropy_coef, is_correction=algo.is_correction,
        is_level=algo.is_level, is_low=algo.is_low, is_high=algo.is_high, opsm_delta=algo.opsm_delta,
        temperature=config.rollout.temperature, compute_dtype=dtype, remat=remat,
    )


def optimizer_config(config: ConfigDict, total_updates: int) -> OptimizerConfig:
    """The `optim` knobs, with what may move."""
    o = config.optim
    return OptimizerConfig(
        lr=o.lr, schedule=o.schedule, warmup_steps=o.warmup_steps, total_updates=total_updates,
        weight_decay=o.weight_decay, b1=o.b1, b2=o.b2, eps=o.eps,
        trainable=config.model.trainable, frozen=config.model.frozen,
    )


def engine_config(config: ConfigDict, cfg: ModelConfig, tok: tokenizer.Tokenizer, mesh: Mesh, new_tokens: int):
    """Shapes of the sampler: the smallest bucket that holds the longest prompt and `new_tokens`, a cache that fits in
    memory, slots."""
    sampler, longest = config.sampler, max_prompt_len(config) + new_tokens
    fitting = [length for length in sampler.length_buckets if length >= longest]
    if not fitting:
        raise ValueError(f"sampler.length_buckets: the largest, {sampler.length_buckets[-1]}, holds no prompt and "
                         f"response of {longest} tokens")
    dtype = compute_dtype(config.model.compute_dtype if sampler.dtype == "auto" else sampler.dtype)
    cache_dtype = dtype if sampler.cache_dtype == "auto" else jnp.dtype(sampler.cache_dtype)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    position_bytes = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * cache_dtype.itemsize
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    parts = mesh.shape["tensor"] if cfg.num_kv_heads % mesh.shape["tensor"] == 0 else 1  # of each page: its heads
    room = sampler.cache_tokens or int(CACHE_SHARE * device_memory() * shards * parts // position_bytes)
    most = max(USUAL_SHARE * room // longest, shards)
    slots = sampler.slots or _multiple(min(samples, MOST_SLOTS, most), shards)
    buckets = tuple(b for b in sampler.prompt_buckets if b < max_prompt_len(config))
    buckets += (next(b for b in sampler.prompt_buckets if b >= max_prompt_len(config)),)
    return EngineConfig(
        slots=slots, cache_len=fitting[0], new_tokens=new_tokens, prompt_buckets=buckets,
        prefill_rows=_multiple(config.rollout.batch_size, shards),
        prefill_chunk=sampler.prefill_chunk or (CPU_CHUNK if jax.default_backend() == "cpu" else CHUNK),
        steps_per_dispatch=sampler.steps_per_dispatch, resumes=config.rollout.partial,
        stop_ids=tuple(sorted({*tok.stop_ids, *config.rollout.stop_token_ids})),
        vocab_known=min(tok.vocab_size, cfg.vocab_size), dtype=dtype, seed=config.train.seed,
        members=min(max(config.rollout.n_samples_per_prompt, config.eval.n_samples), MOST_MEMBERS),
        cache_tokens=room, cache_dtype=cache_dtype, **_programs(cfg, dtype, cache_dtype, fitting[0], mesh),
        int8_weights=sampler.weight_dtype == "int8", alternatives=sampler.top_logprobs,
    )


def _programs(cfg: ModelConfig, dtype: Any, cache_dtype: Any, cache_len: int, mesh: Mesh) -> dict[str, Any]:
    """How decoding is compiled on this backend. A CPU's time goes with the rows of a program, and in float32 it mostly
    gives each row the same bits in any of them; others gain little."""
    backend = jax.default_backend()
    if backend != "cpu":
        return {"kernel": backend if backend in KERNELS else "xla", "page_len": PAGE}
    levels = CPU_ROW_LEVELS if dtype == jnp.float32 and not cfg.num_experts and jax.process_count() == 1 else 1
    shared = {"row_levels": levels, "page_len": CPU_PAGE}
    if dtype == jnp.float32 and cache_dtype in (jnp.float32, jnp.int8) and mesh.size == 1 and cpu.available():
        return {"kernel": "cpu", **shared}
    return {"parts": CPU_PARTS if cache_len > SHORT_CACHE else 1, **shared}


def _multiple(count: int, of: int) -> int:
    return max(of, -(-count // of) * of)


def device_memory() -> int:
    """Bytes of one device's memory; on a CPU, of the machine's memory divided by its devices."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def reward_pool(config: ConfigDict) -> RewardPool:
    """Stage 3's workers. ValueError naming reward.type where none can start."""
    r = config.reward
    try:
        return RewardPool(r.type, also=sorted({
            own["reward"] for own in json.loads(config.eval.overrides).values() if "reward" in own
        }), workers=r.workers, timeout_s=r.timeout_s, memory_mb=r.memory_mb,
                          fallback=r.fallback, key=r.key, url=r.url)
    except ValueError as error:
        raise ValueError(f"reward.type = {r.type!r}: {error}") from error


def pack_shapes(config: ConfigDict, trainer: Trainer) -> dict[str, Any]:
    """Arguments of `packing.pack` under this config."""
    return {"buckets": row_buckets(config), "max_tokens_per_device": config.train.max_tokens_per_device,
            "data_shards": trainer.data_shards}


def checkpoint_dir(config: ConfigDict, run_dir: pathlib.Path) -> pathlib.Path:
    """checkpoint.dir, or the run's own."""
    return pathlib.Path(config.checkpoint.dir).expanduser() if config.checkpoint.dir else run_dir / "checkpoints"
