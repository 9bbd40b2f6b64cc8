"""Knobs: loading, overrides, every rule of `validate`, resume's comparison, and the files of configs/."""

from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax import config, config_rules
from shared_data import cases

FILES = sorted(path.name for path in config.CONFIGS.glob("*.py"))
BASE = "from rljax import config\n\n\ndef get_config(variant=''):\n    c = config.get_config()\n{}    return c\n"


def refusal(*overrides: str, name: str = "quickstart.py", devices: int = 1) -> str:
    """The message of the error that these overrides lead to, in loading or validation."""
    with pytest.raises(ValueError) as caught:
        config.validate(config.load(name, overrides), devices)
    return str(caught.value)


def write(path: pathlib.Path, *lines: str) -> str:
    path.write_text(BASE.format("".join(f"    {line}\n" for line in lines)))
    return str(path)


def known(name: str) -> bool:
    section, _, key = name.partition(".")
    return key in config.DEFAULTS.get(section, {})


# Cases


@pytest.mark.parametrize("case", cases("config"), ids=lambda case: case["id"])
def test_case(case, tmp_path):
    given_, expected = case["input"], case["expected"]
    if "file" in given_:
        lines = [f"c.{section}.{key} = {value!r}" for section, keys in given_["file"].items()
                 for key, value in keys.items()]  # fmt: skip
        loaded = config.load(write(tmp_path / "mine.py", *lines), given_["command_line"])
        assert loaded.rollout.num_rollouts == expected["num_rollouts"]
    elif isinstance(given_.get("overrides"), dict):
        # A knob of a later version is refused; the others must arrive with their types.
        texts = {name: text for name, text in given_["overrides"].items() if known(name)}
        assert len(texts) >= 3
        loaded = config.load("quickstart.py", [f"{name}={text}" for name, text in texts.items()])
        for name in texts:
            section, key = name.split(".")
            wanted = expected["values"][name]
            assert loaded[section][key] == (tuple(wanted) if isinstance(wanted, list) else wanted)
            assert type(loaded[section][key]).__name__ == expected["types"][name]
    else:
        arguments = given_.get("overrides") or given_["arguments"]
        name, _, text = arguments[0].removeprefix("--config.").partition("=")
        message = refusal(*arguments)
        assert name in message
        if "message_suggests" in expected:
            assert "did you mean optim.lr?" in message
        else:
            assert text in message


@pytest.mark.parametrize("case", [c for c in cases("numerics") if c["input"].get("scenario") == "configuration"],
                         ids=lambda case: case["id"])  # fmt: skip
def test_refused_settings(case):
    message = refusal(*[f"{name}={value}" for name, value in case["input"]["overrides"].items()])
    assert all(name in message for name in case["expected"]["message_names"])


# Overrides


def texts(kind: type):
    return {
        bool: st.sampled_from(["true", "false", "True", "FALSE", "1", "0"]),
        int: st.integers(-(2**40), 2**40).map(str),
        float: st.floats(allow_nan=False, allow_infinity=False).map(repr),
        str: st.text(),
    }[kind]


@given(st.data())
def test_scalar_overrides_round_trip(data):
    name = data.draw(st.sampled_from([n for n, v in config.flat(config.DEFAULTS).items() if type(v) is not tuple]))
    kind = type(config.flat(config.DEFAULTS)[name])
    text = data.draw(texts(kind))
    value = config.parse_value(name, text)
    assert type(value) is kind
    assert value == (text.lower() in ("true", "1") if kind is bool else kind(text))


@given(st.lists(st.text()), st.lists(st.integers(0, 10**9)))
def test_tuple_overrides_round_trip(words, numbers):
    for form in (tuple(words), list(words)):
        assert config.parse_value("rollout.stop", repr(form)) == tuple(words)
    for text in (repr(tuple(numbers)), repr(numbers), ",".join(map(str, numbers)), ", ".join(map(str, numbers))):
        assert config.parse_value("sampler.prompt_buckets", text) == tuple(numbers)


@pytest.mark.parametrize("text, value", [
    ("a,b", ("a", "b")), ("a", ("a",)), ("a,", ("a",)), ("", ()), ("()", ()), ("'('", ("(",)), ('"\\n"', ("\n",)),
    ("'a','b'", ("a", "b")), ("('a',)", ("a",)), ("x=y@[0:5]", ("x=y@[0:5]",)),
])  # fmt: skip
def test_text_tuples(text, value):
    assert config.parse_value("rollout.stop", text) == value


