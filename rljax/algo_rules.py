"""What must hold among the `algo` knobs and the models they use, and how a rule is stated. See `config_rules.py`."""

from __future__ import annotations

import re

from ml_collections import ConfigDict

ESTIMATORS = ("grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "dcpo", "opd",
              "sft")
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "dcpo")  # a group of one teaches them nothing
SURROGATES = ("clip", "gspo", "cispo", "reinforce", "sft")
CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
AGGREGATIONS = ("sample_mean", "token_mean", "constant")
OLD_LOGPROBS = ("trainer", "rollout")
PENALTIES = ("overlong_buffer_len", "repetition_penalty", "format_penalty")
FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def require(holds: bool, message: str) -> None:
    """ValueError with `message` unless it holds."""
    if not holds:
        raise ValueError(message)


def one_of(name: str, value: str, known: tuple[str, ...], path: bool = False) -> None:
    """`value` is a known name, or with `path` also of the form package.module:function."""
    more = " or package.module:function" if path else ""
    if value not in known and not (path and FUNCTION_PATH.fullmatch(value)):
        raise ValueError(f"{name} = {value!r}: expected {', '.join(one or 'nothing' for one in known)}{more}")


def needs_critic(config: ConfigDict) -> bool:
    """Whether a critic is trained: with ppo always."""
    return config.algo.critic or config.algo.advantage_estimator == "ppo"


def needs_reference(config: ConfigDict) -> bool:
    """Whether a reference is scored: for a KL in the reward, in the loss or as a metric."""
    return config.algo.kl_coef > 0 or config.algo.kl_loss_coef > 0 or config.algo.kl_metric


def check_algo(config: ConfigDict) -> None:
    """The loss and its parts."""
    algo, count = config.algo, config.rollout.n_samples_per_prompt
    one_of("algo.advantage_estimator", algo.advantage_estimator, ESTIMATORS, path=True)
    one_of("algo.surrogate", algo.surrogate, SURROGATES, path=True)
    one_of("algo.loss_aggregation", algo.loss_aggregation, AGGREGATIONS, path=True)
    one_of("algo.kl_loss_type", algo.kl_loss_type, KL_TYPES)
    one_of("algo.kl_reward_type", algo.kl_reward_type, KL_TYPES)
    one_of("algo.old_logprobs", algo.old_logprobs, OLD_LOGPROBS)
    one_of("algo.is_correction", algo.is_correction, CORRECTIONS)
    one_of("algo.is_level", algo.is_level, LEVELS)
    require(
        algo.dual_clip == 0 or algo.dual_clip > 1, f"algo.dual_clip = {algo.dual_clip}: must be 0 (off) or above 1"
    )
    require(
        algo.loss_length == 0 or algo.loss_aggregation == "constant",
        f"algo.loss_length = {algo.loss_length}: is for algo.loss_aggregation constant, not {algo.loss_aggregation}",
    )
    pair = f"algo.advantage_estimator = {algo.advantage_estimator}"
    require(
        (algo.advantage_estimator == "sft") == (algo.surrogate == "sft"),
        f"{pair} with algo.surrogate = {algo.surrogate}: sft goes with sft only",
    )
    require(
        algo.advantage_estimator not in GROUP_ESTIMATORS or count > 1,
        f"{pair} with rollout.n_samples_per_prompt = {count}: a group of fewer than 2 has advantage 0 always",
    )
    require(
        algo.advantage_estimator != "sft" or count == 1,
        f"{pair} with rollout.n_samples_per_prompt = {count}: a label is one response, so it must be 1",
    )
    _check_models(config)
    _check_corrections(config)
    _check_idle(config)


