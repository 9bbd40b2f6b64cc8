"""What data and models must fulfil together, checked before any device work."""

from __future__ import annotations

import dataclasses
import itertools
import json

from ml_collections import ConfigDict

from rljax import models, tokenizer
from rljax.data import Mixture, PromptSource
from rljax.models import ModelConfig
from rljax.sample import MOST_BIASES


def vocabulary(config: ConfigDict, cfg: ModelConfig, sources: list[PromptSource | Mixture]) -> None:
    """ValueError for a prompt, a stop id or a bias with a token that the model has no row for."""
    for source in sources:
        if source.largest_id >= cfg.vocab_size:
            raise ValueError(f"{source.prompt_data}: a prompt has token {source.largest_id}, but the model of "
                             f"{config.model.path} has vocab_size {cfg.vocab_size}: its tokenizer is another model's")
    if beyond := [one for one in config.rollout.stop_token_ids if one >= cfg.vocab_size]:
        raise ValueError(f"rollout.stop_token_ids holds {beyond[0]}, but the model has vocab_size {cfg.vocab_size}")
    biases = json.loads(config.rollout.logit_bias)
    if len(biases) > MOST_BIASES:
        raise ValueError(f"rollout.logit_bias holds {len(biases)} tokens, at most {MOST_BIASES} can have a bias")
    if beyond := [one for one in biases if int(one) >= cfg.vocab_size]:
        raise ValueError(f"rollout.logit_bias holds {beyond[0]}, but the model has vocab_size {cfg.vocab_size}")


def labels(config: ConfigDict, tok: tokenizer.Tokenizer, source: PromptSource | Mixture, vocab_size: int) -> None:
    """ValueError for a row whose label cannot be a supervised response: no text, longer than max_response_len, or
    with a token that the model has no row for."""
    limit = config.rollout.max_response_len
    places = [one.state() for one in source.sources]
    for sample in itertools.chain.from_iterable(one.take(one.num_rows) for one in source.sources):
        if (size := len(sample.response_tokens)) > limit:
            raise ValueError(f"{config.data.prompt_data}: a conversation has {size} tokens from its first answer on, "
                             f"above rollout.max_response_len {limit}; it begins {sample.prompt[0]!r}")
        if sample.response_tokens:
            continue
        if not isinstance(sample.label, str):
            raise ValueError(f"{config.data.prompt_data}: supervised data needs text labels; the prompt "
                             f"{sample.prompt!r} has {sample.label!r}")
        try:
            ids = [*tok.encode(sample.label), *([] if tok.hf.eos_token_id is None else [tok.hf.eos_token_id])]
        except ValueError as error:
            raise ValueError(f"{config.data.prompt_data}: the label of {sample.prompt!r}: {error}") from error
        if max(ids, default=0) >= vocab_size:
            raise ValueError(f"{config.data.prompt_data}: the label of {sample.prompt!r} has token {max(ids)}, but the "
                             f"model has vocab_size {vocab_size}")
        if (length := len(ids)) > limit:
            raise ValueError(f"{config.data.prompt_data}: the label of the prompt {sample.prompt!r} has {length} "
                             f"tokens with its end token, above rollout.max_response_len {limit}")
    for one, place in zip(source.sources, places, strict=True):
        one.restore(place)


def length(config: ConfigDict, num_rollouts: int, updates: int) -> None:
    """ValueError where a decaying learning rate or the critic's head start would last as long as the run."""
    optim, alone = config.optim, config.algo.num_critic_only_steps
    if optim.schedule != "constant" and optim.warmup_steps >= num_rollouts * updates:
        raise ValueError(f"optim.warmup_steps = {optim.warmup_steps}: with optim.schedule = {optim.schedule} it must "
                         f"be below the run's {num_rollouts * updates} updates")
    if alone >= num_rollouts:
        raise ValueError(f"algo.num_critic_only_steps = {alone}: must be below the run's {num_rollouts} rollouts, or "
                         f"the policy never moves")


def reference(config: ConfigDict, cfg: ModelConfig) -> None:
    """ValueError where model.ref_path is a model of another kind than the policy: one program scores both."""
    if config.model.ref_path:
        _same_kind("model.ref_path", config.model.ref_path, config, cfg)


def critic(config: ConfigDict, cfg: ModelConfig) -> None:
    """ValueError where model.critic_path is a model of another kind than the policy."""
    if config.model.critic_path:
        _same_kind("model.critic_path", config.model.critic_path, config, cfg)


def _same_kind(knob: str, path: str, config: ConfigDict, cfg: ModelConfig) -> None:
    other = models.load_config(path)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(cfg, field.name), getattr(other, field.name)
        if ours != theirs and field.compare and field.name != "max_position_embeddings":
            raise ValueError(f"{knob} {path!r} is another kind of model than model.path {config.model.path!r}: "
                             f"{field.name} is {theirs!r} there and {ours!r} here")


def teacher(config: ConfigDict, tok: tokenizer.Tokenizer) -> None:
    """ValueError where the teacher's tokenizer is not the student's: it must read the same ids as the same tokens."""
    if not config.algo.opd_kl_coef > 0:
        return
    path = config.model.teacher_path
    theirs, ours = tokenizer.load(path).hf.get_vocab(), tok.hf.get_vocab()
    differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
    if differing:
        token, index = differing[0]
        raise ValueError(f"model.teacher_path {path!r}: its tokenizer is not that of model.path "
                         f"{config.model.path!r}: {len(ours)} and {len(theirs)} tokens, the first that only one of "
                         f"them has is {token!r} with id {index}")
    if (rows := models.load_config(path).vocab_size) <= max(ours.values()):
        raise ValueError(f"model.teacher_path {path!r}: vocab_size {rows} has no row for token {max(ours.values())}")
