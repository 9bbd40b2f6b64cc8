"""DCPO on grpo_qwen.py's model and data: answers with calibrated confidences (arXiv 2603.09117)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.data.prompt_suffix = (
        "\n\nAfter your answer, state on a last line how likely it is to be right, as a number between 0 and 1:\n"
        "CONFIDENCE: <0..1>"
    )
    c.reward.type = "dcpo"
    c.algo.advantage_estimator = "dcpo"
    c.algo.kl_loss_coef = 0.0
    return c
