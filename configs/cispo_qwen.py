"""CISPO on grpo_qwen.py's model and data: no token loses its gradient (MiniMax-M1 2025, arXiv 2506.13585)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.algo.surrogate = "cispo"
    c.algo.eps_clip = 0.99  # no bound from below, as in the paper
    c.algo.eps_clip_high = 4.0
    c.algo.kl_loss_coef = 0.0
    c.train.global_batch_size = 512  # four updates per rollout
    return c
