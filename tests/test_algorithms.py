"""Estimators by hand-computed numbers, and how plug-ins are found and checked."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from rljax import algorithms
from rljax.sample import Sample

ALGO = types.SimpleNamespace(normalize_std=True)


def samples(rewards, groups, lengths=None):
    lengths = lengths or [2] * len(rewards)
    return [Sample(uid=i, group=g, reward=r, response_tokens=[5] * n, loss_mask=[1] * n)
            for i, (r, g, n) in enumerate(zip(rewards, groups, lengths, strict=True))]


def test_grpo():
    rows = samples([1, 0, 0, 0, 1, 1], [3, 3, 3, 3, 7, 7], [1, 2, 3, 1, 2, 2])
    rows[2].loss_mask = [1, 0, 1]  # a tool's output in between
    found = algorithms.find("grpo")(rows, ALGO)
    assert [values.shape for values in found] == [(1,), (2,), (3,), (1,), (2,), (2,)]
    assert all(values.dtype == np.float32 for values in found)
    np.testing.assert_allclose(found[0], [1.499997], rtol=1e-6)
    np.testing.assert_allclose(found[2], [-0.499999, 0, -0.499999], rtol=1e-5)
    np.testing.assert_array_equal(found[4], [0, 0])  # equal rewards teach nothing


def test_grpo_without_the_standard_deviation():
    found = algorithms.find("grpo")(samples([1, 0, 0, 0], [0] * 4), types.SimpleNamespace(normalize_std=False))
    np.testing.assert_allclose([values[0] for values in found], [0.75, -0.25, -0.25, -0.25])


def test_sft():
    rows = samples([None], [0], [3])
    rows[0].loss_mask = [1, 0, 1]
    np.testing.assert_array_equal(algorithms.find("sft")(rows, ALGO)[0], [1, 0, 1])


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module `own_estimator` in the working directory, which is not on the module path."""
    text = ("import numpy as np\ncount = 3\n"
            "def half(samples, algo):\n    return [[0.5] * len(s.response_tokens) for s in samples]\n"
            "def short(samples, algo):\n    return [np.zeros(1) for s in samples]\n"
            "def fewer(samples, algo):\n    return []\n")
    (tmp_path / "own_estimator.py").write_text(text, encoding="utf-8")
    (tmp_path / "broken_estimator.py").write_text("def f(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("own_estimator", None)


def test_plugin_from_the_working_directory(plugin):
    found = algorithms.estimate(algorithms.find("own_estimator:half"), samples([1, 0], [0, 0], [1, 2]), ALGO)
    assert [values.tolist() for values in found] == [[0.5], [0.5, 0.5]]
    assert found[0].dtype == np.float32


@pytest.mark.parametrize("name", ["grpoo", "", "own_estimator:absent", "absent.module:f", "own_estimator:count",
                                  "broken_estimator:f", "algorithms.grpo"])
def test_bad_names_list_what_exists(plugin, name):
    with pytest.raises(ValueError, match="algo.advantage_estimator") as error:
        algorithms.find(name)
    assert repr(name) in str(error.value)
    assert "grpo, sft" in str(error.value) or "int" in str(error.value)


def test_results_that_do_not_fit(plugin):
    rows = samples([1, 0], [0, 0], [1, 2])
    with pytest.raises(ValueError, match=r"shape \(1,\) for sample 1, which has 2 response tokens"):
        algorithms.estimate(algorithms.find("own_estimator:short"), rows, ALGO)
    with pytest.raises(ValueError, match="0 arrays for 2 samples"):
        algorithms.estimate(algorithms.find("own_estimator:fewer"), rows, ALGO)
