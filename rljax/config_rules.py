"""Every relation among the knobs, checked before any device work. Each error names the knobs and both numbers."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import string
from typing import Any

from ml_collections import ConfigDict

from rljax.algo_rules import check_algo, one_of, require

DTYPES = ("auto", "bfloat16", "float32")
FILE_DTYPES = ("float32", "bfloat16", "float16")
INITS = ("load", "random")
REMAT = ("auto", "none", "dots", "full")
REWARDS = ("math", "gsm8k", "dapo", "exact_match", "f1", "format", "dcpo", "remote", "random", "reasoning_gym")
POST_PROCESSES = ("", "dcpo")
FILTERS = ("", "reward_std", "not_all_right", "not_all_wrong", "not_all_truncated")
OPTIMIZERS = ("adamw",)
SCHEDULES = ("constant", "linear", "cosine")
SMALLEST_ROW = 64
SET_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


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
    require(all(size >= 1 or size == -1 for size in sizes.values()), f"{text}: each must be at least 1, or -1")
    require(len(open_axes) <= 1, f"{text}: only one may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    for axis in open_axes:
        require(num_devices % fixed == 0, f"{text}: {fixed} does not divide the {num_devices} devices")
        sizes[axis] = num_devices // fixed
    product = math.prod(sizes.values())
    require(product == num_devices, f"{text}: they multiply to {product}, but there are {num_devices} devices")
    return sizes


def validate(config: ConfigDict, num_devices: int) -> None:
    """Raise ValueError for the first relation among the knobs that does not hold on `num_devices` devices."""
    for section, keys in config.to_dict().items():
        for key, value in keys.items():
            if isinstance(value, float):
                require(abs(value) <= MOST_FLOAT, f"{section}.{key} = {value}: must be finite, also in float32")
    _check_text(config)
    _check_ranges(config)
    _check_rollout(config)
    check_algo(config)
    _check_lengths(config)
    _check_steps(config)
    _check_eval(config)
    _check_log(config)
    shards = mesh_sizes(config, num_devices)
    split = shards["data"] * shards["fsdp"]
    slots = config.sampler.slots
    require(
        slots % split == 0,
        f"sampler.slots = {slots}: must be a multiple of mesh.data * mesh.fsdp = {split}, over which they are split",
    )


def _ascending(name: str, values: tuple[int, ...]) -> None:
    require(len(values) > 0 and values[0] >= 1, f"{name} = {values}: needs lengths of at least 1")
    for low, high in zip(values, values[1:]):
        require(low < high, f"{name} = {values}: must ascend, but {low} stands before {high}")


def _check_text(config: ConfigDict) -> None:
    """Names, JSON and regular expressions."""
    one_of("model.init", config.model.init, INITS)
    one_of("model.compute_dtype", config.model.compute_dtype, DTYPES)
    one_of("model.remat", config.model.remat, REMAT)
    one_of("sampler.dtype", config.sampler.dtype, DTYPES)
    one_of("sampler.weight_dtype", config.sampler.weight_dtype, ("auto", "int8"))
    one_of("sampler.cache_dtype", config.sampler.cache_dtype, (*DTYPES, "int8"))
    one_of("checkpoint.save_hf_dtype", config.checkpoint.save_hf_dtype, FILE_DTYPES)
    one_of("reward.type", config.reward.type, REWARDS, path=True)
    require(
        (config.reward.type == "remote") == bool(config.reward.url),
        f"reward.type = {config.reward.type} and reward.url = {config.reward.url!r}: remote needs a url, others none",
    )
    require(
        not config.reward.url or config.reward.url.startswith(("http://", "https://")),
        f"reward.url = {config.reward.url!r}: must begin with http:// or https://",
    )
    one_of("reward.post_process", config.reward.post_process, POST_PROCESSES, path=True)
    one_of("optim.name", config.optim.name, OPTIMIZERS)
    one_of("optim.schedule", config.optim.schedule, SCHEDULES)
    for name in ("model.path", "data.prompt_data", "data.input_key", "reward.key", "log.dir",
                 "checkpoint.load"):
        section, key = name.split(".")
        require(bool(config[section][key].strip()), f"{name} is empty")
    for key in ("trainable", "frozen"):
        try:
            re.compile(config.model[key])
        except re.error as error:
            raise ValueError(f"model.{key} = {config.model[key]!r}: not a regular expression: {error}") from error
    _json_object("model.chat_template_kwargs", config.model.chat_template_kwargs)
    biases = _json_object("rollout.logit_bias", config.rollout.logit_bias)
    require(
        all(token.isdecimal() and type(bias) in (int, float) and math.isfinite(bias) for token, bias in biases.items())
        and len(set(map(int, biases))) == len(biases),
        f"rollout.logit_bias = {config.rollout.logit_bias!r}: expected different token ids with finite numbers, as in "
        '{"42": -100.0}',
    )


def _json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that a text knob holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} = {text!r}: not JSON: {error}") from error
    require(isinstance(value, dict), f"{name} = {text!r}: expected a JSON object")
    return value


AT_LEAST = {  # knob -> smallest value
    "data.seed": 0, "data.max_prompt_len": 0,
    "rollout.batch_size": 1, "rollout.n_samples_per_prompt": 1, "rollout.num_rollouts": 1, "rollout.num_epochs": 0,
    "rollout.max_response_len": 1, "rollout.top_k": -1, "rollout.over_sampling_batch_size": 0,
    "rollout.min_new_tokens": 0, "rollout.max_version_lag": 0, "rollout.max_filter_rounds": 1,
    "sampler.slots": 0, "sampler.cache_tokens": 0, "sampler.top_logprobs": 0,
    "sampler.prefill_chunk": 0, "sampler.steps_per_dispatch": 1,
    "reward.memory_mb": 1, "reward.workers": 0,
    "reward.overlong_buffer_len": 0, "reward.overlong_penalty": 0, "reward.repetition_penalty": 0,
    "reward.format_penalty": 0,
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
        require(value(name) >= low, f"{name} = {value(name)}: must be at least {low}")
    for name, low in ABOVE.items():
        why = "; greedy draws (0) are for eval.temperature only" if name == "rollout.temperature" else ""
        require(value(name) > low, f"{name} = {value(name)}: must be above {low}{why}")
    for name, high in AT_MOST.items():
        require(value(name) <= high, f"{name} = {value(name)}: must be at most {high}")
    for name in ("rollout.temperature", "eval.temperature"):
        cold = 0 < value(name) < LEAST_TEMPERATURE
        require(not cold, f"{name} = {value(name)}: must be at least {LEAST_TEMPERATURE}")
    for name, high in BELOW.items():
        require(value(name) < high, f"{name} = {value(name)}: must be below {high}")


def _check_rollout(config: ConfigDict) -> None:
    """What is drawn, and what ends it."""
    rollout = config.rollout
    require(0 < rollout.top_p <= 1, f"rollout.top_p = {rollout.top_p}: must be above 0 and at most 1")
    for name in ("dynamic_filter", "sample_filter", "buffer_filter"):
        one_of(f"rollout.{name}", rollout[name], FILTERS, path=True)
    over, partial = rollout.over_sampling_batch_size, rollout.partial
    require(
        over == 0 or over >= rollout.batch_size,
        f"rollout.over_sampling_batch_size = {over}: must be at least rollout.batch_size = {rollout.batch_size}",
    )
    for name in ("mask_offpolicy_in_partial", "max_version_lag", "buffer_filter"):
        require(partial or not rollout[name], f"rollout.{name} = {rollout[name]}, but rollout.partial is false")
    debug = config.debug
    require(bool(debug.load_rollouts) or not debug.train_only, "debug.train_only needs debug.load_rollouts")
    require(
        not (debug.rollout_only and debug.load_rollouts),
        f"debug.rollout_only with debug.load_rollouts = {debug.load_rollouts!r}: there would be nothing to do",
    )
    require(all(rollout.stop), f"rollout.stop = {rollout.stop}: an empty text would end every response at once")
    require(
        all(token >= 0 for token in rollout.stop_token_ids),
        f"rollout.stop_token_ids = {rollout.stop_token_ids}: ids must be at least 0",
    )


def _check_lengths(config: ConfigDict) -> None:
    """Prompt and response fit into the sampler's cache and the trainer's rows."""
    sampler, train, response = config.sampler, config.train, config.rollout.max_response_len
    _ascending("sampler.prompt_buckets", sampler.prompt_buckets)
    _ascending("sampler.length_buckets", sampler.length_buckets)
    prompt, largest = max_prompt_len(config), max(sampler.prompt_buckets)
    require(
        prompt <= largest,
        f"data.max_prompt_len = {prompt}: longer than the largest of sampler.prompt_buckets, {largest}",
    )
    source = "data.max_prompt_len" if config.data.max_prompt_len else "largest of sampler.prompt_buckets"
    parts = f"{prompt} ({source}) + {response} (rollout.max_response_len) = {prompt + response} tokens"
    cache = max(sampler.length_buckets)
    require(prompt + response <= cache, f"sampler.length_buckets ends at {cache}, but must hold {parts}")
    padded = min(bucket for bucket in sampler.prompt_buckets if bucket >= prompt)
    require(
        padded <= cache, f"sampler.length_buckets ends at {cache}, but the prompt bucket in use has {padded} tokens"
    )
    budget = train.max_tokens_per_device
    require(prompt + response <= budget, f"train.max_tokens_per_device = {budget}, but must hold {parts}")
    rows = row_buckets(config)
    _ascending("train.length_buckets", rows)
    require(
        rows[-1] <= budget, f"train.length_buckets ends at {rows[-1]}, above train.max_tokens_per_device = {budget}"
    )
    require(prompt + response <= rows[-1], f"train.length_buckets ends at {rows[-1]}, but must hold {parts}")


def _check_steps(config: ConfigDict) -> None:
    """Updates per rollout and in the run."""
    rollout, size = config.rollout, config.train.global_batch_size
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    require(
        size == 0 or samples % size == 0,
        f"train.global_batch_size = {size}: must divide rollout.batch_size * rollout.n_samples_per_prompt = "
        f"{rollout.batch_size} * {rollout.n_samples_per_prompt} = {samples}",
    )
    algo = config.algo
    require(
        algo.opsm_delta == 0 or 0 < size < samples or algo.old_logprobs == "rollout",
        f"algo.opsm_delta = {algo.opsm_delta}: with one update per rollout the policy has not drifted; "
        f"train.global_batch_size below {samples} makes several",
    )


def _check_eval(config: ConfigDict) -> None:
    """Evaluation sets, and what is drawn for them; -1 stands for the rollout's value."""
    evaluate = config.eval
    names = []
    for entry in evaluate.data:
        name, equals, path = entry.partition("=")
        whole = bool(equals and path and SET_NAME.fullmatch(name))
        require(whole, f"eval.data: {entry!r} is not of the form name=path")
        require(name not in names, f"eval.data: two sets have the name {name!r}")
        names.append(name)
    require(
        evaluate.interval == 0 or bool(names), f"eval.interval = {evaluate.interval}, but eval.data names 0 sets"
    )
    _check_overrides(evaluate, names, config.reward.group)
    length = evaluate.max_response_len
    _check_draws("eval", evaluate.to_dict())
    prompt, cache = max_prompt_len(config), max(config.sampler.length_buckets)
    require(
        not names or prompt + length <= cache,
        f"sampler.length_buckets ends at {cache}, but must hold {prompt} (longest prompt) + {length} "
        f"(eval.max_response_len) = {prompt + length} tokens",
    )


