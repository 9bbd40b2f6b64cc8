"""What every metric means and where it is healthy: the registry behind `--explain` and a check on what is logged.

A name in braces stands for any text: `rollout/reward/{part}`. `eval/{name}/...` takes every sample-level metric
of a rollout.
"""

from __future__ import annotations

import difflib
import re

PREFIXES = {"rollout": ("rollout/", "perf/"), "train": ("train/",), "eval": ("eval/",)}  # by the axis of its steps

METRICS: dict[str, tuple[str, str]] = {  # name: (meaning, healthy range)
    "rollout/raw_reward": (
        "mean reward of the samples, before normalisation",
        "rises over the run; the curve to watch",
    ),
    "rollout/rewards": (
        "mean reward after group normalisation",
        "about 0 always: it says nothing about learning",
    ),
    "rollout/reward/{part}": ("mean of one named part of the reward", "depends on the part"),
    "rollout/response_len/mean": ("mean response length, tokens", "steady, or grows with the reward"),
    "rollout/response_len/median": ("median response length, tokens", "near the mean"),
    "rollout/response_len/max": ("longest response, tokens", "below rollout.max_response_len most of the time"),
    "rollout/response_len/min": ("shortest response, tokens", "above 1: empty answers are a collapse"),
    "rollout/truncated_ratio": (
        "share of responses cut at rollout.max_response_len",
        "below 0.1; more wants a larger limit, or is rambling",
    ),
    "rollout/repetition_frac": ("share of responses that end in a loop of repeated text", "below 0.05"),
    "rollout/zero_std/count_{reward}": (
        "groups whose samples all have this reward: they teach nothing",
        "a minority of the groups; rises towards the end as all become right",
    ),
    "rollout/passrate/pass@{k}": (
        "chance that at least one of k samples of a prompt is right (reward at least 1)",
        "rises; a wide gap between pass@1 and a large k is room to learn",
    ),
    "rollout/log_probs": ("mean log-prob of the response tokens by the trainer, nats", "-0.1 to -2; near 0 = collapse"),
    "rollout/ref_log_probs": ("mean log-prob of the response tokens by the reference, nats", "falls as the KL grows"),
    "rollout/rollout_log_probs": ("mean log-prob of the response tokens by the sampler, nats", "as rollout/log_probs"),
    "rollout/kl": ("mean KL estimate between policy and reference, nats per token", "0 at first; below about 0.1"),
    "rollout/entropy": ("mean entropy of the policy at the response tokens, nats", "falls slowly; 0 = no exploration"),
    "rollout/teacher_log_probs": ("mean log-prob of the tokens by the teacher, nats", "near rollout/log_probs"),
    "rollout/values": ("mean value by the critic, before the updates", "near rollout/returns"),
    "rollout/returns": ("mean return: advantage plus value", "near rollout/raw_reward where kl_coef is 0"),
    "rollout/extra/{key}": ("mean of a number that a hook wrote into train_metadata", "depends on the hook"),
    "rollout/dynamic_filter/drop_{reason}": ("groups that rollout.dynamic_filter refused", "below the groups kept"),
    "rollout/sample_filter/dropped": ("samples that rollout.sample_filter took out of training", "a minority"),
    "rollout/buffer_filter/dropped": ("interrupted groups that rollout.buffer_filter refused", "0"),
    "rollout/buffered_groups": ("interrupted groups that the next rollout begins with", "below the prompts in flight"),
    "rollout/restarted_samples": ("interrupted samples older than max_version_lag, drawn anew", "0"),
    "rollout/offpolicy_tokens_frac": ("share of the response tokens drawn by older weights", "below 0.3"),
    "rollout/max_version_lag": ("rollouts between the oldest token's weights and today's", "1 or 2"),
    "rollout/dcpo/confidence": ("mean stated confidence", "near the accuracy"),
    "rollout/dcpo/calibration_error": ("mean |accuracy - stated confidence|", "falls; 0.5 is no better than chance"),
    "rollout/dcpo/brier": ("mean (accuracy - stated confidence)^2", "falls; below 0.25"),
    "rollout/dcpo/ece": ("expected calibration error in 10 bins of stated confidence", "below 0.1"),
    "rollout/dcpo/missing_confidence": ("share of responses without a valid confidence", "0"),
    "rollout/advantages": ("mean advantage of the trained tokens", "about 0"),
    "rollout/reward_errors": ("samples whose reward raised or was invalid, and took the fallback", "0"),
    "rollout/reward_timeouts": ("samples whose reward exceeded reward.timeout_s, and took the fallback", "0"),
    "eval/{name}": ("mean reward on this set", "rises over the run"),
    "eval/{name}-truncated_ratio": ("share of responses cut at the limit on this set", "below 0.1"),
    "eval/{name}-pass@{k}": ("chance that at least one of k samples of a prompt is right", "rises over the run"),
    "rollout/passrate/maj@{n}": (
        "share of prompts whose most frequent answer of n is right (evaluation only)", "above pass@1",
    ),
    "eval/{name}-maj@{n}": ("share of prompts whose most frequent answer of n is right", "above pass@1"),
    "train/loss": (
        "sum of loss weight times token loss over the update",
        "near 0 and without trend: it says nothing about learning",
    ),
    "train/pg_loss": ("policy part of the loss", "near 0 and without trend: it says nothing about learning"),
    "train/kl_loss": ("KL to the reference as the loss has it, before its coefficient, nats", "0 at first; below 0.1"),
    "train/entropy_loss": ("mean entropy as the loss has it, before its coefficient, nats", "falls slowly"),
    "train/pg_clipfrac": (
        "share of the trained tokens whose ratio was clipped",
        "0 is normal on-policy (one update per rollout); below 0.2 with several",
    ),
    "train/ppo_kl": (
        "masked mean of old minus new log-prob, nats",
        "0 is normal on-policy; within 0.05 of 0 with several updates",
    ),
    "train/train_rollout_logprob_abs_diff": (
        "mean difference of the trainer's and the sampler's log-probs, nats",
        "below 1e-4 in float32 and 0.01 in bfloat16; above 0.01 wants a look",
    ),
    "train/train_rollout_logprob_abs_diff_max": (
        "largest such difference of one token, nats",
        "below 1e-3 in float32; single tokens up to 1 in bfloat16",
    ),
    "train/missing_rollout_logprobs": ("trained tokens without a log-prob by the sampler, taken as the trainer's", "0"),
    "train/tis": ("mean ratio of the trainer's to the sampler's probability, at is_level, before bounds", "near 1"),
    "train/tis_clipfrac": ("share of the trained tokens whose ratio lies outside [is_low, is_high]", "below 0.05"),
    "train/tis_abs": ("mean |ratio - 1|, before bounds", "below 0.05"),
    "train/opsm_clipfrac": ("share of the trained tokens left out because their sample drifted", "below 0.1"),
    "train/extra/{key}": ("mean over trained tokens of what a surrogate of your own returned", "depends on it"),
    "train/value_loss": ("squared error of the critic, clipped", "falls at first"),
    "train/value_clipfrac": ("share of the trained tokens whose value moved beyond value_clip", "below 0.2"),
    "train/critic_grad_norm": ("global norm of the critic's gradient before clipping", "steady"),
    "train/critic_lr": ("learning rate of the critic's update", "as optim.critic_lr and optim.schedule say"),
    "train/critic_nonfinite_skips": ("critic updates skipped in a row for a gradient that was not finite", "0"),
    "train/explained_variance": (
        "1 - var(returns - values) / var(returns), values from before the update",
        "rises above 0.5 while the reward still varies; below 0 the critic is worse than a constant",
    ),
    "train/grad_norm": ("global norm of the gradient before clipping", "steady; a jump by 10 or more wants a look"),
    "train/lr": ("learning rate of the update", "as optim.lr and optim.schedule say"),
    "train/nonfinite_skips": ("updates skipped in a row for a gradient that was not finite", "0"),
    "perf/rollout_time": ("seconds for drawing the responses", "the largest part of step_time"),
    "perf/reward_wait_time": ("seconds of waiting for rewards after the last response", "near 0"),
    "perf/score_time": ("seconds for the log-probs of policy and reference", "below train_time"),
    "perf/train_time": ("seconds for the updates", "below rollout_time with long responses"),
    "perf/sync_time": ("seconds for handing new weights to the sampler", "near 0"),
    "perf/sync_bytes": ("bytes of the sampler's weights that are made anew", "constant"),
    "perf/save_time": ("seconds of waiting for checkpoints", "near 0 with checkpoint.async_save"),
    "perf/step_time": ("seconds for the whole rollout, training included", "steady after warm-up"),
    "perf/rollout_tokens_per_device_per_sec": ("response tokens drawn per second and device", "steady"),
    "perf/rollout_effective_tokens_per_device_per_sec": (
        "trainable response tokens drawn per second and device",
        "near rollout_tokens_per_device_per_sec",
    ),
    "perf/train_tokens_per_device_per_sec": ("tokens of packed rows trained per second and device", "steady"),
    "perf/train_effective_tokens_per_device_per_sec": (
        "trainable tokens trained per second and device",
        "train_tokens_per_device_per_sec times the share of responses in the rows",
    ),
    "perf/slot_utilization": ("share of slot steps that drew a token in use", "above 0.7"),
    "perf/prefix_shared_tokens": ("prompt tokens that a group shared instead of computing again", "above 0"),
    "perf/preempted": ("responses that gave their part of the cache to older ones, and were fed again", "near 0"),
    "perf/packing_efficiency": ("real tokens / tokens of the rows", "above 0.8"),
    "perf/tflops_per_device": (
        "6 x matrix parameters x row tokens / perf/train_time, per device, 1e12; attention is left out",
        "steady",
    ),
    "perf/mfu": (
        "tflops_per_device / the device's bfloat16 peak, where that is known",
        "0.3 to 0.6 on accelerators",
    ),
    "perf/compiles": ("programs compiled since the start", "constant after warm-up; growth is a defect"),
    "perf/device_memory_peak": ("highest memory in use on one device, bytes", "below the device's memory"),
}
PATTERNS = {
    name: re.compile(".+".join(re.escape(part) for part in re.split(r"\{\w+\}", name))) for name in METRICS
}