@pytest.mark.parametrize("name, text", [
    ("rollout.batch_size", "1.5"), ("rollout.batch_size", "true"), ("rollout.batch_size", ""), ("optim.lr", "fast"),
    ("optim.lr", "1e-6,"), ("data.shuffle", "maybe"), ("data.shuffle", "2"), ("sampler.prompt_buckets", "64,a"),
    ("sampler.prompt_buckets", "64,1.5"), ("sampler.prompt_buckets", "(64,'a')"), ("sampler.prompt_buckets", "True,"),
    ("rollout.stop", "('a'"), ("rollout.stop", "(1, 2)"), ("rollout.stop", "(__import__('os'),)"),
])  # fmt: skip
def test_wrong_types_are_refused(name, text):
    message = refusal(f"--config.{name}={text}")
    assert name in message and any(value in message for value in (repr(text), text, text.replace(",", ", ")))


@pytest.mark.parametrize("name, hint", [
    ("optim.learning_rate", "optim.lr"), ("optim.weightdecay", "optim.weight_decay"), ("lr", "optim.lr"),
    ("optimizer.lr", "optim.lr"), ("train.lr", "optim.lr"), ("rollout.tempature", "rollout.temperature"),
    ("algo.epsclip_high", "algo.eps_clip_high"), ("optim", "optim"), ("rollout.stop.x", "rollout.stop"),
])  # fmt: skip
def test_unknown_keys_name_the_nearest(name, hint):
    message = refusal(f"--config.{name}=1")
    assert f"unknown knob {name};" in message and hint in message.partition("did you mean ")[2].partition("?")[0]


def test_arguments_are_split():
    argv = ["--config", "grpo_qwen.py:8b", "--config.optim.lr", "2e-6", "--print_config", "--config.data.shuffle",
            "--config.rollout.stop=--", "--explain", "train/loss", "--config.log.wandb"]  # fmt: skip
    name, overrides, rest = config.parse(argv)
    assert name == "grpo_qwen.py:8b"
    assert overrides == ["optim.lr=2e-6", "data.shuffle", "rollout.stop=--", "log.wandb"]
    assert rest == ["--print_config", "--explain", "train/loss"]
    assert config.parse([]) == ("quickstart.py", [], [])
    loaded = config.load("quickstart.py", ["--config.optim.lr", "2e-6", "data.shuffle=0", "--config.data.shuffle"])
    assert loaded.optim.lr == 2e-6 and loaded.data.shuffle is True
    _, overrides, _ = config.parse(["--config.rollout.partial", "--config.eval.interval=0"])  # without the prefix
    loaded = config.load("quickstart.py", overrides)
    assert loaded.rollout.partial is True and loaded.eval.interval == 0
    for bad in (["--config"], ["--config", "--print_config"], ["--config="]):
        with pytest.raises(ValueError, match="--config needs a name"):
            config.parse(bad)
    assert "optim.lr needs a value" in refusal("--config.optim.lr")
    assert "--lr=3" in refusal("--lr=3")


# Files


def test_command_line_over_file_over_default(tmp_path):
    name = write(tmp_path / "mine.py", "c.optim.lr = 3", "c.optim.b1 = 0.5")
    loaded = config.load(name, ["optim.b1=0.6", "optim.b1=0.7"])
    assert (loaded.optim.lr, loaded.optim.b1, loaded.optim.b2) == (3.0, 0.7, config.get_config().optim.b2)
    assert type(loaded.optim.lr) is float


