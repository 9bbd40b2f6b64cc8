"""GRPO on the built-in model and its sums: the default, a few minutes on a laptop's CPU."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant:
        raise ValueError(f"quickstart.py has no variant {variant!r}")
    c = config.get_config()
    c.model.path = "tiny"
    c.data.prompt_data = "builtin:sums/train.jsonl"
    c.rollout.batch_size = 64
    c.rollout.n_samples_per_prompt = 8
    c.rollout.num_rollouts = 150
    c.rollout.max_response_len = 8
    c.sampler.prompt_buckets = (16,)
    c.sampler.length_buckets = (32,)
    c.sampler.steps_per_dispatch = 8
    c.reward.type = "exact_match"
    c.optim.lr = 2e-4
    c.train.global_batch_size = 256  # two updates per rollout
    c.train.max_tokens_per_device = 2048
    c.eval.interval = 25
    c.eval.data = ("sums=builtin:sums/heldout.jsonl",)
    c.checkpoint.save_interval = 25
    return c
