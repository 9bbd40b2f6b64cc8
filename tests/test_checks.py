"""What data and models must fulfil together; most of it is tested through the launcher."""

from __future__ import annotations

import pytest

from rljax import checks
from rljax import config as configs


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
