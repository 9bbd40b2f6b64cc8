"""Every knob with its default and meaning; loading by file or name; overrides from the command line.

A config file defines `get_config(variant="")` and returns `config.get_config()` with some knobs set. The command
line wins over the file, the file over the default. Overrides are parsed here and not by ml_collections'
config_flags, whose errors name neither the nearest key of a section nor the value of a wrong type, and whose
bool and tuple fields take other spellings than the ones promised to users.
"""

from __future__ import annotations

import ast
import copy
import difflib
import inspect
import json
import pathlib
import re
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from rljax.config_rules import row_buckets, validate

__all__ = ["diff", "find", "get_config", "load", "parse", "resolved", "row_buckets", "validate"]

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
DEFAULT = "quickstart.py"

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "path": "tiny",  # a built-in name, a Hugging Face folder or id, or a GGUF file
        "init": "load",  # load the weights of path, or random: new ones from train.seed
        "ref_path": "",  # the reference of the KL; "" = the starting weights
        "critic_path": "",  # start of the critic's weights; "" = the policy's
        "teacher_path": "",  # the teacher of algo.opd_kl_coef, of the same tokenizer
        "compute_dtype": "auto",  # auto (bfloat16 on accelerators, float32 on CPU), bfloat16, float32
        "remat": "auto",  # what the backward pass makes again: auto (dots on a CPU, else full), none, dots, full
        "chat_template": True,  # text prompts become one user message, where the tokenizer has a template
        "chat_template_kwargs": "{}",  # JSON object handed to the template, such as {"enable_thinking": false}
        "trainable": ".*",  # regex on leaf names: what is trained
        "frozen": "",  # regex on leaf names: what is not, even if trainable; "" = nothing
    },
    "data": {
        "prompt_data": "builtin:sums/train.jsonl",  # JSONL, Parquet, path@[a:b], hub id, or builtin:FILE
        "input_key": "prompt",  # column of the prompt: text or chat messages
        "label_key": "label",  # column of the label; "" = none: with sft the prompts are then whole conversations
        "metadata_key": "metadata",  # column of the metadata object
        "tool_key": "tools",  # column of the tool descriptions
        "prompt_suffix": "",  # text behind every prompt, such as an instruction
        "shuffle": True,  # a new order in every epoch
        "seed": 42,  # of that order
        "max_prompt_len": 0,  # tokens; longer prompts are dropped and counted; 0 = the largest prompt bucket
    },
    "rollout": {
        "batch_size": 32,  # prompts per rollout
        "n_samples_per_prompt": 8,  # responses per prompt: the group
        "num_rollouts": 100,  # length of the run
        "num_epochs": 0,  # length of the run in passes over the data instead; 0 = use num_rollouts
        "max_response_len": 1024,  # tokens
        "temperature": 1.0,  # divides the logits, here and in the trainer; > 0
        "top_p": 1.0,  # smallest set of tokens with this probability; 1 = off
        "top_k": 0,  # the k likeliest tokens; 0 or -1 = off
        "min_p": 0.0,  # drop tokens below this share of the likeliest one; 0 = off
        "stop": (),  # texts that end a response
        "stop_token_ids": (),  # ids that end a response, beside those of the model
    },
    "sampler": {
        "slots": 0,  # responses decoded at once; 0 = auto
        "prefill_chunk": 4096,  # tokens of one prefill program (prompts x their bucket); one prompt at least
        "prompt_buckets": (64, 128, 256, 512, 1024, 2048),  # padded prompt lengths, tokens
        "length_buckets": (256, 512, 1024, 2048, 4096, 8192),  # cache lengths: prompt and response, tokens
        "steps_per_dispatch": 16,  # tokens per slot between two looks of the host
        "dtype": "auto",  # of the sampler's weights and cache: auto (as compute_dtype), bfloat16, float32
    },
    "reward": {
        "type": "math",  # math, gsm8k, exact_match, format, dcpo, or package.module:function
        "key": "reward",  # the part that trains, where the function returns a dict
        "timeout_s": 10.0,  # seconds for one sample
        "memory_mb": 2048,  # per worker, MiB
        "workers": 0,  # processes; 0 = auto
        "fallback": 0.0,  # score of a sample whose reward failed
        "post_process": "",  # dcpo (as the estimator dcpo has it), or package.module:function(samples, config)
        "overlong_buffer_len": 0,  # tokens before max_response_len over which the reward sinks; 0 = off
        "overlong_penalty": 1.0,  # by how much it has sunk at max_response_len
    },
    "algo": {
        # grpo, rloo, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo, dcpo, opd, sft (labels as
        # responses), or package.module:function
        "advantage_estimator": "grpo",
        "surrogate": "clip",  # clip, gspo, cispo, reinforce, sft, or package.module:function
        "loss_aggregation": "sample_mean",  # sample_mean, token_mean, constant, or package.module:function
        "loss_length": 0,  # tokens, the constant of constant; 0 = max_response_len
        "normalize_std": True,  # divide by the group's standard deviation
        "normalize_advantages": False,  # whiten the advantages over all trained tokens of the rollout
        "eps_clip": 0.2,  # the ratio is clipped at 1 - eps_clip
        "eps_clip_high": 0.2,  # and at 1 + eps_clip_high
        "dual_clip": 0.0,  # bound c > 1 of the loss where the advantage is negative; 0 = off
        "kl_coef": 0.0,  # weight of the KL to the reference in the reward
        "kl_reward_type": "k1",  # of that: k1, k2, k3, low_var_kl
        "kl_loss_coef": 0.0,  # weight of the KL to the reference in the loss; only one of the two is above 0
        "kl_loss_type": "low_var_kl",  # k1, k2, k3, low_var_kl
        "kl_unbiased": False,  # times the ratio to the old policy, which makes its gradient unbiased
        "kl_metric": False,  # compute the reference and log the KL also where kl_loss_coef is 0
        "entropy_coef": 0.0,  # weight of the entropy, which is maximised
        "gamma": 1.0,  # discount per token: ppo, reinforce_plus_plus
        "lambd": 1.0,  # GAE's lambda: ppo
        "critic": False,  # train a critic also for an estimator other than ppo
        "value_clip": 0.2,  # a value moves no further than this from its old one
        "num_critic_only_steps": 0,  # rollouts at first that train the critic alone
        "ref_update_interval": 0,  # rollouts after which the policy becomes the reference; 0 = never
        "old_logprobs": "trainer",  # trainer (scored before the first update) or rollout (the sampler's)
        "is_correction": "none",  # of the sampler's probabilities: none, truncate, mask
        "is_level": "token",  # ratio of each token, of the sequence, or its geometric mean
        "is_low": 0.0,  # bounds of that ratio
        "is_high": 2.0,
        "opsm_delta": 0.0,  # nats; samples of negative advantage that drifted further are left out; 0 = off
        "opd_kl_coef": 0.0,  # weight of log student - log teacher in the advantages
        "mask_truncated": False,  # responses cut at max_response_len are not trained, but count in their group
        "dcpo_calibration_weight": 0.5,  # of the squared error in the calibration reward
        "dcpo_calibration_scale": 1.0,  # of the calibration advantage
        "dcpo_hybrid_alpha": 0.5,  # share of the sample's own accuracy in the target; the rest is its group's
    },
    "optim": {
        "name": "adamw",  # adamw
        "lr": 1e-6,  # peak learning rate
        "critic_lr": 1e-5,  # of the critic
        "schedule": "constant",  # after the warm-up: constant, linear or cosine to 0
        "warmup_steps": 0,  # updates; the first one already has a rate above 0
        "weight_decay": 0.1,  # not on norms and biases
        "b1": 0.9,  # decay of the first moment
        "b2": 0.98,  # decay of the second moment
        "eps": 1e-8,  # added to the root of the second moment
        "clip_grad": 1.0,  # bound of the global gradient norm; 0 = off
        "max_nonfinite": 5,  # updates skipped in a row before the run stops
    },
    "train": {
        "global_batch_size": 0,  # samples per update; 0 = batch_size * n_samples_per_prompt, on-policy
        "max_tokens_per_device": 4096,  # tokens of one micro-batch on one device
        "length_buckets": (),  # row lengths, tokens; () = powers of two up to max_tokens_per_device
        "seed": 1234,  # of the sampler's draws and of new weights
    },
    "mesh": {
        "data": 1,  # replicas of the weights
        "fsdp": -1,  # shards of weights and optimizer; -1 = the remaining devices
        "tensor": 1,  # shards of heads, MLP and vocabulary
    },
    "eval": {
        "interval": 0,  # rollouts between evaluations; 0 = off
        "data": (),  # name=path, one for each set
        "n_samples": 1,  # responses per prompt
        "temperature": -1.0,  # 0 = greedy; -1 = the rollout's
        "top_p": -1.0,  # -1 = the rollout's
        "top_k": -1,  # 0 = off; -1 = the rollout's
        "max_response_len": -1,  # tokens; -1 = the rollout's
        "before_train": True,  # also before the first rollout
    },
    "checkpoint": {
        "dir": "",  # "" = checkpoints in the run's directory
        "save_interval": 50,  # rollouts; 0 = only at the end
        "keep": 3,  # newest checkpoints kept
        "async_save": True,  # write while the run goes on
        "load": "auto",  # auto (the newest of dir, if any), none, or a path
        "save_hf_interval": 0,  # rollouts between exports as Hugging Face folders, and at the end; 0 = off
        "save_hf_dtype": "bfloat16",  # of those: float32, bfloat16, float16
    },
    "log": {
        "dir": "runs/{config}-{time}",  # the run's directory
        "tensorboard": True,  # event files in the run's directory, or in TENSORBOARD_DIR
        "project": "rljax",  # of wandb, and the folder below TENSORBOARD_DIR
        "experiment": "",  # name of the run there; "" = the name of its directory
        "wandb": False,  # needs the package wandb
        "jsonl": True,  # metrics.jsonl
        "samples": 4,  # responses per rollout in samples.jsonl
        "interval": 1,  # rollouts between two console lines
    },
}
INT_TUPLES = frozenset(
    {"rollout.stop_token_ids", "sampler.prompt_buckets", "sampler.length_buckets", "train.length_buckets"}
)
# May differ when a run is resumed: where it writes and runs, what it evaluates, how long and how fast it learns.
FREE_SECTIONS = frozenset({"log", "eval", "checkpoint", "mesh", "debug"})
FREE_KNOBS = frozenset({"rollout.num_rollouts", "rollout.num_epochs", "optim.lr", "optim.critic_lr"})
BOOLS = {"true": True, "1": True, "false": False, "0": False}


