"""The command line: every bad input is one line and status 2, and nothing is left that refuses the next try."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
import run_helpers as runs
import safetensors.numpy

from rljax import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return runs.workspace(tmp_path_factory.mktemp("launch"))


@pytest.fixture
def refuse(folder, monkeypatch, capsys):
    """Launch in `folder` with knobs; expects one line of error and no directory of a run; returns the line."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def call(*knobs: str, config: str = "small.py", run: str = "never") -> str:
        arguments = [f"--config={config}", f"--config.log.dir={run}", *(f"--config.{knob}" for knob in knobs)]
        assert launch.main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("error: ")
        assert not [line for line in lines[:-1] if "Traceback" in line or line.startswith("error")]
        assert not (pathlib.Path(run) / "config.json").exists()
        return lines[-1]

    return call


def write(folder: pathlib.Path, name: str, *lines: str) -> str:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name


@pytest.mark.parametrize(("knobs", "parts"), [
    (["optim.lerning_rate=3e-6"], ["optim.lerning_rate", "optim.lr"]),
    (["optim.lr=abc"], ["optim.lr", "'abc'"]),
    (["data.prompt_data=absent.jsonl"], ["absent.jsonl"]),
    (["train.global_batch_size=7"], ["train.global_batch_size = 7", "16"]),
    (["train.max_tokens_per_device=10"], ["train.max_tokens_per_device = 10", "12"]),
    (["mesh.data=3", "mesh.fsdp=1"], ["mesh.data = 3", "3", "8 devices"]),
    (["reward.type=plugin:absent"], ["plugin", "absent"]),
    (["sampler.cache_tokens=8"], ["sampler.cache_tokens 8", "holds 0 pages"]),
    (['rollout.logit_bias={"a": 1}'], ["rollout.logit_bias", '{"a": 1}']),
    (['rollout.logit_bias={"99999": 1}'], ["rollout.logit_bias holds 99999", "vocab_size"]),
    (["sampler.cache_dtype=int4"], ["sampler.cache_dtype", "int4", "int8"]),
    (["reward.type=no_such_package.module:f"], ["no_such_package"]),
    (["reward.type=maths"], ["maths", "gsm8k"]),
    (["algo.advantage_estimator=grpoo"], ["algo.advantage_estimator", "grpoo", "grpo"]),
    (["algo.advantage_estimator=plugin:absent"], ["plugin:absent", "absent", "grpo"]),
    (["algo.advantage_estimator=absent_module:f"], ["absent_module", "grpo"]),
    (["algo.advantage_estimator=plugin:number"], ["plugin:number", "int"]),
    (["checkpoint.load=nowhere"], ["checkpoint.load", "nowhere"]),
    (["model.path=absent/model/folder"], ["absent/model/folder"]),
    (["data.max_prompt_len=2"], ["2", "6"]),
])  # fmt: skip
def test_bad_knobs(refuse, knobs, parts):
    error = refuse(*knobs)
    assert all(part in error for part in parts), error


@pytest.mark.parametrize(("lines", "parts"), [
    (['{"prompt": "1+1=", "label": "2"}', "{prompt: 1}"], ["line 2", "JSON"]),
    (['{"prompt": "1+1=", "label": "2"}', "", '{"question": "1+1=", "label": "2"}'],
     ["line 3", "'prompt'", "question"]),
    (['{"prompt": "1+1="}'], ["line 1", "'label'"]),
    (['{"prompt": "1+1=\\u00e9", "label": "2"}'], ["line 1", "é"]),
])  # fmt: skip
def test_bad_data(folder, refuse, lines, parts):
    error = refuse(f"data.prompt_data={write(folder, 'bad.jsonl', *lines)}")
    assert all(part in error for part in ["bad.jsonl", *parts]), error
    error = refuse("eval.data=('bad=bad.jsonl',)")
    assert all(part in error for part in ["bad.jsonl", *parts]), error


def test_supervised_labels(folder, refuse):
    knobs = ["algo.advantage_estimator=sft", "algo.surrogate=sft", "rollout.n_samples_per_prompt=1",
             "train.global_batch_size=0", "data.prompt_data=labels.jsonl"]
    write(folder, "labels.jsonl", '{"prompt": "1+1=", "label": "2"}', '{"prompt": "2+1=", "label": 3}')
    assert all(part in refuse(*knobs) for part in ["labels.jsonl", "2+1=", "3", "text"])
    write(folder, "labels.jsonl", '{"prompt": "1+1=", "label": "2"}', '{"prompt": "2+1=", "label": "three"}')
    error = refuse(*knobs)
    assert all(part in error for part in ["labels.jsonl", "2+1=", "6 tokens", "max_response_len 4"]), error


