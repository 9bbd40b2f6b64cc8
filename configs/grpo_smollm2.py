"""GRPO on SmolLM2-135M-Instruct on the CPU: one-digit additions in a chat. First run launch/fetch_smollm2.sh."""

from rljax import config


def get_config(variant=""):
    if variant:
        raise ValueError(f"grpo_smollm2.py has no variant {variant!r}")
    c = config.get_config()
    c.model.path = "models/SmolLM2-135M-Instruct"
    c.data.prompt_data = "builtin:additions/train.jsonl"
    c.rollout.batch_size = 8
    c.rollout.n_samples_per_prompt = 8
    c.rollout.num_rollouts = 30
    c.rollout.max_response_len = 20
    c.sampler.prompt_buckets = (64, 128, 256)
    c.sampler.length_buckets = (64, 128, 256, 512)
    c.data.max_prompt_len = 44
    c.sampler.steps_per_dispatch = 10
    c.reward.type = "math"
    c.optim.lr = 1e-5
    c.train.global_batch_size = 32  # two updates per rollout
    c.train.max_tokens_per_device = 1024
    c.eval.interval = 10
    c.eval.data = ("additions=builtin:additions/heldout.jsonl",)
    c.eval.n_samples = 4
    c.checkpoint.save_interval = 10
    c.checkpoint.keep = 1
    return c