@pytest.mark.parametrize("line, words", [
    ("c.optim.lerning_rate = 3e-6", ("mine.py:6", "lerning_rate")),
    ("c.optimm.lr = 1", ("mine.py:6", "optimm")),
    ("c.optim.lr = 'fast'", ("mine.py:6", "fast")),
    ("c.rollout.batch_size = 1.5", ("mine.py:6", "1.5")),
    ("c.rollout.batch_size = True", ("mine.py", "rollout.batch_size = True", "expected int")),
    ("c.rollout.batch_size = None", ("mine.py", "rollout.batch_size = None", "expected int")),
    ("c.sampler.prompt_buckets = ('a',)", ("mine.py", "sampler.prompt_buckets", "tuple of int")),
    ("c.unlock(); c.optim.lerning_rate = 1", ("mine.py", "unknown knob optim.lerning_rate", "optim.lr")),
    ("c.unlock(); c.optimm = 1", ("mine.py", "optimm = 1", "optim")),
    ("c = 3", ("mine.py", "holds int")),
    ("import no_such_package", ("mine.py:6", "no_such_package")),
    ("c.optim.lr = fast", ("mine.py:6", "fast")),
    ("c = = 3", ("mine.py", "line 6")),
])  # fmt: skip
def test_bad_files_are_refused(tmp_path, line, words):
    message = refusal(name=write(tmp_path / "mine.py", line))
    assert all(word in message for word in words), message