@pytest.mark.parametrize(("text", "parts"), [
    ("def get_config():\n    return 3\n", ["own.py", "int"]),
    ("def get_config(:\n", ["own.py", "line 1"]),
    ("from rljax import config\n\ndef get_config():\n    c = config.get_config()\n    c.optim.lrr = 1.0\n",
     ["own.py:5", "lrr"]),
    ("x = 1\n", ["own.py", "get_config"]),
])  # fmt: skip
def test_bad_config_file(folder, refuse, text, parts):
    (folder / "own.py").write_text(text, encoding="utf-8")
    error = refuse(config="own.py")
    assert all(part in error for part in parts), error


def test_weights_that_do_not_fit(folder, refuse):
    shutil.copytree(folder / "model", folder / "weights", dirs_exist_ok=True)
    tensors = {"model.norm.weight": np.ones(16, np.float32), "model.embed_tokens.weight": np.ones((98, 8), np.float32),
               "model.extra.weight": np.ones(3, np.float32)}  # fmt: skip
    safetensors.numpy.save_file(tensors, folder / "weights" / "model.safetensors")
    error = refuse("model.path=weights", "model.init=load")
    for part in ["missing model.layers.0.self_attn.q_proj.weight", "unexpected model.extra.weight [3]", "[98, 8]",
                 "[98, 16]"]:
        assert part in error, error


def test_run_directories(folder, refuse):
    (folder / "taken").write_text("a file", encoding="utf-8")
    assert "taken" in refuse(run="taken")
    (folder / "cut").mkdir(exist_ok=True)
    (folder / "cut" / "metrics.jsonl").write_text('{"rollout/step": 0}\n', encoding="utf-8")
    assert "checkpoint.load = none" in refuse("checkpoint.load=none", run="cut")
    assert (folder / "cut" / "metrics.jsonl").stat().st_size > 0


def test_a_config_json_that_is_broken_or_of_another_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "other").mkdir()
    arguments = ["--config=small.py", "--config.log.dir=other"]
    (folder / "other" / "config.json").write_text("{", encoding="utf-8")
    assert launch.main(arguments) == 2
    assert f"{pathlib.Path('other') / 'config.json'}: cannot be read" in capsys.readouterr().err
    assert launch.main(["--config=small.py", "--print_config"]) == 0
    saved = json.loads(capsys.readouterr().out)
    saved["algo"]["eps_clip"], saved["optim"]["lr"], saved["log"]["interval"] = 0.5, 7.0, 3
    (folder / "other" / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    assert launch.main(arguments) == 2
    error = capsys.readouterr().err
    assert "algo.eps_clip: 0.5 in the run, 0.2 now" in error
    assert "optim.lr" not in error and "log.interval" not in error


def test_unwritable_directory(refuse):
    error = refuse(run="/proc/no/run")  # where not even root may make a folder
    assert "log.dir = '/proc/no/run'" in error, error


def test_dropped_prompts_are_counted(folder, monkeypatch, capsys, caplog):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    write(folder, "long.jsonl", '{"prompt": "1+1=", "label": "2"}', '{"prompt": "1000000+1=", "label": "2"}')
    arguments = ["--config=small.py", "--config.data.prompt_data=long.jsonl", "--config.checkpoint.load=none",
                 "--config.log.dir=never", "--config.eval.data=('bad=absent.jsonl',)"]  # so that it stops there
    assert launch.main(arguments) == 2
    assert "long.jsonl: dropped 1 of 2 prompts" in caplog.text
    assert "absent.jsonl" in capsys.readouterr().err


def test_texts(capsys, monkeypatch, folder):
    monkeypatch.chdir(folder)
    assert launch.main(["--help"]) == 0
    assert "--config.SECTION.KEY=V" in capsys.readouterr().out
    assert launch.main(["--explain", "train/pg_clipfrac"]) == 0
    assert "healthy:" in capsys.readouterr().out
    assert launch.main(["--explain", "train/pg_clip"]) == 2
    assert "train/pg_clipfrac" in capsys.readouterr().err
    assert launch.main(["--optim.lr=3"]) == 2
    assert "--config.SECTION.KEY=VALUE" in capsys.readouterr().err
    assert launch.main(["--config=small.py", "--config.rollout.num_rollouts=7", "--print_config"]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"]["num_rollouts"] == 7
    assert launch.main(["--config=absent.py"]) == 2
    assert "quickstart.py" in capsys.readouterr().err


def test_warm_up_compiles_and_leaves_no_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    arguments = ["--warmup", "--config=small.py", "--config.log.dir=warm"]
    assert launch.main([*arguments, "--config.sampler.cache_tokens=8"]) == 2
    assert launch.main(arguments) == 0
    assert "programs of the sampler" in capsys.readouterr().out and not pathlib.Path("warm").exists()
