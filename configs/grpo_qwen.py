"""GRPO on Qwen3 with competition mathematics, on TPUs or GPUs: grpo_qwen.py is Qwen3-0.6B, grpo_qwen.py:8b Qwen3-8B."""

from __future__ import annotations

from rljax import config

MODELS = {"": "Qwen/Qwen3-0.6B", "0.6b": "Qwen/Qwen3-0.6B", "8b": "Qwen/Qwen3-8B"}


def get_config(variant=""):
    if variant not in MODELS:
        raise ValueError(f"grpo_qwen.py has no variant {variant!r}; there are 0.6b and 8b")
    c = config.get_config()
    c.model.path = MODELS[variant]
    c.data.prompt_data = "zhuzilin/dapo-math-17k"
    c.rollout.batch_size = 256
    c.rollout.n_samples_per_prompt = 8
    c.rollout.num_rollouts = 2000
    c.rollout.max_response_len = 3000
    c.rollout.temperature = 1.0
    c.sampler.prompt_buckets = (128, 256, 512, 1024)
    c.sampler.length_buckets = (1024, 2048, 4096, 8192, 17408)  # the last holds an evaluation's prompt and response
    c.reward.type = "math"
    c.algo.loss_aggregation = "token_mean"
    c.algo.eps_clip = 0.2
    c.algo.eps_clip_high = 0.28
    c.algo.kl_loss_coef = 0.01
    c.algo.kl_loss_type = "low_var_kl"
    c.optim.lr = 1e-6
    c.optim.schedule = "constant"
    c.optim.weight_decay = 0.1
    c.optim.b1, c.optim.b2 = 0.9, 0.98
    c.train.global_batch_size = 2048  # the whole rollout: on-policy
    c.train.max_tokens_per_device = 9216
    c.eval.interval = 20
    c.eval.data = ("aime=zhuzilin/aime-2024",)
    c.eval.n_samples = 1
    c.eval.temperature = 0.0
    c.eval.max_response_len = 16384
    c.checkpoint.save_interval = 40
    if variant == "8b":
        c.mesh.tensor = 4
    return c