def get_config() -> ConfigDict:
    """All knobs at their defaults: the base of every config file. Locked: a new key or another type raises."""
    return ConfigDict(copy.deepcopy(DEFAULTS)).lock()


def flat(sections: Mapping[str, Any], source: str = "config") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`; a section that is no mapping raises ValueError."""
    knobs = {}
    for section, keys in sections.items():
        if not isinstance(keys, Mapping):
            raise ValueError(f"{source}: {section} = {keys!r}: expected a section of knobs; {_suggest(section)}")
        knobs.update({f"{section}.{key}": value for key, value in keys.items()})
    return knobs


def _likeness(word: str, known: str) -> float:
    """Between 0 and 1; initials count as near, so that learning_rate finds lr."""
    initials = "".join(part[:1] for part in word.split("_"))
    return max(difflib.SequenceMatcher(None, word, known).ratio(), 0.9 * (initials == known))


def _suggest(name: str) -> str:
    """Which knob may have been meant by the unknown `name`."""
    section, _, key = name.partition(".")
    if section not in DEFAULTS:
        elsewhere = [f"{s}.{k}" for s, keys in DEFAULTS.items() for k in keys if k == (key or section)]
        near = max(DEFAULTS, key=lambda known: _likeness(section, known))
        hint = " or ".join(elsewhere) or (f"{near}.{key}" if key in DEFAULTS[near] else near)
        return f"did you mean {hint}? Sections: {', '.join(DEFAULTS)}"
    near = max(DEFAULTS[section], key=lambda known: _likeness(key, known))
    elsewhere = "".join(f" or {s}.{key}" for s, keys in DEFAULTS.items() if key in keys)
    return f"did you mean {section}.{near}{elsewhere}? Keys of {section}: {', '.join(DEFAULTS[section])}"


def _default(name: str, source: str) -> Any:
    """The default of the knob `name`; ValueError with the nearest one where there is none."""
    section, _, key = name.partition(".")
    if key not in DEFAULTS.get(section, {}):
        raise ValueError(f"{source}: unknown knob {name}; {_suggest(name)}")
    return DEFAULTS[section][key]


def _element(name: str) -> type:
    """What the tuple of the knob `name` holds."""
    return int if name in INT_TUPLES else str


def _typed(name: str, value: Any, source: str) -> Any:
    """`value` as the type of the knob's default; an int may stand for a float and a list for a tuple."""
    default = _default(name, source)
    wanted = type(default)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is tuple and isinstance(value, (list, tuple)):
        if all(type(item) is _element(name) for item in value):
            return tuple(value)
        raise ValueError(f"{source}: {name} = {value!r}: expected a tuple of {_element(name).__name__}")
    if type(value) is not wanted:
        raise ValueError(f"{source}: {name} = {value!r}: expected {wanted.__name__}, got {type(value).__name__}")
    return value


def _parse_tuple(text: str, element: type) -> tuple[Any, ...]:
    """`('a','b')`, `[1, 2]`, `'a'` as Python writes them, or `a,b`, every space and line end kept; empty text is
    the empty tuple."""
    if text.strip()[:1] in tuple("([\"'"):
        value = ast.literal_eval(text.strip())
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    parts = text.split(",")
    return tuple(element(part) for part in (parts[:-1] if parts[-1] == "" else parts))


def parse_value(name: str, text: str) -> Any:
    """The value of the override `name=text` in the type of the knob; ValueError naming both otherwise."""
    default = _default(name, "command line")
    try:
        if isinstance(default, bool):
            return BOOLS[text.strip().lower()]
        if isinstance(default, tuple):
            value = _parse_tuple(text, _element(name))
        else:
            value = type(default)(text)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        wanted = {bool: "true or false", tuple: f"a tuple of {_element(name).__name__}, such as a,b or ('a','b')"}
        kind = wanted.get(type(default), type(default).__name__)
        raise ValueError(f"command line: {name} = {text!r}: expected {kind}") from error
    return _typed(name, value, "command line")


def parse(argv: list[str]) -> tuple[str, list[str], list[str]]:
    """Split arguments into the config's name, overrides `section.key=value`, and the rest.

    Taken: `--config NAME`, `--config=NAME`, `--config.a.b=VALUE`, `--config.a.b VALUE`, and `--config.a.b` alone
    for true. A value that begins with two dashes needs the form with `=`.
    """
    name, overrides, rest = DEFAULT, [], []
    waiting = list(argv)
    while waiting:
        flag, equals, value = waiting.pop(0).partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            rest.append(flag + equals + value)
            continue
        if not equals and waiting and not waiting[0].startswith("--"):
            equals, value = "=", waiting.pop(0)
        if flag == "--config":
            if not value:
                raise ValueError(f"--config needs a name, such as --config={DEFAULT}")
            name = value
        else:
            overrides.append(flag.removeprefix("--config.") + equals + value)
    return name, overrides, rest


def find(name: str) -> tuple[pathlib.Path, str]:
    """File and variant of `grpo_qwen.py:8b`: a path, also from the working directory, then a file of configs/.

    The ending .py may be left out. Raises ValueError with what exists.
    """
    for text, variant in ((name, ""), name.rpartition(":")[::2]):
        for folder in (pathlib.Path.cwd(), CONFIGS):
            for candidate in (folder / text, folder / f"{text}.py"):
                if text and candidate.is_file():
                    return candidate, variant
    here = sorted(path.name for path in CONFIGS.glob("*.py"))
    raise ValueError(f"config {name!r}: no such file in {pathlib.Path.cwd()} or {CONFIGS}; there: {', '.join(here)}")


def _from_module(path: pathlib.Path, text: str, variant: str) -> Any:
    """What `get_config` of a Python file returns; an unknown knob is reported with the file's line."""
    module = ModuleType(f"rljax_config_{path.stem}")
    module.__file__ = str(path)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
        if not hasattr(module, "get_config"):
            raise ValueError(f"{path}: defines no function get_config")
        if variant and not inspect.signature(module.get_config).parameters:
            raise ValueError(f"{path}: has no variants, so {variant!r} is none of them")
        return module.get_config(variant) if variant else module.get_config()
    except ValueError:
        raise
    except Exception as error:  # the boundary to a user's file: anything may go wrong in it
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(path)
        unknown = re.search(r'Key "(\w+)" does not exist', str(error))  # ml_collections' words; ours name the nearest
        section = unknown and re.search(rf"(\w+)\W+{unknown[1]}\b", where)
        name = f"{section[1]}.{unknown[1]}" if section and section[1] in DEFAULTS else unknown and unknown[1]
        raise ValueError(f"{where}: " + (f"unknown knob {name}; {_suggest(name)}" if name else str(error))) from error


def _from_file(path: pathlib.Path, variant: str) -> dict[str, Any]:
    """The knobs that a config file sets, flat and of the right types."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    found = found if path.suffix == ".json" else _from_module(path, text, variant)
    found = found.to_dict() if isinstance(found, ConfigDict) else found
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: holds {type(found).__name__}, expected the sections of a config")
    return {name: _typed(name, value, str(path)) for name, value in flat(found, str(path)).items()}


def load(name: str | pathlib.Path, overrides: list[str] | tuple[str, ...] = (), variant: str = "") -> ConfigDict:
    """The config file `name` (see `find`; also a run's config.json) with overrides `optim.lr=2e-6` applied. `variant`
    is what may also follow the name behind a colon.

    Overrides may carry the prefix `--config.`; of two for one knob the last wins. Raises ValueError naming file
    or command line, knob and value.
    """
    knobs = flat(DEFAULTS) | _from_file(*find(f"{name}:{variant}" if variant else str(name)))
    arguments = []
    for text in overrides:
        is_value = bool(arguments) and arguments[-1].startswith("--") and "=" not in arguments[-1]
        arguments.append(text if text.startswith("--") or is_value else f"--config.{text}")
    _, pairs, rest = parse(arguments)
    if rest:
        raise ValueError(f"command line: {' '.join(rest)}: not of the form --config.section.key=value")
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals and not isinstance(_default(key, "command line"), bool):
            raise ValueError(f"command line: --config.{key} needs a value")
        knobs[key] = parse_value(key, text if equals else "true")
    config = get_config()
    for key, value in knobs.items():
        section, _, leaf = key.partition(".")
        config[section][leaf] = value
    return config


def resolved(config: ConfigDict) -> str:
    """The whole config as JSON text: what --print_config shows and what config.json in a run's directory holds."""
    ordered = {section: {key: config[section][key] for key in keys} for section, keys in DEFAULTS.items()}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Knobs that differ between two resolved configs and must not when a run is resumed, with both values."""
    before, after = (flat(json.loads(json.dumps(dict(side)))) for side in (old, new))
    changed = []
    for name in dict.fromkeys([*before, *after]):
        if name.partition(".")[0] in FREE_SECTIONS or name in FREE_KNOBS:
            continue
        if name not in before or name not in after or before[name] != after[name]:
            values = [repr(side[name]) if name in side else "not set" for side in (before, after)]
            changed.append(f"{name}: {values[0]} in the run, {values[1]} now")
    return changed
