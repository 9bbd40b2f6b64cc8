"""GRPO on Llama 3.2 Instruct with grade-school word problems: grpo_llama.py is 1B, grpo_llama.py:3b is 3B."""

from __future__ import annotations

from rljax import config

MODELS = {
    "": "meta-llama/Llama-3.2-1B-Instruct",
    "1b": "meta-llama/Llama-3.2-1B-Instruct",
    "3b": "meta-llama/Llama-3.2-3B-Instruct",
}


def get_config(variant=""):
    if variant not in MODELS:
        raise ValueError(f"grpo_llama.py has no variant {variant!r}; there are 1b and 3b")
    c = config.get_config()
    c.model.path = MODELS[variant]
    c.data.prompt_data = "openai/gsm8k/main/train-*"
    c.data.input_key = "question"
    c.data.label_key = "answer"  # the reward takes what follows ####
    c.rollout.batch_size = 128
    c.rollout.n_samples_per_prompt = 8
    c.rollout.num_rollouts = 300
    c.rollout.max_response_len = 768
    c.sampler.prompt_buckets = (128, 256)
    c.sampler.length_buckets = (512, 1024)
    c.reward.type = "gsm8k"
    c.algo.eps_clip_high = 0.28
    c.algo.kl_loss_coef = 0.001
    c.optim.lr = 1e-6
    c.optim.warmup_steps = 10
    c.train.global_batch_size = 512  # two updates per rollout
    c.train.max_tokens_per_device = 8192
    c.eval.interval = 20
    c.eval.data = ("gsm8k=openai/gsm8k/main/test-*",)
    c.eval.temperature = 0.0
    c.checkpoint.save_interval = 50
    return c
