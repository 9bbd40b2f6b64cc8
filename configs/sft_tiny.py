"""Supervised warm-up of the built-in model: how the weights that the quickstart starts from were made."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant:
        raise ValueError(f"sft_tiny.py has no variant {variant!r}")
    c = config.get_config()
    c.model.path = "tiny"
    c.model.init = "random"
    c.data.prompt_data = "builtin:sums/warmup.jsonl"
    c.rollout.batch_size = 256
    c.rollout.n_samples_per_prompt = 1  # the label is the response
    c.rollout.num_rollouts = 700
    c.rollout.max_response_len = 8
    c.sampler.prompt_buckets = (16,)
    c.sampler.length_buckets = (32,)
    c.sampler.steps_per_dispatch = 8
    c.reward.type = "exact_match"
    c.algo.advantage_estimator = "sft"
    c.algo.surrogate = "sft"
    c.algo.loss_aggregation = "token_mean"
    c.optim.lr = 2e-3
    c.optim.schedule = "cosine"
    c.optim.warmup_steps = 20
    c.train.max_tokens_per_device = 4096
    c.eval.interval = 175
    c.eval.data = ("sums=builtin:sums/heldout.jsonl",)
    c.checkpoint.save_hf_interval = 700
    c.checkpoint.save_hf_dtype = "float16"
    return c
