"""REINFORCE++ on grpo_qwen.py's model and data: whitened over the whole rollout (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.algo.advantage_estimator = "reinforce_plus_plus"
    c.algo.kl_loss_coef = 0.0
    c.algo.kl_coef = 0.001  # in the token rewards
    c.algo.gamma = 1.0
    c.train.global_batch_size = 512  # four updates per rollout
    return c
