"""Every relation among the knobs, checked before any device work. Each error names the knobs and both numbers."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import string
from typing import Any

from ml_collections import ConfigDict

DTYPES = ("auto", "bfloat16", "float32")
FILE_DTYPES = ("float32", "bfloat16", "float16")
INITS = ("load", "random")
REMAT = ("auto", "none", "dots", "full")
ESTIMATORS = ("grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "dcpo", "opd",
              "sft")
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "dcpo")  # a group of one teaches them nothing
SURROGATES = ("clip", "gspo", "cispo", "reinforce", "sft")
REWARDS = ("math", "gsm8k", "exact_match", "format", "dcpo")
POST_PROCESSES = ("", "dcpo")
CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
AGGREGATIONS = ("sample_mean", "token_mean", "constant")
OLD_LOGPROBS = ("trainer", "rollout")
OPTIMIZERS = ("adamw",)
SCHEDULES = ("constant", "linear", "cosine")
SMALLEST_ROW = 64
SET_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def row_buckets(config: ConfigDict) -> tuple[int, ...]:
    """Row lengths of the trainer, tokens, ascending: `train.length_buckets`, or powers of two and the budget."""
    if config.train.length_buckets:
        return tuple(config.train.length_buckets)
    budget = config.train.max_tokens_per_device
    powers = [2**n for n in range(SMALLEST_ROW.bit_length() - 1, budget.bit_length())]
    return tuple(length for length in powers if length < budget) + (budget,)


def max_prompt_len(config: ConfigDict) -> int:
    """Longest prompt in use, tokens: `data.max_prompt_len`, or the largest prompt bucket."""
    return config.data.max_prompt_len or max(config.sampler.prompt_buckets)


def mesh_sizes(config: ConfigDict, num_devices: int) -> dict[str, int]:
    """Size of each mesh axis with -1 filled in; ValueError where they do not multiply to `num_devices`."""
    sizes = dict(config.mesh.to_dict())
    text = ", ".join(f"mesh.{axis} = {size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    _require(all(size >= 1 or size == -1 for size in sizes.values()), f"{text}: each must be at least 1, or -1")
    _require(len(open_axes) <= 1, f"{text}: only one may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    for axis in open_axes:
        _require(num_devices % fixed == 0, f"{text}: {fixed} does not divide the {num_devices} devices")
        sizes[axis] = num_devices // fixed
    product = math.prod(sizes.values())
    _require(product == num_devices, f"{text}: they multiply to {product}, but there are {num_devices} devices")
    return sizes


def validate(config: ConfigDict, num_devices: int) -> None:
    """Raise ValueError for the first relation among the knobs that does not hold on `num_devices` devices."""
    for section, keys in config.to_dict().items():
        for key, value in keys.items():
            if isinstance(value, float):
                _require(abs(value) <= MOST_FLOAT, f"{section}.{key} = {value}: must be finite, also in float32")
    _check_text(config)
    _check_ranges(config)
    _check_rollout(config)
    _check_algo(config)
    _check_lengths(config)
    _check_steps(config)
    _check_eval(config)
    _check_log(config)
    shards = mesh_sizes(config, num_devices)
    split = shards["data"] * shards["fsdp"]
    slots = config.sampler.slots
    _require(
        slots % split == 0,
        f"sampler.slots = {slots}: must be a multiple of mesh.data * mesh.fsdp = {split}, over which they are split",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _one_of(name: str, value: str, known: tuple[str, ...], path: bool = False) -> None:
    """`value` is a known name, or with `path` also of the form package.module:function."""
    more = " or package.module:function" if path else ""
    if value not in known and not (path and FUNCTION_PATH.fullmatch(value)):
        raise ValueError(f"{name} = {value!r}: expected {', '.join(known)}{more}")


def _ascending(name: str, values: tuple[int, ...]) -> None:
    _require(len(values) > 0 and values[0] >= 1, f"{name} = {values}: needs lengths of at least 1")
    for low, high in zip(values, values[1:]):
        _require(low < high, f"{name} = {values}: must ascend, but {low} stands before {high}")


def _check_text(config: ConfigDict) -> None:
    """Names, JSON and regular expressions."""
    _one_of("model.init", config.model.init, INITS)
    _one_of("model.compute_dtype", config.model.compute_dtype, DTYPES)
    _one_of("model.remat", config.model.remat, REMAT)
    _one_of("sampler.dtype", config.sampler.dtype, DTYPES)
    _one_of("checkpoint.save_hf_dtype", config.checkpoint.save_hf_dtype, FILE_DTYPES)
    _one_of("reward.type", config.reward.type, REWARDS, path=True)
    _one_of("reward.post_process", config.reward.post_process, POST_PROCESSES, path=True)
    _one_of("optim.name", config.optim.name, OPTIMIZERS)
    _one_of("optim.schedule", config.optim.schedule, SCHEDULES)
    for name in ("model.path", "data.prompt_data", "data.input_key", "reward.key", "log.dir",
                 "checkpoint.load"):
        section, key = name.split(".")
        _require(bool(config[section][key].strip()), f"{name} is empty")
    for key in ("trainable", "frozen"):
        try:
            re.compile(config.model[key])
        except re.error as error:
            raise ValueError(f"model.{key} = {config.model[key]!r}: not a regular expression: {error}") from error
    _json_object("model.chat_template_kwargs", config.model.chat_template_kwargs)


def _json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that a text knob holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} = {text!r}: not JSON: {error}") from error
    _require(isinstance(value, dict), f"{name} = {text!r}: expected a JSON object")
    return value


AT_LEAST = {  # knob -> smallest value
    "data.seed": 0, "data.max_prompt_len": 0,
    "rollout.batch_size": 1, "rollout.n_samples_per_prompt": 1, "rollout.num_rollouts": 1, "rollout.num_epochs": 0,
    "rollout.max_response_len": 1, "rollout.top_k": -1,
    "sampler.slots": 0, "sampler.prefill_chunk": 1, "sampler.steps_per_dispatch": 1,
    "reward.memory_mb": 1, "reward.workers": 0,
    "reward.overlong_buffer_len": 0, "reward.overlong_penalty": 0,
    "algo.loss_length": 0, "algo.kl_coef": 0, "algo.kl_loss_coef": 0, "algo.entropy_coef": 0, "algo.gamma": 0,
    "algo.lambd": 0, "algo.value_clip": 0, "algo.num_critic_only_steps": 0, "algo.ref_update_interval": 0,
    "algo.is_low": 0, "algo.opsm_delta": 0, "algo.opd_kl_coef": 0, "algo.dcpo_calibration_weight": 0,
    "algo.dcpo_calibration_scale": 0, "algo.dcpo_hybrid_alpha": 0, "optim.critic_lr": 0,
    "optim.lr": 0, "optim.warmup_steps": 0, "optim.weight_decay": 0, "optim.clip_grad": 0, "optim.max_nonfinite": 1,
    "train.global_batch_size": 0, "train.max_tokens_per_device": 1, "train.seed": 0,
    "eval.interval": 0, "eval.n_samples": 1, "eval.top_k": -1,
    "checkpoint.save_interval": 0, "checkpoint.keep": 1, "checkpoint.save_hf_interval": 0,
    "log.samples": 0, "log.interval": 1, "rollout.min_p": 0, "optim.b1": 0, "optim.b2": 0,
}  # fmt: skip
AT_MOST = {  # first what the sampler's int32 arrays and 32-bit random keys hold
    "rollout.top_k": 2**31 - 1, "eval.top_k": 2**31 - 1, "train.seed": 2**32 - 1,
    "algo.gamma": 1, "algo.lambd": 1, "algo.dcpo_hybrid_alpha": 1,
}  # fmt: skip
LEAST_TEMPERATURE = 1e-6  # below it the logits overflow float32
MOST_FLOAT = 3.4e38  # of float32
ABOVE = {"rollout.temperature": 0, "reward.timeout_s": 0, "algo.eps_clip": 0, "algo.eps_clip_high": 0, "optim.eps": 0}
BELOW = {"rollout.min_p": 1, "algo.eps_clip": 1, "optim.b1": 1, "optim.b2": 1}


def _check_ranges(config: ConfigDict) -> None:
    """Bounds of single knobs."""

    def value(name: str) -> Any:
        section, key = name.split(".")
        return config[section][key]

    for name, low in AT_LEAST.items():
        _require(value(name) >= low, f"{name} = {value(name)}: must be at least {low}")
    for name, low in ABOVE.items():
        why = "; greedy draws (0) are for eval.temperature only" if name == "rollout.temperature" else ""
        _require(value(name) > low, f"{name} = {value(name)}: must be above {low}{why}")
    for name, high in AT_MOST.items():
        _require(value(name) <= high, f"{name} = {value(name)}: must be at most {high}")
    for name in ("rollout.temperature", "eval.temperature"):
        cold = 0 < value(name) < LEAST_TEMPERATURE
        _require(not cold, f"{name} = {value(name)}: must be at least {LEAST_TEMPERATURE}")
    for name, high in BELOW.items():
        _require(value(name) < high, f"{name} = {value(name)}: must be below {high}")


def _check_rollout(config: ConfigDict) -> None:
    """What is drawn, and what ends it."""
    rollout = config.rollout
    _require(0 < rollout.top_p <= 1, f"rollout.top_p = {rollout.top_p}: must be above 0 and at most 1")
    _require(all(rollout.stop), f"rollout.stop = {rollout.stop}: an empty text would end every response at once")
    _require(
        all(token >= 0 for token in rollout.stop_token_ids),
        f"rollout.stop_token_ids = {rollout.stop_token_ids}: ids must be at least 0",
    )


def _check_algo(config: ConfigDict) -> None:
    """The loss and its parts."""
    algo, count = config.algo, config.rollout.n_samples_per_prompt
    _one_of("algo.advantage_estimator", algo.advantage_estimator, ESTIMATORS, path=True)
    _one_of("algo.surrogate", algo.surrogate, SURROGATES, path=True)
    _one_of("algo.loss_aggregation", algo.loss_aggregation, AGGREGATIONS, path=True)
    _one_of("algo.kl_loss_type", algo.kl_loss_type, KL_TYPES)
    _one_of("algo.kl_reward_type", algo.kl_reward_type, KL_TYPES)
    _one_of("algo.old_logprobs", algo.old_logprobs, OLD_LOGPROBS)
    _one_of("algo.is_correction", algo.is_correction, CORRECTIONS)
    _one_of("algo.is_level", algo.is_level, LEVELS)
    _require(
        algo.dual_clip == 0 or algo.dual_clip > 1, f"algo.dual_clip = {algo.dual_clip}: must be 0 (off) or above 1"
    )
    _require(
        algo.loss_length == 0 or algo.loss_aggregation == "constant",
        f"algo.loss_length = {algo.loss_length}: is for algo.loss_aggregation constant, not {algo.loss_aggregation}",
    )
    pair = f"algo.advantage_estimator = {algo.advantage_estimator}"
    _require(
        (algo.advantage_estimator == "sft") == (algo.surrogate == "sft"),
        f"{pair} with algo.surrogate = {algo.surrogate}: sft goes with sft only",
    )
    _require(
        algo.advantage_estimator not in GROUP_ESTIMATORS or count > 1,
        f"{pair} with rollout.n_samples_per_prompt = {count}: a group of fewer than 2 has advantage 0 always",
    )
    _require(
        algo.advantage_estimator != "sft" or count == 1,
        f"{pair} with rollout.n_samples_per_prompt = {count}: a label is one response, so it must be 1",
    )
    _check_models(config)
    _check_corrections(config)


def _check_models(config: ConfigDict) -> None:
    """Reference, critic and teacher: each is used where it is named, and named where it is needed."""
    algo, model, reward = config.algo, config.model, config.reward
    _require(
        algo.kl_coef == 0 or algo.kl_loss_coef == 0,
        f"algo.kl_coef = {algo.kl_coef} and algo.kl_loss_coef = {algo.kl_loss_coef}: only one of them may be above 0",
    )
    _require(
        algo.ref_update_interval == 0 or algo.kl_coef > 0 or algo.kl_loss_coef > 0 or algo.kl_metric,
        f"algo.ref_update_interval = {algo.ref_update_interval}, but kl_coef and kl_loss_coef are 0 and kl_metric is "
        f"false: there is no reference",
    )
    critic = algo.critic or algo.advantage_estimator == "ppo"
    _require(
        critic or not model.critic_path,
        f"model.critic_path = {model.critic_path!r}, but algo.advantage_estimator = {algo.advantage_estimator} trains "
        f"no critic: algo.critic=true does",
    )
    _require(
        critic or algo.num_critic_only_steps == 0,
        f"algo.num_critic_only_steps = {algo.num_critic_only_steps}, but there is no critic",
    )
    _require(
        algo.opd_kl_coef == 0 or bool(model.teacher_path),
        f"algo.opd_kl_coef = {algo.opd_kl_coef}, but model.teacher_path is empty",
    )
    _require(
        algo.opd_kl_coef > 0 or not model.teacher_path,
        f"model.teacher_path = {model.teacher_path!r}, but algo.opd_kl_coef is 0: the teacher would do nothing",
    )
    _require(
        algo.opd_kl_coef > 0 or algo.advantage_estimator != "opd",
        "algo.advantage_estimator = opd needs algo.opd_kl_coef above 0, and model.teacher_path",
    )
    limit = config.rollout.max_response_len
    _require(
        reward.overlong_buffer_len <= limit,
        f"reward.overlong_buffer_len = {reward.overlong_buffer_len}: longer than rollout.max_response_len = {limit}",
    )


def _check_corrections(config: ConfigDict) -> None:
    """What compares the trainer's log-probs with the sampler's, or the new policy with the old one."""
    algo = config.algo
    _require(
        algo.is_low <= 1 <= algo.is_high and algo.is_low < algo.is_high,
        f"algo.is_low = {algo.is_low} and algo.is_high = {algo.is_high}: the ratio 1 must lie between them",
    )
    _require(
        algo.is_correction == "none" or algo.old_logprobs == "trainer",
        f"algo.is_correction = {algo.is_correction} with algo.old_logprobs = {algo.old_logprobs}: the ratio of trainer "
        f"and sampler needs the trainer's log-probs",
    )
    used = algo.is_correction != "none" or algo.opsm_delta > 0 or algo.kl_unbiased
    _require(
        algo.surrogate != "sft" or not used,
        "algo.surrogate = sft with is_correction, opsm_delta or kl_unbiased: labels were drawn by no policy",
    )
    _require(
        not algo.kl_unbiased or algo.kl_loss_coef > 0 or algo.kl_metric,
        "algo.kl_unbiased = True, but kl_loss_coef is 0 and kl_metric is false: there is no KL in the loss",
    )


def _check_lengths(config: ConfigDict) -> None:
    """Prompt and response fit into the sampler's cache and the trainer's rows."""
    sampler, train, response = config.sampler, config.train, config.rollout.max_response_len
    _ascending("sampler.prompt_buckets", sampler.prompt_buckets)
    _ascending("sampler.length_buckets", sampler.length_buckets)
    prompt, largest = max_prompt_len(config), max(sampler.prompt_buckets)
    _require(
        prompt <= largest,
        f"data.max_prompt_len = {prompt}: longer than the largest of sampler.prompt_buckets, {largest}",
    )
    source = "data.max_prompt_len" if config.data.max_prompt_len else "largest of sampler.prompt_buckets"
    parts = f"{prompt} ({source}) + {response} (rollout.max_response_len) = {prompt + response} tokens"
    cache = max(sampler.length_buckets)
    _require(prompt + response <= cache, f"sampler.length_buckets ends at {cache}, but must hold {parts}")
    padded = min(bucket for bucket in sampler.prompt_buckets if bucket >= prompt)
    _require(
        padded <= cache, f"sampler.length_buckets ends at {cache}, but the prompt bucket in use has {padded} tokens"
    )
    budget = train.max_tokens_per_device
    _require(prompt + response <= budget, f"train.max_tokens_per_device = {budget}, but must hold {parts}")
    rows = row_buckets(config)
    _ascending("train.length_buckets", rows)
    _require(
        rows[-1] <= budget, f"train.length_buckets ends at {rows[-1]}, above train.max_tokens_per_device = {budget}"
    )
    _require(prompt + response <= rows[-1], f"train.length_buckets ends at {rows[-1]}, but must hold {parts}")


def _check_steps(config: ConfigDict) -> None:
    """Updates per rollout and in the run."""
    rollout, optim, size = config.rollout, config.optim, config.train.global_batch_size
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    _require(
        size == 0 or samples % size == 0,
        f"train.global_batch_size = {size}: must divide rollout.batch_size * rollout.n_samples_per_prompt = "
        f"{rollout.batch_size} * {rollout.n_samples_per_prompt} = {samples}",
    )
    updates = rollout.num_rollouts * (samples // (size or samples))
    _require(
        optim.schedule == "constant" or rollout.num_epochs > 0 or optim.warmup_steps < updates,
        f"optim.warmup_steps = {optim.warmup_steps}: with optim.schedule = {optim.schedule} it must be below the "
        f"run's {updates} updates",
    )


def _check_eval(config: ConfigDict) -> None:
    """Evaluation sets, and what is drawn for them; -1 stands for the rollout's value."""
    evaluate = config.eval
    names = []
    for entry in evaluate.data:
        name, equals, path = entry.partition("=")
        whole = bool(equals and path and SET_NAME.fullmatch(name))
        _require(whole, f"eval.data: {entry!r} is not of the form name=path")
        _require(name not in names, f"eval.data: two sets have the name {name!r}")
        names.append(name)
    _require(
        evaluate.interval == 0 or bool(names), f"eval.interval = {evaluate.interval}, but eval.data names 0 sets"
    )
    for key, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0)):
        value = evaluate[key]
        bounds = "must be -1 (the rollout's), or " + ("at least 0" if high == math.inf else "above 0 and at most 1")
        inside = low <= value <= high and (key != "top_p" or value > 0)
        _require(value == -1 or inside, f"eval.{key} = {value}: {bounds}")
    length = evaluate.max_response_len
    _require(
        length == -1 or length >= 1, f"eval.max_response_len = {length}: must be -1 (the rollout's), or at least 1"
    )
    prompt, cache = max_prompt_len(config), max(config.sampler.length_buckets)
    _require(
        not names or prompt + length <= cache,
        f"sampler.length_buckets ends at {cache}, but must hold {prompt} (longest prompt) + {length} "
        f"(eval.max_response_len) = {prompt + length} tokens",
    )


def _check_log(config: ConfigDict) -> None:
    """The run's directory, and packages that are not always installed."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(config.log.dir) if field is not None}
    except ValueError as error:
        raise ValueError(f"log.dir = {config.log.dir!r}: {error}") from error
    extra = sorted(fields - {"config", "time"})
    _require(not extra, f"log.dir = {config.log.dir!r}: knows {{config}} and {{time}}, not {extra}")
    _require(
        not config.log.wandb or importlib.util.find_spec("wandb") is not None,
        "log.wandb = True needs the package wandb: pip install 'rljax[wandb]'",
    )
