"""DCPO on grpo_qwen.py's model and data: answers with calibrated confidences (arXiv 2603.09117). dcpo_qwen.py:grpo is
GRPO with the same prompts, for comparison (tests/benchmarks/calibration.py)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant not in ("", "dcpo", "grpo"):
        raise ValueError(f"dcpo_qwen.py has no variant {variant!r}; there are dcpo, which is the default, and grpo")
    c = config.load(config.CONFIGS / "grpo_qwen.py")
    c.data.prompt_suffix = (
        "\n\nAfter your answer, state on a last line how likely it is to be right, as a number between 0 and 1:\n"
        "CONFIDENCE: <0..1>"
    )
    c.reward.type = "dcpo"
    c.reward.post_process = "dcpo"  # also where it trains nothing: the confidences are read and measured alike
    c.algo.advantage_estimator = "grpo" if variant == "grpo" else "dcpo"
    c.algo.kl_loss_coef = 0.0
    return c
