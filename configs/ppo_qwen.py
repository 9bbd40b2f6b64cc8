"""PPO with a critic on grpo_qwen.py's model and data (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from rljax import config


def get_config(variant=""):
    c = config.load(config.CONFIGS / "grpo_qwen.py", variant=variant)
    c.algo.advantage_estimator = "ppo"
    c.algo.kl_loss_coef = 0.0
    c.algo.kl_coef = 0.001  # in the token rewards
    c.algo.gamma = 1.0
    c.algo.lambd = 1.0
    c.algo.value_clip = 0.2
    c.algo.normalize_advantages = True
    c.algo.num_critic_only_steps = 5
    c.optim.critic_lr = 1e-5
    c.train.global_batch_size = 512  # four updates per rollout
    return c
