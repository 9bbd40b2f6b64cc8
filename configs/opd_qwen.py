"""On-policy distillation of Qwen3-8B into Qwen3-0.6B on grpo_qwen.py's data (arXiv 2306.13649)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.model.teacher_path = "Qwen/Qwen3-8B"
    c.algo.advantage_estimator = "opd"
    c.algo.opd_kl_coef = 1.0
    c.algo.kl_loss_coef = 0.0
    return c
