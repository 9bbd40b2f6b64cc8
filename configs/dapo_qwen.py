"""DAPO on grpo_qwen.py's model and data (Yu et al. 2025, arXiv 2503.14476): clip-higher, overlong penalty."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.rollout.dynamic_filter = "reward_std"  # groups of equal rewards are replaced
    c.rollout.over_sampling_batch_size = 384
    c.rollout.max_response_len = 4096
    c.sampler.length_buckets = (1024, 2048, 5120, 17408)
    c.reward.overlong_buffer_len = 1024
    c.reward.overlong_penalty = 1.0
    c.algo.loss_aggregation = "token_mean"
    c.algo.eps_clip_high = 0.28
    c.algo.kl_loss_coef = 0.0
    c.train.global_batch_size = 512  # four updates per rollout
    return c
