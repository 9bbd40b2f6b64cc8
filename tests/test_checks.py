"""What data and models must fulfil together; most of it is tested through the launcher."""

from __future__ import annotations

import json

import pytest
import run_helpers

from rljax import algo_rules, algorithms, assemble, checks, config_rules, filters, models, rewards, surrogates
from rljax import config as configs
from rljax import tokenizer


def test_a_head_start_ends_before_the_run():
    config = configs.get_config()
    config.optim.schedule, config.optim.warmup_steps = "linear", 6
    checks.length(config, 4, 2)
    with pytest.raises(ValueError, match="optim.warmup_steps = 6: .* linear it must be below the run's 6 updates"):
        checks.length(config, 3, 2)
    config.optim.schedule, config.algo.num_critic_only_steps = "constant", 3
    checks.length(config, 4, 1)
    with pytest.raises(ValueError, match="algo.num_critic_only_steps = 3: must be below the run's 3 rollouts"):
        checks.length(config, 3, 1)


def test_the_names_that_the_rules_know_are_those_that_exist():
    """The rules stand on the lowest floor and cannot look."""
    assert set(algo_rules.ESTIMATORS) == set(algorithms.names())
    assert set(algo_rules.SURROGATES) == set(surrogates.BUILT_IN)
    assert set(config_rules.REWARDS) == set(rewards.names())
    assert set(config_rules.FILTERS) == {"", *filters.BUILT_IN}
    assert set(config_rules.POST_PROCESSES) == {"", *assemble.POST_PROCESSES}


def test_a_surrogate_that_does_not_exist_is_found_before_any_rollout():
    config = configs.load("quickstart.py", ["algo.surrogate=absent_module:f"])
    with pytest.raises(ValueError, match="algo.surrogate 'absent_module:f'"):
        assemble.build(config)


def other_model(folder, characters, **changes):
    """A folder with a character tokenizer and a config of the run helpers' model."""
    tokenizer.character_tokenizer(characters, folder)
    (folder / "config.json").write_text(json.dumps({**run_helpers.MODEL, **changes}), encoding="utf-8")
    return folder


def test_a_teacher_reads_the_same_tokens(tmp_path):
    config = configs.get_config()
    ours = other_model(tmp_path / "ours", "0123456789+=")
    config.model.path, config.algo.opd_kl_coef = str(ours), 1.0
    mine = tokenizer.load(ours)
    config.model.teacher_path = str(other_model(tmp_path / "same", "0123456789+=", hidden_size=32))
    checks.teacher(config, mine)  # of another size, which is the point
    config.model.teacher_path = str(other_model(tmp_path / "other", "0123456789*="))
    with pytest.raises(ValueError, match=r"model.teacher_path .*other.*: 14 and 14 tokens, the first .* is '[+*]'"):
        checks.teacher(config, mine)
    config.model.teacher_path = str(other_model(tmp_path / "narrow", "0123456789+=", vocab_size=13))
    with pytest.raises(ValueError, match="vocab_size 13 has no row for token 13"):
        checks.teacher(config, mine)


def test_a_critic_is_of_the_policys_kind(tmp_path):
    config = configs.get_config()
    config.model.path = str(other_model(tmp_path / "ours", "01"))
    config.model.critic_path = str(other_model(tmp_path / "other", "01", num_hidden_layers=2))
    cfg = models.load_config(config.model.path)
    with pytest.raises(ValueError, match="model.critic_path .* another kind of model .* num_layers is 2 there and 1"):
        checks.critic(config, cfg)
    config.model.critic_path = config.model.path
    checks.critic(config, cfg)
