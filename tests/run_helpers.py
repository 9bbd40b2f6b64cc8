"""A run that takes seconds: a model of ten thousand weights, short prompts, a reward of its own, real processes."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tensorboardX.proto.event_pb2 import Event

from rljax import checkpoint, tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 98, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
CONFIG = """
from rljax import config

def get_config():
    c = config.get_config()
    c.model.path, c.model.init = "model", "random"
    c.data.prompt_data = "builtin:sums/train.jsonl@[0:24]"
    c.rollout.batch_size, c.rollout.n_samples_per_prompt, c.rollout.num_rollouts = 4, 4, 6
    c.rollout.max_response_len = 4
    c.sampler.prompt_buckets, c.sampler.length_buckets, c.sampler.steps_per_dispatch = (8,), (16,), 2
    c.sampler.warmup = False
    c.reward.type, c.reward.workers = "plugin:reward", 1
    c.optim.lr = 1e-2
    c.train.global_batch_size = 8
    c.train.max_tokens_per_device = 64
    c.eval.interval, c.eval.data = 2, ("sums=builtin:sums/heldout.jsonl@[0:4]",)
    c.checkpoint.save_interval = 4
    return c
"""
PLUGIN = """
import pathlib
import time

import numpy as np

def reward(sample):
    return (sum(sample.response_tokens) + len(sample.response_tokens)) % 7 / 7

def nothing_at_first(sample):
    if sample.group < 4 or sample.uid % 5 == 0:
        return None
    return reward(sample)

def slow(sample):
    pathlib.Path("scoring").touch()
    time.sleep(5)
    return 0.0

def too_short(samples, algo, scores):
    return [np.zeros(1, np.float32) for s in samples]

def broken(samples, algo, scores):
    raise ValueError("of my own")

def never(sample):
    return undefined

number = 3
"""


def workspace(folder: pathlib.Path) -> pathlib.Path:
    """A working directory with `small.py`, `model/` and `plugin.py`."""
    tokenizer.character_tokenizer("".join(chr(code) for code in range(32, 127)) + "\n", folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (folder / "small.py").write_text(CONFIG, encoding="utf-8")
    (folder / "plugin.py").write_text(PLUGIN, encoding="utf-8")
    return folder


def start(folder: pathlib.Path, *arguments: str, config: str = "small.py", **options: Any) -> subprocess.Popen:
    """`python -m rljax.launch --config small.py ...` in `folder`, on one device; arguments are `log.dir=run`."""
    command = [sys.executable, "-m", "rljax.launch", "--config", config, *(f"--config.{a}" for a in arguments)]
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **options)


def launch(folder: pathlib.Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """`start`, and its end."""
    process = start(folder, *arguments, **options)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def metrics(run: pathlib.Path) -> list[dict[str, Any]]:
    """metrics.jsonl without perf/."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def saved_state(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Every leaf of the newest checkpoint, parameters and optimizer, by name."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**checkpoint.HANDLERS)) as reader:
        tree = reader.restore(checkpoint.newest(run).absolute())["state"]
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def shown(folder: pathlib.Path) -> dict[tuple[int, str], float]:
    """What TensorBoard shows of a folder: the start of a writer hides what older ones wrote from its step on."""
    values: dict[tuple[int, str], float] = {}
    for path in sorted(folder.iterdir(), key=lambda file: int(file.name.rpartition(".")[2])):
        data, start = path.read_bytes(), 0
        while start + 12 < len(data):
            (size,) = struct.unpack("<Q", data[start : start + 8])
            event = Event.FromString(data[start + 12 : start + 12 + size])
            if event.WhichOneof("what") == "session_log":
                values = {key: value for key, value in values.items() if key[0] < event.step}
            values |= {(event.step, v.tag): v.simple_value for v in event.summary.value if "perf/" not in v.tag}
            start += 16 + size
    return values


def assert_equal_runs(one: pathlib.Path, other: pathlib.Path) -> None:
    """Same metrics but for perf/ (in TensorBoard too), samples, parameters and optimizer, bit for bit."""
    assert metrics(one) == metrics(other)
    for axis in ("rollout", "train", "eval"):
        assert shown(one / "tensorboard" / axis) == shown(other / "tensorboard" / axis) != {}
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    left, right = saved_state(one), saved_state(other)
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert values.dtype == right[name].dtype
        assert values.tobytes() == right[name].tobytes(), name