OVERRIDES = {  # key of eval.overrides -> type, smallest value
    "n_samples": (int, 1), "temperature": (float, -1), "top_p": (float, -1), "top_k": (int, -1),
    "max_response_len": (int, -1), "input_key": (str, None), "label_key": (str, None), "metadata_key": (str, None),
    "prompt_suffix": (str, None), "reward": (str, None),
}  # fmt: skip


def _check_overrides(evaluate: ConfigDict, names: list[str], grouped: bool) -> None:
    """eval.overrides: an object of objects, for sets that exist, with keys and types that are known."""
    for name, own in _json_object("eval.overrides", evaluate.overrides).items():
        there = ", ".join(names) or "none"
        require(name in names, f"eval.overrides: {name!r} is no set of eval.data, which has {there}")
        require(isinstance(own, dict), f"eval.overrides: {name!r} must be an object, not {own!r}")
        for key, value in own.items():
            require(key in OVERRIDES, f"eval.overrides: {name}.{key} is unknown; there are {', '.join(OVERRIDES)}")
            kind, least = OVERRIDES[key]
            fits = type(value) is kind or (kind is float and type(value) is int)
            require(fits, f"eval.overrides: {name}.{key} = {value!r}: expected {kind.__name__}")
            high_enough = least is None or value >= least
            require(high_enough, f"eval.overrides: {name}.{key} = {value}: must be at least {least}")
        _check_draws(f"eval.overrides: {name}", own)
        if "reward" in own:
            one_of(f"eval.overrides: {name}.reward", own["reward"], REWARDS, path=True)
            require(own["reward"] != "remote", f"eval.overrides: {name}.reward = remote: only reward.type has a url")
            require(not grouped, f"eval.overrides: {name}.reward with reward.group = True: groups have one reward")


