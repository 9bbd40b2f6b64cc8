"""Decoding, rljax beside Hugging Face transformers with torch and google-tunix: one model, float32, the same work.

Works (--work, `all` for one after the other):

- a: 64 prompts of 64 tokens, one sample of 64 new tokens each.
- b: as in GRPO: 16 prompts of 40 to 200 tokens, 8 samples each, lengths drawn from a long-tailed distribution
  (lognormal, median 48, from 8 to 256). Each sample ends exactly at its length; only those tokens count. rljax has
  --slots slots; the peers draw all samples as one batch, or --peer-batch at a time, up to its longest.
- c: 8 prompts of 512 tokens, 256 new tokens each.

Prompts are random token ids. All draw at temperature 1 from the whole vocabulary; rljax also returns log-probs. Each
contestant has a process and an environment of its own and all cores, is warmed up on the same shapes, and they take
turns. `peer_*.py` say how each is driven. "First token" is the whole work with one new token a sequence (tunix's loop
does one step more). Compilations are those that JAX reports. Before the table's numbers are worth anything the
contestants must agree on the greedy continuation of the first prompt: it says so. Below it stands what the machine
allows (`limit.py`). --growth is rljax alone: seconds per token of decoding with 8 short and with 8 long prompts. So is
--resumed: seconds of 8 responses that go on behind 1,025 tokens of older weights, prefilled and fed one by one.

    python tests/benchmarks/decode.py --work all --torch-env .venv-torch --tunix-env .venv-tunix --repeats 3
    python tests/benchmarks/decode.py --growth
    python tests/benchmarks/decode.py --resumed
"""

from __future__ import annotations

import importlib
import random
import statistics
import sys
from typing import Any

import common
import limit

WORKERS = {"rljax": "peer_rljax", "torch": "peer_torch", "tunix": "peer_tunix", "limit": "limit"}
SLOTS = {"a": 64, "b": 48, "c": 8}
CACHE = {"a": 8192, "b": 7424, "c": 6144}  # positions
MEDIAN, SIGMA, SHORTEST, LONGEST = 48, 0.8, 8, 256  # response lengths of work b
RESUMED_SLOTS, RESUMED_PROMPT, RESUMED_DRAWN, RESUMED_NEW = 8, 100, 1025, 32
GROWTH_SLOTS, GROWTH_PROMPTS, GROWTH_NEW, GROWTH_TARGET = 8, (64, 512), 48, 1.3


def make_work(options, name: str) -> dict[str, Any]:
    """Prompts of ordinary token ids, and the length of each of their samples."""
    draw = random.Random(f"{options.seed} {name}")
    if name == "a":
        prompts, lengths = [64] * 64, [[64]] * 64
    elif name == "b":
        prompts = [draw.randint(40, 200) for _ in range(16)]
        lengths = [[round(min(max(MEDIAN * draw.lognormvariate(0, SIGMA), SHORTEST), LONGEST)) for _ in range(8)]
                   for _ in prompts]
    else:
        prompts, lengths = [512] * 8, [[256]] * 8
    lengths = [[min(length, options.new or length) for length in group] for group in lengths[: options.prompts]]
    return _work(options, draw, prompts[: options.prompts], lengths, options.slots or SLOTS[name],
                 options.cache_tokens or CACHE[name])


def _work(options, draw: random.Random, prompts: list[int], lengths: list[list[int]], slots: int, cache: int
          ) -> dict[str, Any]:
    return {"model": str(options.model.resolve()), "lengths": lengths, "slots": min(slots, sum(map(len, lengths))),
            "prompts": [[draw.randrange(100, 40000) for _ in range(prompt)] for prompt in prompts],
            "steps": options.steps, "batch": options.peer_batch, "cache_tokens": cache}


def describe(work: dict[str, Any]) -> str:
    """The work's counts."""
    prompts, lengths = [len(prompt) for prompt in work["prompts"]], [n for group in work["lengths"] for n in group]
    return (f"{len(prompts)} prompts of {min(prompts)} to {max(prompts)} tokens, {len(work['lengths'][0])} samples of "
            f"each, {min(lengths)} to {max(lengths)} new tokens (mean {statistics.mean(lengths):.1f}, "
            f"{sum(lengths)} together), float32, temperature 1")


def compare(options, name: str) -> None:
    """One work: the table, whether the contestants agree, the limit."""
    work = make_work(options, name)
    print(f"work {name}: {describe(work)}", file=sys.stderr)
    machine = common.Contestant("limit", __file__, {"model": work["model"], "rows": [8, 64, work["slots"]]}, options)
    contestants = [common.Contestant(contestant, __file__, work, options) for contestant in options.contestants]
    common.take_turns([*contestants, machine], options.repeats)
    first: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for contestant in contestants * options.repeats:
        first[contestant.name].append(contestant.run(new=1)["seconds"])
    common.print_results(f"Work {name}: {describe(work)}", "new tokens", contestants, {
        "first token s": lambda contestant: f"{statistics.median(first[contestant.name]):.2f}",
        "compilations: warm-up": lambda contestant: str(contestant.ready["compilations"]),
        "measured": lambda contestant: str(sum(run["compilations"] for run in contestant.runs))})
    for contestant in contestants[1:]:
        print(agreement(contestants[0], contestant))
    print(limit.describe(work, limit.medians(machine.runs), contestants[0].name, contestants[0].rate()), flush=True)
    for contestant in [*contestants, machine]:
        contestant.close()


