"""decode.py's worker for rljax: engine and scheduler as in training, each token's log-prob included."""

from __future__ import annotations

import time
from typing import Any

import common

PREFILL_CHUNK = 512  # as on a CPU by default
GREEDY = 16  # tokens of the continuation that all contestants must agree on


def make_scheduler(work: dict[str, Any]):
    """(scheduler, function that makes the rollout copy of the weights), everything loaded."""
    import jax

    from rljax import models, sharding
    from rljax.kernels import cpu
    from rljax.models import decoder
    from rljax.sampler.engine import Engine, EngineConfig
    from rljax.sampler.scheduler import Scheduler

    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    # The layout is the trainer's: the engine makes its own copy of the weights from it, as in training.
    cfg, params = models.load(work["model"], shardings=lambda cfg: sharding.tree_shardings(
        decoder.specs(cfg), sharding.TRAIN_RULES, mesh))
    prompts = [len(prompt) for prompt in work["prompts"]]
    new = max(map(max, work["lengths"]))
    buckets = sorted({-(-prompt // 64) * 64 for prompt in prompts})
    engine = Engine(cfg, EngineConfig(
        slots=work["slots"], cache_len=max(prompts) + new, new_tokens=new, prompt_buckets=tuple(buckets),
        prefill_rows=min(16, len(prompts)), steps_per_dispatch=work["steps"], stop_ids=(), vocab_known=cfg.vocab_size,
        prefill_chunk=PREFILL_CHUNK, members=max(map(len, work["lengths"])), row_levels=4,
        cache_tokens=work["cache_tokens"], resumes=work.get("resumes", False),
        kernel="cpu" if cpu.available() else "xla",
    ), mesh)
    jax.block_until_ready(params)
    copy: list[Any] = [None]

    def weights() -> Any:
        """A new copy, in the memory of the one before, as the training loop has it."""
        copy[0] = engine.weights(params, copy[0])
        return copy[0]

    return Scheduler(engine), weights


def worker(work: dict[str, Any]):
    """The samples of a prompt are requests with the same context; the weights are copied anew in every run."""
    import jax

    from rljax.sample import SamplingParams
    from rljax.sampler.scheduler import Request, complete

    compilations = common.count_compilations()
    start = time.perf_counter()
    scheduler, weights = make_scheduler(work)
    loaded, resident = time.perf_counter() - start, common.mark_memory()
    uids = iter(range(1 << 30))

    def requests(prompts: list[list[int]], lengths: list[list[int]], temperature: float = 1.0) -> list[Request]:
        return [Request(next(uids), list(prompt), SamplingParams(max_new_tokens=length, temperature=temperature))
                for prompt, group in zip(prompts, lengths) for length in group]

    def run(new: int | None = None) -> dict[str, Any]:
        """`new` tokens of each at most."""
        before = len(compilations)
        lengths = [[min(length, new or length) for length in group] for group in work["lengths"]]
        drawn = complete(scheduler, weights(), requests(work["prompts"], lengths))
        scheduler.release()
        return {"tokens": sum(len(request.tokens) for request in drawn), "compilations": len(compilations) - before}

    def decode(start: int, stop: int) -> dict[str, Any]:
        """Seconds per token of the prompts from `start` to `stop`, one for each slot, after their first dispatch."""
        params = weights()
        drawn = requests(work["prompts"][start:stop], work["lengths"][start:stop])
        scheduler.submit(drawn)
        scheduler.step(params)
        scheduler.step(params)  # waits for the prompts and the first dispatch
        before, begun = sum(len(request.tokens) for request in drawn), time.perf_counter()
        while scheduler.busy:
            scheduler.step(params)
        took, tokens = time.perf_counter() - begun, sum(len(request.tokens) for request in drawn) - before
        scheduler.release()
        return {"per_token": took / tokens}

    def resume(drawn: int, stale: int) -> dict[str, Any]:
        """All goes on behind `drawn` tokens, the first `stale` of which count as older weights'."""
        asked = requests(work["prompts"], work["lengths"])
        for request in asked:
            request.tokens = [1000 + index % 1000 for index in range(drawn)]
            request.logprobs, request.stale = [-1.0] * drawn, stale
        complete(scheduler, weights(), asked)
        scheduler.release()
        return {"prefilled": asked[0].prefilled}

    start = time.perf_counter()
    scheduler.engine.warmup(weights())
    few = [[min(GREEDY, max(map(max, work["lengths"])))]]
    greedy = complete(scheduler, weights(), requests(work["prompts"][:1], few, temperature=0.0))[0].tokens
    run(new=work["steps"])
    report = {"load": loaded, "warm": time.perf_counter() - start, "resident": resident, "greedy": greedy,
              "compilations": len(compilations),
              "settings": f"jax {jax.__version__}, {work['slots']} slots, {work['steps']} steps per dispatch"}
    return report, lambda **how: (decode if "start" in how else resume if "drawn" in how else run)(**how)