def _check_draws(where: str, knobs: dict[str, Any]) -> None:
    """temperature, top_p and max_response_len of evaluation, those that are there; -1 stands for the rollout's."""
    temperature, top_p, length = (knobs.get(key, -1) for key in ("temperature", "top_p", "max_response_len"))
    cold = 0 < temperature < LEAST_TEMPERATURE
    require(not cold, f"{where}.temperature = {temperature}: must be at least {LEAST_TEMPERATURE}")
    require(
        temperature == -1 or 0 <= temperature <= MOST_FLOAT,
        f"{where}.temperature = {temperature}: must be -1 (the rollout's), or at least 0 and finite",
    )
    require(
        top_p == -1 or 0 < top_p <= 1,
        f"{where}.top_p = {top_p}: must be -1 (the rollout's), or above 0 and at most 1",
    )
    require(
        length == -1 or length >= 1, f"{where}.max_response_len = {length}: must be -1 (the rollout's), or at least 1"
    )


def _check_log(config: ConfigDict) -> None:
    """The run's directory, and packages that are not always installed."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(config.log.dir) if field is not None}
    except ValueError as error:
        raise ValueError(f"log.dir = {config.log.dir!r}: {error}") from error
    extra = sorted(fields - {"config", "time"})
    require(not extra, f"log.dir = {config.log.dir!r}: knows {{config}} and {{time}}, not {extra}")
    require(
        not config.log.wandb or importlib.util.find_spec("wandb") is not None,
        "log.wandb = True needs the package wandb: pip install 'rljax[wandb]'",
    )
