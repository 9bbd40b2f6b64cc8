"""GRPO on SmolLM2-135M-Instruct on the CPU: additions in a chat prompt. First run launch/fetch_smollm2.sh."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant:
        raise ValueError(f"grpo_smollm2.py has no variant {variant!r}")
    c = config.get_config()
    c.model.path = "models/SmolLM2-135M-Instruct"
    c.data.prompt_data = "builtin:additions/train.jsonl"
    c.rollout.batch_size = 16
    c.rollout.n_samples_per_prompt = 8
    c.rollout.num_rollouts = 30
    c.rollout.max_response_len = 24
    c.sampler.slots = 64
    c.sampler.prompt_buckets = (64,)
    c.sampler.length_buckets = (96,)
    c.sampler.steps_per_dispatch = 8
    c.reward.type = "math"
    c.optim.lr = 1e-5
    c.train.global_batch_size = 64  # two updates per rollout
    c.train.max_tokens_per_device = 2048
    c.eval.interval = 10
    c.eval.data = ("additions=builtin:additions/heldout.jsonl",)
    c.eval.temperature = 0.0
    c.checkpoint.save_interval = 10
    return c
