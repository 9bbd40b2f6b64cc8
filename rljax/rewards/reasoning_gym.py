"""The verifier of a reasoning-gym task (the extra `reasoning-gym`), for rows of `prompt_data=reasoning_gym:TASK`.

The entry that made the prompt lies in `metadata["reasoning_gym"]`; its task's own function scores the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rljax.sample import Sample


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    import reasoning_gym  # an extra, and slow to import

    return reasoning_gym.get_score_answer_fn(task)


def reward(sample: Sample) -> float:
    """Between 0 and 1: what stands in the last `<answer>`, else the whole response after its reasoning, against the
    entry. ValueError for a sample of another source."""
    entry: Any = sample.metadata.get("reasoning_gym")
    if not isinstance(entry, dict):
        raise ValueError("the sample has no metadata['reasoning_gym']: this reward is for prompts of reasoning_gym:TASK")
    text = sample.text.rpartition("</think>")[2]
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return float(_scorer(entry["metadata"]["source_dataset"])(answer.strip(), entry))