def agreement(one: common.Contestant, other: common.Contestant) -> str:
    """How many tokens of the first prompt's greedy continuation are the same."""
    mine, theirs = one.ready["greedy"], other.ready["greedy"]
    same = next((index for index, pair in enumerate(zip(mine, theirs)) if len(set(pair)) > 1), len(mine))
    return f"greedy continuation of the first prompt: {one.name} and {other.name} agree on {same} of {len(mine)} tokens"


def growth(options) -> None:
    """Seconds per decoded token with few and with many filled positions."""
    draw, new = random.Random(options.seed), options.new or GROWTH_NEW
    if new <= options.steps:
        sys.exit(f"--growth times what follows the first dispatch: --new {new} must be more than --steps "
                 f"{options.steps}")
    work = _work(options, draw, [n for n in GROWTH_PROMPTS for _ in range(GROWTH_SLOTS)],
                 [[new]] * 2 * GROWTH_SLOTS, GROWTH_SLOTS, options.cache_tokens or CACHE["c"])
    rljax = common.Contestant("rljax", __file__, work, options)
    took: dict[int, list[float]] = {prompt: [] for prompt in GROWTH_PROMPTS}
    for _ in range(options.repeats):
        for index, prompt in enumerate(GROWTH_PROMPTS):
            part = {"start": index * GROWTH_SLOTS, "stop": (index + 1) * GROWTH_SLOTS}
            took[prompt].append(rljax.run(**part)["per_token"])
    rljax.close()
    print(f"rljax, {GROWTH_SLOTS} slots, {new} new tokens each; medians of {options.repeats} turns; {common.machine()}")
    for prompt, seconds in took.items():
        print(f"{prompt} filled positions: {statistics.median(seconds) * 1e3:.2f} ms per token")
    ratios = [long / short for short, long in zip(*took.values())]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
          f"to be less than {GROWTH_TARGET}")


def resumed(options) -> None:
    """Seconds of going on under new weights behind what older ones drew."""
    draw, drawn = random.Random(options.seed), RESUMED_DRAWN
    work = _work(options, draw, [RESUMED_PROMPT], [[drawn + RESUMED_NEW] * RESUMED_SLOTS], RESUMED_SLOTS,
                 options.cache_tokens or 2 * RESUMED_SLOTS * drawn)
    rljax = common.Contestant("rljax", __file__, work | {"resumes": True}, options)
    runs = [[rljax.run(drawn=drawn, stale=stale) for stale in (drawn, 0)] for _ in range(options.repeats)]
    rljax.close()
    print(f"rljax, {RESUMED_SLOTS} responses of {drawn} tokens and {RESUMED_NEW} more, {options.repeats} turns; "
          f"{common.machine()}")
    for one in zip(*runs):
        print(f"{one[0]['prefilled']} tokens prefilled: {statistics.median(run['seconds'] for run in one):.1f} s")


def main() -> None:
    """The options; then each work in turn, or the growth or what is resumed."""
    options = common.parser(__doc__, peers=("torch", "tunix"))
    options.add_argument("--work", choices=[*SLOTS, "all"], default="a")
    options.add_argument("--growth", action="store_true", help="rljax alone: does a token cost more after many others?")
    options.add_argument("--resumed", action="store_true", help="rljax alone: going on behind older weights' tokens")
    options.add_argument("--contestants", nargs="+", choices=["rljax", "torch", "tunix"],
                         default=["rljax", "torch", "tunix"])
    options.add_argument("--slots", type=int, help="rljax: sequences at a time (default: by work)")
    options.add_argument("--steps", type=int, default=8, help="rljax: decoding steps per dispatch")
    options.add_argument("--cache-tokens", type=int, help="rljax: positions of its cache (default: by work)")
    options.add_argument("--peer-batch", type=int, default=0, help="sequences of a peer's batch (default: all)")
    options.add_argument("--prompts", type=int, help="the first so many prompts only")
    options.add_argument("--new", type=int, help="new tokens of a sequence at most")
    options = options.parse_args()
    if options.worker:
        return common.serve(importlib.import_module(WORKERS[options.worker]).worker)
    if options.growth or options.resumed:
        return growth(options) if options.growth else resumed(options)
    for name in SLOTS if options.work == "all" else [options.work]:
        compare(options, name)


if __name__ == "__main__":
    main()
