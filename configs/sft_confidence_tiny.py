"""Teaches the built-in model to state a confidence below its answer: where both arms of dcpo_tiny.py start.

    python -m rljax.launch --config sft_confidence_tiny.py --config.log.dir=runs/confidence
"""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    if variant:
        raise ValueError(f"sft_confidence_tiny.py has no variant {variant!r}")
    c = config.get_config()
    c.model.path = "tiny"
    c.data.prompt_data = "builtin:confidence/warmup.jsonl"
    c.rollout.batch_size = 128
    c.rollout.n_samples_per_prompt = 1  # the label is the response
    c.rollout.num_rollouts = 256
    c.rollout.max_response_len = 24
    c.sampler.prompt_buckets = (16,)
    c.sampler.length_buckets = (40,)
    c.sampler.steps_per_dispatch = 8
    c.reward.type = "dcpo"
    c.algo.advantage_estimator = "sft"
    c.algo.surrogate = "sft"
    c.algo.loss_aggregation = "token_mean"
    c.optim.lr = 2e-3
    c.optim.schedule = "cosine"
    c.optim.warmup_steps = 10
    c.train.max_tokens_per_device = 4096
    c.eval.interval = 128
    c.eval.data = ("sums=builtin:sums/heldout.jsonl",)
    c.checkpoint.save_hf_interval = 256
    c.checkpoint.save_hf_dtype = "float32"
    return c
