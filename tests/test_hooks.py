"""One example of everything that may be added from outside: a reward, a filter, a post-processing step with a metric,
an estimator, a token weight and a surrogate, in one file beside one config."""

from __future__ import annotations

import run_helpers as runs

HOOKS = '''
import numpy as np

def reward(sample):
    """A dict: `reward` trains, all parts are logged."""
    size = len(sample.response_tokens)
    return {"reward": sum(sample.response_tokens) % 3 / 2, "size": size}

def varied(group):
    """A dynamic filter: keep groups whose rewards differ."""
    return len({sample.reward for sample in group}) > 1

def note(samples, config):
    """Post-processing: one number for each sample, and one for each of its tokens."""
    for sample in samples:
        sample.train_metadata["surprise"] = -sum(sample.logprobs) / len(sample.logprobs)
        sample.train_metadata["place"] = [index / 10 for index in range(len(sample.response_tokens))]

def centred(samples, algo, scores):
    """An estimator: reward less the mean of all."""
    mean = np.mean([sample.reward for sample in samples])
    return [np.full(len(sample.response_tokens), sample.reward - mean) for sample in samples]

def later(samples, algo):
    """A token weight: later tokens count less."""
    return [0.5 ** np.arange(len(sample.response_tokens)) / len(samples) for sample in samples]

def placed(loss, batch, logp):
    """A surrogate: REINFORCE, weighted by the place, which it also reports."""
    weight = 1.0 + batch.extras["place"]
    return -weight * batch.advantages * logp, {"weight": weight}
'''
CONFIG = '''
import small

def get_config():
    c = small.get_config()
    c.rollout.num_rollouts, c.rollout.dynamic_filter = 2, "hooks:varied"
    c.reward.type, c.reward.post_process = "hooks:reward", "hooks:note"
    c.algo.advantage_estimator, c.algo.surrogate = "hooks:centred", "hooks:placed"
    c.algo.loss_aggregation = "hooks:later"
    return c
'''


def test_everything_from_one_file(tmp_path):
    folder = runs.workspace(tmp_path)
    (folder / "hooks.py").write_text(HOOKS, encoding="utf-8")
    (folder / "mine.py").write_text(CONFIG, encoding="utf-8")
    done = runs.launch(folder, "log.dir=run", config="mine.py")
    assert done.returncode == 0, done.stderr
    rows = runs.metrics(folder / "run")
    (first, _), train = [row for row in rows if "rollout/step" in row], [row for row in rows if "train/step" in row]
    assert first["rollout/reward/size"] == first["rollout/response_len/mean"]
    assert first["rollout/extra/surprise"] > 0 and 0 <= first["rollout/extra/place"] <= 0.3
    assert 1.0 <= train[0]["train/extra/weight"] <= 1.3 and train[0]["train/grad_norm"] > 0
    evaluated = [row for row in rows if "eval/step" in row][0]
    assert evaluated["eval/sums/extra/surprise"] > 0