def _check_models(config: ConfigDict) -> None:
    """Reference, critic and teacher: each is used where it is named, and named where it is needed."""
    algo, model, reward = config.algo, config.model, config.reward
    require(
        algo.kl_coef == 0 or algo.kl_loss_coef == 0,
        f"algo.kl_coef = {algo.kl_coef} and algo.kl_loss_coef = {algo.kl_loss_coef}: only one of them may be above 0",
    )
    require(
        algo.ref_update_interval == 0 or needs_reference(config),
        f"algo.ref_update_interval = {algo.ref_update_interval}, but kl_coef and kl_loss_coef are 0 and kl_metric is "
        f"false: there is no reference",
    )
    critic = needs_critic(config)
    require(
        critic or not model.critic_path,
        f"model.critic_path = {model.critic_path!r}, but algo.advantage_estimator = {algo.advantage_estimator} trains "
        f"no critic: algo.critic=true does",
    )
    require(
        critic or algo.num_critic_only_steps == 0,
        f"algo.num_critic_only_steps = {algo.num_critic_only_steps}, but there is no critic",
    )
    require(
        algo.opd_kl_coef == 0 or bool(model.teacher_path),
        f"algo.opd_kl_coef = {algo.opd_kl_coef}, but model.teacher_path is empty",
    )
    require(
        algo.opd_kl_coef > 0 or not model.teacher_path,
        f"model.teacher_path = {model.teacher_path!r}, but algo.opd_kl_coef is 0: the teacher would do nothing",
    )
    require(
        algo.opd_kl_coef > 0 or algo.advantage_estimator != "opd",
        "algo.advantage_estimator = opd needs algo.opd_kl_coef above 0, and model.teacher_path",
    )
    limit = config.rollout.max_response_len
    require(
        reward.overlong_buffer_len <= limit,
        f"reward.overlong_buffer_len = {reward.overlong_buffer_len}: longer than rollout.max_response_len = {limit}",
    )


def _check_idle(config: ConfigDict) -> None:
    """Knobs that an estimator or a surrogate would never read."""
    algo, reward, rollout = config.algo, config.reward, config.rollout
    estimator = algo.advantage_estimator
    penalties = {f"reward.{name}": reward[name] for name in PENALTIES}
    idle = {
        "sft": {"algo.kl_coef": algo.kl_coef, "algo.opd_kl_coef": algo.opd_kl_coef, "algo.critic": algo.critic,
                "rollout.dynamic_filter": rollout.dynamic_filter, "rollout.partial": rollout.partial, **penalties},
        "dcpo": {"algo.kl_coef": algo.kl_coef, **penalties},
        "opd": {"algo.kl_coef": algo.kl_coef, **penalties},
    }
    for name, value in idle.get(estimator, {}).items():
        require(not value, f"{name} = {value} with algo.advantage_estimator = {estimator}, which does not read it")
    require(
        algo.dual_clip == 0 or algo.surrogate not in ("cispo", "reinforce", "sft"),
        f"algo.dual_clip = {algo.dual_clip} with algo.surrogate = {algo.surrogate}, which does not read it",
    )


def _check_corrections(config: ConfigDict) -> None:
    """What compares the trainer's log-probs with the sampler's, or the new policy with the old one."""
    algo = config.algo
    require(
        algo.is_low <= 1 <= algo.is_high and algo.is_low < algo.is_high,
        f"algo.is_low = {algo.is_low} and algo.is_high = {algo.is_high}: the ratio 1 must lie between them",
    )
    require(
        algo.is_correction == "none" or algo.old_logprobs == "trainer",
        f"algo.is_correction = {algo.is_correction} with algo.old_logprobs = {algo.old_logprobs}: the ratio of trainer "
        f"and sampler needs the trainer's log-probs",
    )
    used = algo.is_correction != "none" or algo.opsm_delta > 0 or algo.kl_unbiased
    require(
        algo.surrogate != "sft" or not used,
        "algo.surrogate = sft with is_correction, opsm_delta or kl_unbiased: labels were drawn by no policy",
    )
    require(
        not algo.kl_unbiased or algo.kl_loss_coef > 0 or algo.kl_metric,
        "algo.kl_unbiased = True, but kl_loss_coef is 0 and kl_metric is false: there is no KL in the loss",
    )
