"""Teaches the built-in model to state a confidence below its answer: where both arms of dcpo_tiny.py start.

    python -m rljax.launch --config sft_confidence_tiny.py --config.log.dir=runs/confidence
"""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant:
        raise ValueError(f"sft_confidence_tiny.py has no variant {variant!r}")
    c = config.load(config.CONFIGS / "sft_tiny.py")
    c.model.init = "load"
    c.data.prompt_data = "builtin:confidence/warmup.jsonl"
    c.rollout.batch_size = 128
    c.rollout.num_rollouts = 256
    c.rollout.max_response_len = 24
    c.sampler.length_buckets = (40,)
    c.reward.type = "dcpo"
    c.optim.warmup_steps = 10
    c.eval.interval = 128
    c.checkpoint.save_hf_interval = 256
    c.checkpoint.save_hf_dtype = "float32"
    return c