def find(name: str) -> str | None:
    """The entry of METRICS that `name` belongs to, or None: itself, a pattern, or a rollout metric of a set."""
    if name in METRICS:
        return name
    sample_level = re.fullmatch(r"eval/[^/]+/(.+)", name)
    if sample_level:
        return find(f"rollout/{sample_level[1]}")
    matches = [known for known, pattern in PATTERNS.items() if "{" in known and pattern.fullmatch(name)]
    return max(matches, key=len, default=None)


def explain(name: str) -> str:
    """Two lines, meaning and healthy range; an unknown name raises ValueError with the nearest ones."""
    known = find(name)
    if known is None:
        near = [entry for entry in METRICS if name in entry]
        near = near or difflib.get_close_matches(name, METRICS, n=3, cutoff=0.0)
        raise ValueError(f"unknown metric {name!r}; the nearest are {', '.join(near)}")
    meaning, healthy = METRICS[known]
    return f"{name}: {meaning}\nhealthy: {healthy}"


def check(axis: str, names: list[str]) -> None:
    """Raise ValueError where a name is not registered, or does not belong to the steps of `axis`."""
    for name in names:
        if not name.startswith(PREFIXES[axis]):
            raise ValueError(f"metric {name!r} does not belong to {axis}/step")
        if find(name) is None:
            explain(name)
