"""RLOO on grpo_qwen.py's model and data, with the KL in the reward (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.algo.advantage_estimator = "rloo"
    c.algo.surrogate = "reinforce"
    c.algo.kl_loss_coef = 0.0
    c.algo.kl_coef = 0.001
    return c
