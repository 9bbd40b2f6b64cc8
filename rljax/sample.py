"""What the host loop moves around: one `Sample` per response. Imports no JAX, so reward workers can load it.

Dimension legend, used in every docstring of the package:

    P prompts in a rollout      G samples per prompt        N = P*G samples
    R rows in a micro-batch     T row length in tokens      V vocabulary
    L layers                    D model width               F MLP width
    H query heads               K key/value heads           h head width
    S decode slots              C cache length in tokens
"""

from __future__ import annotations

import dataclasses
from typing import Any

PENDING, COMPLETED, TRUNCATED, ABORTED, FAILED = "pending", "completed", "truncated", "aborted", "failed"
PER_TOKEN = ("logprobs", "loss_mask", "versions")
MOST_BIASES = 32  # tokens with a bias, of one request


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    temperature divides the logits (0 = greedy); top_k 0 or -1 = off; stop strings end a response and are cut
    from its text, not from its tokens; max_new_tokens and min_new_tokens count response tokens: no stop id is drawn,
    and no stop string ends a response, before the latter. logit_bias: (token, what is added to its logit) pairs, which
    move the draw, not the recorded log-prob. top_logprobs: how many most likely tokens to return at each step, at most
    the engine's `alternatives`; prompt_logprobs: return those of the prompt's tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: bool = False


@dataclasses.dataclass
class Sample:
    """One prompt with one response. The per-token lists are as long as `response_tokens`."""

    uid: int = -1  # unique in a run; orders everything and seeds the draw
    group: int = -1  # prompt instance: the samples of one prompt share it
    prompt: Any = ""  # text, or a list of chat messages
    label: Any = None  # as it stands in the data: text, number, null, ...
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)  # from the data set
    prompt_tokens: list[int] = dataclasses.field(default_factory=list)
    response_tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # nats, tempered full softmax, by the sampler
    loss_mask: list[int] = dataclasses.field(default_factory=list)  # 1 = trained; tool output is 0
    versions: list[int] = dataclasses.field(default_factory=list)  # weight version that drew each token
    status: str = PENDING  # pending, completed, truncated, aborted, failed
    end_reason: str = ""  # stop, length, ...
    text: str = ""  # decoded response, cut at a stop string: what the reward sees
    reward: float | None = None  # None = not scored: left out of its group
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)  # named parts
    train_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)  # by reward post-processing

    @property
    def length(self) -> int:
        """Prompt and response together, in tokens."""
        return len(self.prompt_tokens) + len(self.response_tokens)

    def check(self) -> None:
        """Raise ValueError naming the per-token field whose length is not that of `response_tokens`."""
        for name in PER_TOKEN:
            if len(getattr(self, name)) != len(self.response_tokens):
                raise ValueError(
                    f"sample {self.uid}: {name} has {len(getattr(self, name))} entries "
                    f"for {len(self.response_tokens)} response tokens"
                )

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        return dataclasses.asdict(self)
