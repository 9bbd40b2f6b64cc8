"""Estimators by hand-computed numbers, and how plug-ins are found and checked."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from rljax import algorithms
from rljax.algorithms import Scores
from rljax.sample import Sample

ALGO = types.SimpleNamespace(normalize_std=True, kl_coef=0.0, kl_reward_type="k1", gamma=1.0, lambd=1.0)
NONE = Scores()


def algo(**changes):
    return types.SimpleNamespace(**{**vars(ALGO), **changes})


def samples(rewards, groups, lengths=None):
    lengths = lengths or [2] * len(rewards)
    return [Sample(uid=i, group=g, reward=r, response_tokens=[5] * n, loss_mask=[1] * n)
            for i, (r, g, n) in enumerate(zip(rewards, groups, lengths, strict=True))]


def estimate(name, rows, scores=None, **changes):
    return algorithms.estimate(algorithms.find(name), rows, algo(**changes), scores or [NONE] * len(rows))


def array(*values):
    return np.asarray(values, np.float32)


def test_grpo():
    rows = samples([1, 0, 0, 0, 1, 1], [3, 3, 3, 3, 7, 7], [1, 2, 3, 1, 2, 2])
    rows[2].loss_mask = [1, 0, 1]  # a tool's output in between
    found = estimate("grpo", rows)
    assert [values.shape for values in found] == [(1,), (2,), (3,), (1,), (2,), (2,)]
    assert all(values.dtype == np.float32 for values in found)
    np.testing.assert_allclose(found[0], [1.499997], rtol=1e-6)
    np.testing.assert_allclose(found[2], [-0.499999, 0, -0.499999], rtol=1e-5)
    np.testing.assert_array_equal(found[4], [0, 0])  # equal rewards teach nothing


def test_grpo_without_the_standard_deviation():
    found = estimate("grpo", samples([1, 0, 0, 0], [0] * 4), normalize_std=False)
    np.testing.assert_allclose([values[0] for values in found], [0.75, -0.25, -0.25, -0.25])


def test_estimators_over_samples_subtract_the_sum_of_the_kl():
    rows = samples([1, 0, 0, 1], [0] * 4, [2, 1, 1, 2])
    rows[3].loss_mask = [1, 0]
    scores = [Scores(old_logprobs=array(-1, -1)[:n], ref_logprobs=array(-2, -1.5)[:n]) for n in (2, 1, 1, 2)]
    # rewards less 0.1 * KL: 0.85, -0.1, -0.1, 0.9
    found = [values[0] for values in estimate("rloo", rows, scores, kl_coef=0.1)]
    others = [(-0.1 - 0.1 + 0.9) / 3, (0.85 - 0.1 + 0.9) / 3, (0.85 - 0.1 + 0.9) / 3, (0.85 - 0.1 - 0.1) / 3]
    np.testing.assert_allclose(found, np.subtract([0.85, -0.1, -0.1, 0.9], others), rtol=1e-5)


def test_rloo_and_reinforce():
    rows = samples([1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1])
    found = [values[1] for values in estimate("rloo", rows)]
    np.testing.assert_allclose(found, [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0], rtol=1e-6)
    found = [values[1] for values in estimate("reinforce", rows)]
    np.testing.assert_allclose(found, np.subtract([1, 0, 0, 1, 1, 1], 2 / 3), rtol=1e-6)


def test_reinforce_plus_plus():
    rows = samples([1, 0], [0, 1], [3, 1])
    rows[0].loss_mask = [1, 0, 1]  # what is skipped does not decay
    found = estimate("reinforce_plus_plus", rows, gamma=0.5)
    np.testing.assert_allclose(found[0], [0, 0, 1], atol=1e-6)  # returns 0.5, 1 and 0: mean 0.5, deviation 0.5
    np.testing.assert_allclose(found[1], [-1], atol=1e-6)
    scores = [Scores(old_logprobs=array(-1, 9, -1), ref_logprobs=array(-2, 0, -1.5)),
              Scores(old_logprobs=array(-1), ref_logprobs=array(-1))]
    found = estimate("reinforce_plus_plus", rows, scores, kl_coef=0.1)
    returns = np.asarray([1 - 0.05 - 0.1, 1 - 0.05, 0.0])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(np.concatenate([found[0][[0, 2]], found[1]]), expected, rtol=1e-5)


def test_reinforce_plus_plus_baseline():
    rows = samples([1, 0], [0, 0], [1, 2])
    scores = [Scores(old_logprobs=array(-1), ref_logprobs=array(-1.5)),
              Scores(old_logprobs=array(-1, -1), ref_logprobs=array(-1, -2))]
    found = np.concatenate(estimate("reinforce_plus_plus_baseline", rows, scores, kl_coef=0.2))
    raw = np.asarray([0.5 - 0.1, -0.5, -0.5 - 0.2])
    np.testing.assert_allclose(found, (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-5)


def test_ppo():
    rows = samples([1.0, 2.0], [0, 1], [4, 3])
    rows[1].loss_mask = [1, 1, 0]
    scores = [Scores(values=array(0.1, 0.2, 0.3, 0.4)), Scores(values=array(0.5, 0.5, 40))]
    found = estimate("ppo", rows, scores)
    np.testing.assert_allclose(found[0], [0.9, 0.8, 0.7, 0.6], rtol=1e-6)
    found = estimate("ppo", rows, scores, lambd=0.95)
    np.testing.assert_allclose(found[0], [0.799675, 0.7365, 0.67, 0.6], rtol=1e-5)
    np.testing.assert_allclose(estimate("ppo", rows, scores, lambd=0.9)[1], [1.35, 1.5, 0], rtol=1e-6)
    scores = [Scores(array(-1, -1, -1, -1), array(-2, -1, -1, -1.5), None, array(0, 0, 0, 0)), scores[1]]
    scores[1] = Scores(array(0, 0, 0), array(0, 0, 0), None, array(0, 0, 0))
    found = estimate("ppo", rows, scores, kl_coef=0.1)
    np.testing.assert_allclose(found[0], [0.85, 0.95, 0.95, 0.95], rtol=1e-6)


def test_a_score_that_nothing_asked_for_names_its_knob():
    with pytest.raises(ValueError, match="reads values, which nothing asked for: set algo.critic=true"):
        estimate("ppo", samples([1], [0]))
    with pytest.raises(ValueError, match="reads old_logprobs.*algo.kl_coef"):
        estimate("grpo", samples([1, 0], [0, 0]), kl_coef=0.1)


def test_opd_adds_nothing_of_its_own():
    assert [values.tolist() for values in estimate("opd", samples([1, None], [0, 0]))] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
                                  "ppo"])
def test_odd_groups_are_finite(name):
    """A group of one, a constant group, and a sample without a trained token."""
    rows = samples([0.3, 1, 1, 1e6, -1e6, 2], [0, 1, 1, 2, 2, 3], [1, 2, 3, 1, 2, 2])
    rows[5].loss_mask = [0, 0]
    scores = [Scores(values=np.zeros(len(row.response_tokens), np.float32)) for row in rows]
    found = estimate(name, rows, scores)
    assert all(np.isfinite(values).all() for values in found) and not found[5].any()
    if name in ("grpo", "rloo"):  # whitening over the rollout shifts the others
        assert np.abs(np.concatenate(found[:3])).max() < 1e-6


def test_sft():
    rows = samples([None], [0], [3])
    rows[0].loss_mask = [1, 0, 1]
    np.testing.assert_array_equal(estimate("sft", rows)[0], [1, 0, 1])


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module `own_estimator` in the working directory, which is not on the module path."""
    text = ("import numpy as np\ncount = 3\n"
            "def half(samples, algo, scores):\n    return [[0.5] * len(s.response_tokens) for s in samples]\n"
            "def short(samples, algo, scores):\n    return [np.zeros(1) for s in samples]\n"
            "def fewer(samples, algo, scores):\n    return []\n")
    (tmp_path / "own_estimator.py").write_text(text, encoding="utf-8")
    (tmp_path / "broken_estimator.py").write_text("def f(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("own_estimator", None)


def test_plugin_from_the_working_directory(plugin):
    rows = samples([1, 0], [0, 0], [1, 2])
    found = algorithms.estimate(algorithms.find("own_estimator:half"), rows, ALGO, [NONE] * 2)
    assert [values.tolist() for values in found] == [[0.5], [0.5, 0.5]]
    assert found[0].dtype == np.float32


@pytest.mark.parametrize("name", ["grpoo", "", "own_estimator:absent", "absent.module:f", "own_estimator:count",
                                  "broken_estimator:f", "algorithms.grpo"])
def test_bad_names_list_what_exists(plugin, name):
    with pytest.raises(ValueError, match="algo.advantage_estimator") as error:
        algorithms.find(name)
    assert repr(name) in str(error.value)
    assert "dcpo, grpo, opd, ppo" in str(error.value) or "int" in str(error.value)


def test_results_that_do_not_fit(plugin):
    rows = samples([1, 0], [0, 0], [1, 2])
    with pytest.raises(ValueError, match=r"shape \(1,\) for sample 1, which has 2 response tokens"):
        algorithms.estimate(algorithms.find("own_estimator:short"), rows, ALGO, [NONE] * 2)
    with pytest.raises(ValueError, match="0 arrays for 2 samples"):
        algorithms.estimate(algorithms.find("own_estimator:fewer"), rows, ALGO, [NONE] * 2)
