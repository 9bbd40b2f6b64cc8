"""Every preset of an algorithm: what it changes holds, and two rollouts of it run on the built-in model."""

from __future__ import annotations

import json
import math
import pathlib
import shutil

import jax
import pytest

from rljax import assemble, hub, loop
from rljax import config as configs

PRESETS = sorted(path.name for path in configs.CONFIGS.glob("*_qwen*.py"))
SMALL = (
    "model.path=tiny", "data.prompt_data=builtin:sums/train.jsonl@[0:16]", "data.prompt_suffix=",
    "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "rollout.num_rollouts=2", "rollout.max_response_len=8",
    "rollout.over_sampling_batch_size=0",
    "sampler.prompt_buckets=16", "sampler.length_buckets=32", "sampler.steps_per_dispatch=8", "reward.workers=1",
    "train.max_tokens_per_device=64", "eval.interval=0", "eval.data=", "mesh.fsdp=1", "mesh.tensor=1", "optim.lr=1e-4",
)  # fmt: skip


def run(tmp_path, name, *changes):
    """The run's rows of metrics, from the preset `name` made small."""
    config = configs.load(name, [*SMALL, f"log.dir={tmp_path}", *changes])
    configs.validate(config, 1)
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *args: devices)
        with assemble.reward_pool(config) as pool:
            start = assemble.starting_checkpoint(config, tmp_path)
            training = loop.Loop(config, tmp_path, assemble.build(config), pool, lambda: False, start)
            training.run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
    return [row for row in rows if "train/step" in row], [row for row in rows if "rollout/step" in row]


@pytest.mark.parametrize("name", PRESETS)
def test_loads_and_is_valid(name):
    configs.validate(configs.load(name), 8)


@pytest.mark.parametrize("name", PRESETS)
def test_two_rollouts(tmp_path, name):
    config = configs.load(name)
    several = 0 < config.train.global_batch_size < 2048
    changes = [f"train.global_batch_size={8 if several else 16}", "algo.num_critic_only_steps=0",
               f"reward.overlong_buffer_len={4 if config.reward.overlong_buffer_len else 0}"]
    if config.reward.type == "math":
        changes.append("reward.type=exact_match")
    if config.model.teacher_path:
        changes.append("model.teacher_path=tiny")
    train, rollout = run(tmp_path, name, *changes)
    assert len(rollout) == 2 and len(train) == (4 if several else 2)
    if config.algo.advantage_estimator == "ppo":
        assert {"train/value_loss", "train/critic_grad_norm", "train/explained_variance"} <= train[-1].keys()
        assert {"rollout/values", "rollout/returns", "rollout/kl"} <= rollout[0].keys()
    if config.algo.advantage_estimator == "dcpo":
        assert rollout[0]["rollout/dcpo/missing_confidence"] == 1  # never taught to this model
    if config.algo.advantage_estimator == "opd":  # the teacher is the student itself, and then a little behind
        assert abs(train[0]["train/pg_loss"]) < 1e-6 and rollout[0]["rollout/teacher_log_probs"] < 0
    else:
        assert train[0]["train/grad_norm"] > 0


def test_critic_only_rollouts_leave_the_policy(tmp_path):
    train, _ = run(tmp_path, "ppo_qwen.py", "algo.num_critic_only_steps=1", "train.global_batch_size=16",
                   "reward.type=exact_match")
    assert "train/grad_norm" not in train[0] and "train/grad_norm" in train[1]


def test_a_reference_that_moves_and_every_correction(tmp_path):
    train, rollout = run(
        tmp_path, "grpo_qwen.py", "algo.ref_update_interval=1", "algo.kl_unbiased=true", "algo.opsm_delta=0.1",
        "algo.is_correction=mask", "algo.is_level=geometric", "algo.mask_truncated=true", "train.global_batch_size=8",
        "reward.type=exact_match", "checkpoint.save_interval=1",
    )
    assert {"train/tis", "train/tis_clipfrac", "train/tis_abs", "train/opsm_clipfrac"} <= train[0].keys()
    assert train[0]["train/tis"] == pytest.approx(1, abs=1e-4)  # in float32 trainer and sampler agree
    assert abs(train[0]["train/kl_loss"]) < 1e-6 < abs(train[1]["train/kl_loss"])  # the policy moved between the two
    assert abs(rollout[1]["rollout/kl"]) < 1e-6 and abs(train[2]["train/kl_loss"]) < 1e-6  # and became the reference


def test_supervised_conversations(tmp_path):
    """Loss on the assistant's turns only."""
    model = tmp_path / "chatty"
    shutil.copytree(hub.BUILTIN / "tiny", model)
    template = ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
                "{% endif %} {% endfor %}{% if add_generation_prompt %}a:{% endif %}")
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    chat = [{"role": role, "content": text} for role, text in
            [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(8)), encoding="utf-8")
    train, rollout = run(
        tmp_path / "run", "sft_tiny.py", "model.init=load", f"model.path={model}", f"data.prompt_data={data}",
        "data.input_key=messages", "data.label_key=", "rollout.n_samples_per_prompt=1", "rollout.max_response_len=16",
        "optim.schedule=constant", "checkpoint.save_hf_interval=0", "optim.warmup_steps=0", "optim.lr=1e-2",
    )
    assert train[1]["train/loss"] < train[0]["train/loss"]
    assert rollout[0]["rollout/response_len/mean"] == 14  # "2<eos> u:2+2= a:4<eos>"


def test_a_config_elsewhere_is_not_taken_for_the_base(tmp_path, monkeypatch):
    (pathlib.Path(tmp_path) / "grpo_qwen.py").write_text("raise SystemExit('the wrong file')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert configs.load("ppo_qwen.py").algo.advantage_estimator == "ppo"
