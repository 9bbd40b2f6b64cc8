"""Dr. GRPO on grpo_qwen.py's model and data: no bias by length or difficulty (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.algo.normalize_std = False
    c.algo.loss_aggregation = "constant"  # by max_response_len
    c.algo.kl_loss_coef = 0.0
    c.algo.eps_clip_high = 0.2
    return c
