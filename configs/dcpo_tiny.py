"""Calibrated confidences on the built-in model's sums: DCPO (arXiv 2603.09117), and GRPO beside it for comparison.

    python -m rljax.launch --config sft_confidence_tiny.py --config.log.dir=runs/confidence      # the start of both
    python -m rljax.launch --config dcpo_tiny.py                                                 # or dcpo_tiny.py:grpo
"""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant not in ("", "dcpo", "grpo"):
        raise ValueError(f"dcpo_tiny.py has no variant {variant!r}; there are dcpo, which is the default, and grpo")
    c = config.load(config.CONFIGS / "quickstart.py")
    c.model.path = "runs/confidence/hf/256"
    c.rollout.num_rollouts = 60
    c.rollout.max_response_len = 24
    c.sampler.length_buckets = (40,)
    c.reward.type = "dcpo"
    c.algo.advantage_estimator = "dcpo"
    c.train.max_tokens_per_device = 4096
    c.eval.interval = 5
    c.eval.n_samples = 4
    c.checkpoint.save_interval = 0
    c.checkpoint.save_hf_interval = 5  # as often as the evaluations, for tests/benchmarks/calibration.py
    c.checkpoint.save_hf_dtype = "float32"
    if variant == "grpo":
        c.algo.advantage_estimator = "grpo"
        c.reward.post_process = "dcpo"  # trains nothing here: the confidences are read and measured alike
    return c