def test_a_file_without_get_config_and_one_without_variants(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "no function get_config" in refusal(name=str(tmp_path / "empty.py"))
    (tmp_path / "plain.py").write_text("from rljax.config import get_config as base\n\n\ndef get_config():\n"
                                       "    return {'optim': {'lr': 2}}\n")  # fmt: skip
    assert config.load(str(tmp_path / "plain.py")).optim.lr == 2.0
    assert "'8b'" in refusal(name=str(tmp_path / "plain.py:8b"))


@pytest.mark.parametrize("content", [
    b"{", b"null", b"\xff\xfe", b"[1]", b'{"optim": {"lr": "1"}}', b'{"optim": {"x": 1}}', b'{"optim": 1}',
])  # fmt: skip
def test_bad_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in refusal(name=str(tmp_path / "config.json"))


def test_lists_become_tuples(tmp_path):
    loaded = config.load(write(tmp_path / "mine.py", "c.rollout.stop = ['a']", "c.sampler.prompt_buckets = [8]"))
    assert loaded.rollout.stop == ("a",) and loaded.sampler.prompt_buckets == (8,)


def test_names_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.find("grpo_qwen.py:8b") == (config.CONFIGS / "grpo_qwen.py", "8b")
    assert config.find("grpo_qwen")[0] == config.CONFIGS / "grpo_qwen.py"
    write(tmp_path / "grpo_qwen.py", "c.optim.lr = 5.0")
    assert config.find("grpo_qwen.py:x") == (tmp_path / "grpo_qwen.py", "x")
    assert config.load("./grpo_qwen.py").optim.lr == 5.0
    message = refusal(name="grpo_quen.py")
    assert "grpo_quen.py" in message and "grpo_llama.py, grpo_qwen.py" in message


@pytest.mark.parametrize("name", [*FILES, "grpo_qwen.py:8b", "grpo_llama.py:3b"])
def test_every_config_loads_and_validates(name):
    loaded = config.load(name)
    config.validate(loaded, 8)
    assert "no variant 'none'" in refusal(name=f"{name.partition(':')[0]}:none")
    assert type(config.row_buckets(loaded)) is tuple


def test_the_reference_script():
    c = config.load("grpo_qwen.py")
    assert (c.rollout.batch_size, c.rollout.n_samples_per_prompt, c.train.global_batch_size) == (256, 8, 2048)
    assert (c.rollout.max_response_len, c.eval.max_response_len, c.train.max_tokens_per_device) == (3000, 16384, 9216)
    assert (c.algo.eps_clip, c.algo.eps_clip_high, c.algo.kl_loss_coef) == (0.2, 0.28, 0.01)
    assert (c.checkpoint.save_interval, c.eval.interval, c.rollout.num_rollouts) == (40, 20, 2000)
    assert c.model.path == "Qwen/Qwen3-0.6B" and config.load("grpo_qwen.py:8b").model.path == "Qwen/Qwen3-8B"


def test_resolved_is_json_and_loads_again(tmp_path):
    loaded = config.load("grpo_qwen.py", ["rollout.stop=('a', 'é\\n')", "log.experiment=ß"])
    (tmp_path / "config.json").write_text(config.resolved(loaded), encoding="utf-8")
    again = config.load(str(tmp_path / "config.json"))
    assert again == loaded and again.rollout.stop == ("a", "é\n")
    assert list(json.loads(config.resolved(loaded))) == list(config.DEFAULTS)
    assert config.diff(json.loads(config.resolved(loaded)), loaded.to_dict()) == []


def test_defaults_are_never_shared():
    first = config.get_config()
    first.optim.lr = 5.0
    assert config.get_config().optim.lr == 1e-6
    with pytest.raises(AttributeError):
        first.optim.new_knob = 1


def test_resume_compares_what_must_not_change():
    old = config.load("quickstart.py").to_dict()
    free = ["log.dir=x", "eval.interval=1", "checkpoint.keep=9", "mesh.data=2", "rollout.num_rollouts=1",
            "rollout.num_epochs=2", "optim.lr=1"]  # fmt: skip
    assert config.diff(old, config.load("quickstart.py", free).to_dict()) == []
    new = config.load("quickstart.py", ["optim.b1=0.5", "rollout.stop=a", "data.seed=1"]).to_dict()
    assert sorted(config.diff(old, new)) == [
        "data.seed: 42 in the run, 1 now", "optim.b1: 0.9 in the run, 0.5 now", "rollout.stop: [] in the run, ['a'] now"
    ]  # fmt: skip
    del new["optim"]["b2"]
    assert "optim.b2: 0.98 in the run, not set now" in config.diff(old, new)


# Rules

SMALLEST = {
    "data.seed": 0, "data.max_prompt_len": 0, "rollout.batch_size": 1, "rollout.n_samples_per_prompt": 1,
    "rollout.num_rollouts": 1, "rollout.num_epochs": 0, "rollout.max_response_len": 1, "rollout.top_k": -1,
    "rollout.min_p": 0, "sampler.slots": 0, "sampler.prefill_chunk": 0, "sampler.steps_per_dispatch": 1,
    "reward.memory_mb": 1, "reward.workers": 0, "algo.loss_length": 0, "algo.kl_loss_coef": 0, "algo.entropy_coef": 0,
    "rollout.over_sampling_batch_size": 0, "rollout.max_version_lag": 0, "rollout.max_filter_rounds": 1,
    "algo.kl_coef": 0, "algo.gamma": 0, "algo.lambd": 0, "algo.value_clip": 0, "algo.num_critic_only_steps": 0,
    "algo.ref_update_interval": 0, "algo.is_low": 0, "algo.opsm_delta": 0, "algo.opd_kl_coef": 0,
    "algo.dcpo_calibration_weight": 0, "algo.dcpo_calibration_scale": 0, "algo.dcpo_hybrid_alpha": 0,
    "reward.overlong_buffer_len": 0, "reward.overlong_penalty": 0, "optim.critic_lr": 0,
    "reward.repetition_penalty": 0, "reward.format_penalty": 0,
    "optim.lr": 0, "optim.warmup_steps": 0, "optim.weight_decay": 0, "optim.b1": 0, "optim.b2": 0,
    "optim.clip_grad": 0, "optim.max_nonfinite": 1, "train.global_batch_size": 0, "train.max_tokens_per_device": 1,
    "train.seed": 0, "eval.interval": 0, "eval.n_samples": 1, "eval.top_k": -1, "checkpoint.save_interval": 0,
    "checkpoint.keep": 1, "checkpoint.save_hf_interval": 0, "log.samples": 0, "log.interval": 1,
}  # fmt: skip
BAD = [  # overrides of the quickstart, and words of the message
    *[([f"{name}={low - 1}"], [name, str(low - 1), f"at least {low}"]) for name, low in SMALLEST.items()],
    *[([f"{name}=0"], [name, "above 0"]) for name in ("rollout.temperature", "reward.timeout_s", "algo.eps_clip",
                                                       "algo.eps_clip_high", "optim.eps", "rollout.top_p")],
    *[([f"{name}=1"], [name, "below 1"]) for name in ("rollout.min_p", "algo.eps_clip", "optim.b1", "optim.b2")],
    *[([f"{name}={value}"], [name, value, "finite"]) for name in ("optim.lr", "rollout.temperature", "reward.fallback")
      for value in ("nan", "inf", "-inf")],
    *[([f"{name}=strange"], [name, "'strange'", one]) for name, one in (
        ("model.init", "random"), ("checkpoint.save_hf_dtype", "float16"),
        ("model.compute_dtype", "bfloat16"), ("model.remat", "full"), ("sampler.dtype", "float32"),
        ("reward.type", "package.module:function"), ("optim.name", "adamw"), ("optim.schedule", "cosine"),
        ("algo.advantage_estimator", "grpo"), ("algo.surrogate", "clip"), ("algo.loss_aggregation", "token_mean"),
        ("algo.kl_loss_type", "low_var_kl"), ("algo.old_logprobs", "rollout"))],
    *[([f"{name}= "], [name, "empty"]) for name in ("model.path", "data.prompt_data", "data.input_key",
                                                   "reward.key", "log.dir", "checkpoint.load")],
    (["reward.type=mine:"], ["reward.type", "'mine:'"]),
    (["reward.type=a:b:c"], ["reward.type", "a:b:c"]),
    (["model.trainable=("], ["model.trainable", "regular expression"]),
    (["model.frozen=*"], ["model.frozen", "regular expression"]),
    (["model.chat_template_kwargs={a}"], ["model.chat_template_kwargs", "not JSON"]),
    (["model.chat_template_kwargs=[]"], ["model.chat_template_kwargs", "object"]),
    (["rollout.top_p=1.1"], ["rollout.top_p", "1.1"]),
    (["rollout.stop=('a','')"], ["rollout.stop", "empty"]),
    (["rollout.stop_token_ids=1,-2"], ["rollout.stop_token_ids", "-2"]),
    (['rollout.logit_bias={"1": 1, "01": 2}'], ["rollout.logit_bias", "different token ids"]),
    (['rollout.logit_bias={"1": -Infinity}'], ["rollout.logit_bias", "finite numbers"]),
    (["algo.dual_clip=1"], ["algo.dual_clip", "1.0"]),
    (["algo.dual_clip=-3"], ["algo.dual_clip", "-3.0"]),
    (["algo.loss_length=5"], ["algo.loss_length", "5", "sample_mean"]),
    (["algo.surrogate=sft"], ["algo.surrogate", "grpo", "sft"]),
    (["algo.advantage_estimator=sft"], ["algo.surrogate", "clip", "sft"]),
    (["algo.advantage_estimator=sft", "algo.surrogate=sft"], ["rollout.n_samples_per_prompt = 8"]),
    (["rollout.n_samples_per_prompt=1"], ["algo.advantage_estimator", "rollout.n_samples_per_prompt = 1"]),
    (["algo.kl_coef=0.1", "algo.kl_loss_coef=0.2"], ["algo.kl_coef = 0.1", "algo.kl_loss_coef = 0.2"]),
    (["algo.ref_update_interval=5"], ["algo.ref_update_interval = 5", "no reference"]),
    (["model.critic_path=x"], ["model.critic_path", "algo.critic"]),
    (["algo.num_critic_only_steps=2"], ["algo.num_critic_only_steps = 2", "no critic"]),
    (["algo.opd_kl_coef=1"], ["algo.opd_kl_coef", "model.teacher_path is empty"]),
    (["model.teacher_path=x"], ["model.teacher_path", "opd_kl_coef is 0"]),
    (["algo.advantage_estimator=opd"], ["algo.advantage_estimator = opd", "opd_kl_coef"]),
    (["reward.overlong_buffer_len=2000"], ["reward.overlong_buffer_len = 2000", "rollout.max_response_len"]),
    (["algo.is_low=1.5"], ["algo.is_low = 1.5", "algo.is_high = 2.0"]),
    (["algo.is_high=0.5"], ["algo.is_low = 0.0", "algo.is_high = 0.5"]),
    (["algo.is_correction=mask", "algo.old_logprobs=rollout"], ["algo.is_correction = mask", "algo.old_logprobs"]),
    (["algo.kl_unbiased=true"], ["algo.kl_unbiased = True", "no KL"]),
    (["algo.gamma=1.5"], ["algo.gamma = 1.5", "at most 1"]),
    (["algo.is_level=tokens"], ["algo.is_level", "geometric"]),
    (["reward.post_process=dcp"], ["reward.post_process", "dcpo"]),
    (["rollout.over_sampling_batch_size=8"], ["rollout.over_sampling_batch_size = 8", "rollout.batch_size = 64"]),
    (["rollout.dynamic_filter=reward_sd"], ["rollout.dynamic_filter", "reward_std"]),
    (["rollout.max_version_lag=2"], ["rollout.max_version_lag = 2", "rollout.partial"]),
    (["rollout.mask_offpolicy_in_partial=true"], ["rollout.mask_offpolicy_in_partial", "rollout.partial"]),
    (["eval.overrides={"], ["eval.overrides", "not JSON"]),
    (['eval.overrides={"aime": {}}'], ["eval.overrides", "'aime'", "sums"]),
    (['eval.overrides={"sums": {"n": 2}}'], ["sums.n is unknown", "n_samples"]),
    (['eval.overrides={"sums": {"n_samples": "2"}}'], ["sums.n_samples", "'2'", "int"]),
    (['eval.overrides={"sums": {"n_samples": 0}}'], ["sums.n_samples = 0", "at least 1"]),
    (['eval.overrides={"sums": {"reward": "maths"}}'], ["sums.reward", "'maths'", "math"]),
    (["reward.type=remote", "reward.url=localhost:1"], ["reward.url = 'localhost:1'", "http://"]),
    (["reward.url=http://x"], ["reward.type = exact_match", "http://x"]),
    (["algo.opsm_delta=0.1", "train.global_batch_size=0"], ["algo.opsm_delta = 0.1", "one update"]),
    (["algo.dual_clip=3", "algo.surrogate=cispo"], ["algo.dual_clip = 3.0", "cispo"]),
    (["algo.advantage_estimator=dcpo", "algo.kl_coef=0.1"], ["algo.kl_coef = 0.1", "dcpo"]),
    (["algo.advantage_estimator=dcpo", "reward.overlong_buffer_len=2"], ["reward.overlong_buffer_len = 2", "dcpo"]),
    (["algo.advantage_estimator=opd", "algo.opd_kl_coef=1", "model.teacher_path=x", "reward.format_penalty=1"],
     ["reward.format_penalty = 1.0", "opd"]),
    (["algo.advantage_estimator=sft", "algo.surrogate=sft", "rollout.n_samples_per_prompt=1", "rollout.batch_size=256",
      "rollout.partial=true"], ["rollout.partial = True", "sft"]),
    (['eval.overrides={"sums": {"top_p": 0.0}}'], ["eval.overrides: sums.top_p = 0.0"]),
    (['eval.overrides={"sums": {"temperature": 1e-30}}'], ["eval.overrides: sums.temperature = 1e-30"]),
    (['eval.overrides={"sums": {"max_response_len": 0}}'], ["eval.overrides: sums.max_response_len = 0"]),
    (['eval.overrides={"sums": {"reward": "remote"}}'], ["sums.reward = remote"]),
    (['eval.overrides={"sums": {"reward": "math"}}', "reward.group=true"], ["sums.reward", "reward.group = True"]),
    (["debug.train_only=true"], ["debug.train_only", "debug.load_rollouts"]),
    (["debug.rollout_only=true", "debug.load_rollouts=x"], ["debug.rollout_only", "debug.load_rollouts = 'x'"]),
    (["sampler.prompt_buckets=()"], ["sampler.prompt_buckets"]),
    (["sampler.prompt_buckets=0,16"], ["sampler.prompt_buckets", "0"]),
    (["sampler.prompt_buckets=16,8"], ["sampler.prompt_buckets", "16 stands before 8"]),
    (["sampler.length_buckets=32,32"], ["sampler.length_buckets", "32 stands before 32"]),
    (["train.length_buckets=0,32"], ["train.length_buckets", "at least 1"]),
    (["train.length_buckets=64,32"], ["train.length_buckets", "64 stands before 32"]),
    (["data.max_prompt_len=17"], ["data.max_prompt_len = 17", "16"]),
    (["rollout.max_response_len=17"], ["sampler.length_buckets", "32", "16", "17", "33"]),
    (["sampler.prompt_buckets=8,64", "data.max_prompt_len=9"], ["64 tokens", "32"]),
    (["train.max_tokens_per_device=23"], ["train.max_tokens_per_device = 23", "24"]),
    (["train.length_buckets=16,23"], ["train.length_buckets", "23", "24"]),
    (["train.length_buckets=16,4096"], ["train.length_buckets", "4096", "2048"]),
    (["train.global_batch_size=200"], ["train.global_batch_size = 200", "64 * 8 = 512"]),
    (["train.global_batch_size=1024"], ["train.global_batch_size = 1024", "512"]),
    (["eval.data=path.jsonl"], ["eval.data", "path.jsonl"]),
    (["eval.data=a="], ["eval.data", "a="]),
    (["eval.data=a/b=c"], ["eval.data", "a/b=c"]),
    (["eval.data=a=b,a=c"], ["eval.data", "'a'"]),
    (["eval.data=()"], ["eval.interval = 25", "eval.data"]),
    (["eval.temperature=-0.5"], ["eval.temperature", "-0.5"]),
    (["eval.top_p=0"], ["eval.top_p", "0.0"]),
    (["eval.top_p=2"], ["eval.top_p", "2.0"]),
    (["eval.max_response_len=0"], ["eval.max_response_len", "0"]),
    (["eval.max_response_len=17"], ["sampler.length_buckets", "32", "eval.max_response_len", "33"]),
    (["log.dir=runs/{name}"], ["log.dir", "name"]),
    (["log.dir=runs/{config"], ["log.dir"]),
    (["mesh.data=2"], ["mesh.data = 2", "1 devices"]),
    (["mesh.data=0"], ["mesh.data = 0", "at least 1"]),
    (["mesh.data=-1"], ["only one"]),
    (["mesh.fsdp=2"], ["multiply to 2", "1 devices"]),
]  # fmt: skip


@pytest.mark.parametrize("overrides, words", BAD, ids=lambda value: value[0])
def test_rules(overrides, words):
    message = refusal(*overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("overrides", [
    ["rollout.top_k=-1"], ["train.global_batch_size=0"], ["train.global_batch_size=512"], ["data.max_prompt_len=16"],
    ["train.max_tokens_per_device=24"], ["train.length_buckets=24"], ["eval.temperature=0"], ["algo.dual_clip=3"],
    ["algo.loss_aggregation=constant", "algo.loss_length=5"], ["reward.type=mine.rewards:score"], ["optim.lr=0"],
    ["algo.advantage_estimator=my.module:estimate"], ["optim.warmup_steps=5000"], ["rollout.max_response_len=16"],
    ["eval.interval=0", "eval.data=()"], ["optim.schedule=cosine", "optim.warmup_steps=299"],
    ["algo.advantage_estimator=sft", "algo.surrogate=sft", "rollout.n_samples_per_prompt=1", "rollout.batch_size=256"],
])  # fmt: skip
def test_rules_allow_the_edges(overrides):
    config.validate(config.load("quickstart.py", overrides), 1)


@pytest.mark.parametrize("sizes, devices, expected", [
    ((1, -1, 1), 8, (1, 8, 1)), ((2, -1, 2), 8, (2, 2, 2)), ((-1, 2, 2), 8, (2, 2, 2)), ((2, 2, 2), 8, (2, 2, 2)),
    ((3, -1, 1), 8, None), ((2, 2, 1), 8, None), ((-1, -1, 1), 8, None), ((-2, 1, 1), 8, None),
])  # fmt: skip
def test_mesh(sizes, devices, expected):
    loaded = config.load("quickstart.py", [f"mesh.{axis}={size}" for axis, size in
                                           zip(("data", "fsdp", "tensor"), sizes, strict=True)])  # fmt: skip
    if expected is None:
        with pytest.raises(ValueError, match="mesh.data.*mesh.fsdp.*mesh.tensor"):
            config.validate(loaded, devices)
    else:
        config.validate(loaded, devices)
        assert tuple(config_rules.mesh_sizes(loaded, devices).values()) == expected


def test_slots_are_split_over_the_mesh():
    assert "= 6:" in refusal("sampler.slots=6", "mesh.data=2", "mesh.tensor=2", devices=8)
    config.validate(config.load("quickstart.py", ["sampler.slots=8", "mesh.data=2", "mesh.tensor=2"]), 8)


def test_wandb_must_be_there(monkeypatch):
    monkeypatch.setattr(config_rules.importlib.util, "find_spec", lambda name: None)
    assert "rljax[wandb]" in refusal("log.wandb=true")


def test_row_buckets():
    loaded = config.load("quickstart.py", ["train.max_tokens_per_device=100"])
    assert config.row_buckets(loaded) == (64, 100)
    loaded.train.max_tokens_per_device = 256
    assert config.row_buckets(loaded) == (64, 128, 256)
    loaded.train.max_tokens_per_device = 8
    assert config.row_buckets(loaded) == (8,)
    loaded.train.length_buckets = (24, 48)
    assert config.row_buckets(loaded) == (24, 48)
