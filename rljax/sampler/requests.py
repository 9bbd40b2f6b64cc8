"""What a sampler is asked for: one `Request` per sequence, and what makes one impossible."""

from __future__ import annotations

import dataclasses
import math

from rljax.sample import MOST_BIASES, SamplingParams
from rljax.sampler.decode import EngineConfig, Slots

LEAST_TEMPERATURE = 1e-6  # below it the quotient overflows float32; 0 is greedy
MOST_TOP_K = 2**31 - 1
CHUNK_STEPS = 8  # decoding steps that take about as long as to prefill a chunk
MOST_UID = 2**32 - 1  # the random key folds in 32 bits


@dataclasses.dataclass
class Request:
    """One sequence: the prompt `context`, and `tokens` drawn so far, at most params.max_new_tokens.

    Tokens that are there on submission are taken over and fed to the model again, before new ones are drawn; where
    their log-probs are there they stay too, and those that are missing are filled in.
    The first `stale` of them, with log-probs, are other weights' and need not be fed as they were drawn, one by one:
    these may be prefilled.
    """

    uid: int
    context: list[int]
    params: SamplingParams
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # nats
    end_reason: str = ""  # stop, length, abort; "" while it runs
    text: str | None = None  # what stands before the stop string that ended it
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)  # each token's (id, nats)
    prompt_logprobs: list[float] | None = None  # nats, as long as the context; 0 for its first token
    stale: int = 0
    # The scheduler's: what prefill stores of the context, all but the token that decoding feeds first, and how many
    # tokens of this one its slot has behind it; of these, how many are prefilled; when it first took a slot (0 = not
    # yet), as a rising number.
    prompt: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    taken: int = dataclasses.field(default=0, repr=False)
    prefilled: int = dataclasses.field(default=0, repr=False)
    entered: int = dataclasses.field(default=0, repr=False)


def worth_prefilling(request: Request, engine: EngineConfig) -> int:
    """How many of the stale tokens to prefill, whole dispatches and not the last: 0 where to feed them may be as fast,
    since all slots are fed at once, but prefilled one after the other. What was drawn since does not count, so that the
    bits are the same after another interruption."""
    count = max(request.stale - 1, 0) // engine.steps_per_dispatch * engine.steps_per_dispatch
    chunks = -(-(len(request.context) + count) // engine.prefill_chunk)
    worth = engine.resumes and not request.params.top_logprobs and count >= CHUNK_STEPS * chunks * engine.slots
    return count if worth else 0


def check(request: Request, engine: EngineConfig, vocab: int) -> None:
    """Raise ValueError, naming the request and the numbers, for what the engine cannot draw."""
    uid, p = request.uid, request.params
    if not request.context or p.max_new_tokens < 1:
        raise ValueError(f"request {uid}: {len(request.context)} context tokens and max_new_tokens {p.max_new_tokens}; "
                         f"both must be at least 1")
    if not 0 <= uid <= MOST_UID:
        raise ValueError(f"request {uid}: a uid is between 0 and {MOST_UID}")
    if len(request.logprobs) > len(request.tokens) or len(request.tokens) > p.max_new_tokens:
        raise ValueError(f"request {uid}: {len(request.logprobs)} log-probs for {len(request.tokens)} tokens, and "
                         f"max_new_tokens {p.max_new_tokens}; each is at most the next")
    if not 0 <= request.stale <= len(request.logprobs):
        raise ValueError(f"request {uid}: stale {request.stale}, but {len(request.logprobs)} log-probs: tokens of older "
                         f"weights have theirs")
    if 0 < engine.new_tokens < p.max_new_tokens:
        raise ValueError(f"request {uid}: {p.max_new_tokens} new tokens; the engine is made for {engine.new_tokens}")
    if len(request.context) + p.max_new_tokens > engine.cache_len:
        raise ValueError(f"request {uid}: {len(request.context)} context + {p.max_new_tokens} new tokens exceed the "
                         f"cache of {engine.cache_len} (sampler.length_buckets)")
    if len(request.context) > engine.prompt_buckets[-1]:
        raise ValueError(f"request {uid}: a context of {len(request.context)} tokens is longer than the largest prompt "
                         f"bucket, {engine.prompt_buckets[-1]} (sampler.prompt_buckets)")
    ids = [*request.context, *request.tokens, *(token for token, _ in p.logit_bias), 0]
    if min(ids) < 0 or max(ids) >= vocab:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"request {uid}: token {bad} is none of the model's {vocab}")
    check_knobs(uid, p, engine)


def check_knobs(uid: int, p: SamplingParams, engine: EngineConfig) -> None:
    """The part of `check` that is about how tokens are drawn."""
    if p.temperature != 0 and not LEAST_TEMPERATURE <= p.temperature < math.inf:
        raise ValueError(f"request {uid}: temperature {p.temperature} is neither 0 (greedy) nor a number from "
                         f"{LEAST_TEMPERATURE} on")
    if not 0 < p.top_p <= 1 or not 0 <= p.min_p <= 1:
        raise ValueError(f"request {uid}: top_p {p.top_p} must be above 0 and at most 1, min_p {p.min_p} from 0 to 1")
    if not -1 <= p.top_k <= MOST_TOP_K:
        raise ValueError(f"request {uid}: top_k {p.top_k} is neither -1 or 0 (off) nor from 1 to {MOST_TOP_K}")
    if not 0 <= p.min_new_tokens <= p.max_new_tokens:
        raise ValueError(f"request {uid}: min_new_tokens {p.min_new_tokens} is not from 0 to max_new_tokens "
                         f"{p.max_new_tokens}")
    biases = dict(p.logit_bias)
    if len(biases) < len(p.logit_bias) or len(biases) > MOST_BIASES or not all(map(math.isfinite, biases.values())):
        raise ValueError(f"request {uid}: logit_bias takes up to {MOST_BIASES} different tokens, finite values, not "
                         f"{p.logit_bias}")
    if not 0 <= p.top_logprobs <= engine.alternatives:
        raise ValueError(f"request {uid}: top_logprobs {p.top_logprobs} is not from 0 to the engine's "
                         f"{engine.alternatives} (sampler.top_logprobs)")


def fill(slots: Slots, index: int, request: Request) -> None:
    """Write to slot `index` what the device needs to know of the request, of which it was fed `taken` tokens."""
    p, done = request.params, request.taken
    slots.tokens[index] = request.tokens[done - 1] if done else request.context[-1]
    slots.positions[index] = len(request.context) - 1 + done
    slots.remaining[index], slots.hold[index] = p.max_new_tokens - done, p.min_new_tokens - done
    slots.uids[index] = request.uid
    slots.knobs.temperature[index], slots.knobs.top_k[index] = p.temperature, p.top_k
    slots.knobs.top_p[index], slots.knobs.min_p[index] = p.top_p, p.min_p
    if p.logit_bias:
        ids, values = zip(*p.logit_bias, strict=True)
        slots.knobs.bias_ids[index, : len(ids)], slots.knobs.bias[index, : len(ids)] = ids, values
