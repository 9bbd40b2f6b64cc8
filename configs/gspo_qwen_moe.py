"""GSPO on a mixture of experts, Qwen3-30B-A3B: the ratio of whole sequences (Zheng et al. 2025, arXiv 2507.18071)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.model.path = "Qwen/Qwen3-30B-A3B"
    c.algo.surrogate = "gspo"
    c.algo.loss_aggregation = "sample_mean"
    c.algo.eps_clip = 3e-4  # of a mean over tokens: a thousandth of the token's
    c.algo.eps_clip_high = 4e-4
    c.algo.kl_loss_coef = 0.0
    c.train.global_batch_size = 512  # four updates per rollout
    return c
