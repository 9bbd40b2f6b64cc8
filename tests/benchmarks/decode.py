"""Decoding, rljax beside Hugging Face transformers with torch: the same float32 weights, prompts and token counts.

64 sequences of 64 prompt tokens, 64 new tokens each at temperature 1, no early stop, prefill included. rljax runs
its scheduler and engine as in training and also returns each token's log-prob; transformers runs `generate` in
inference mode, with the fastest of four settings (attention sdpa or eager, cache dynamic or static), tried first.
Both use all cores. Loading, compiling and warming up are reported apart.

    python tests/benchmarks/decode.py --torch-env .venv-torch
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import common

TRIAL = 4  # new tokens on which the peer's settings are compared: sdpa can take ten times as long as eager


def make_work(options) -> dict[str, Any]:
    """Prompts of ordinary token ids; every sequence has its own."""
    draw = random.Random(options.seed)
    prompts = [[draw.randrange(100, 40000) for _ in range(options.prompt)] for _ in range(options.sequences)]
    return {"model": str(options.model.resolve()), "prompts": prompts, "new": options.new, "steps": options.steps}


def rljax_worker(work: dict[str, Any]):
    """rljax's engine and scheduler, as many slots as sequences."""
    import jax

    from rljax import models, sharding
    from rljax.models import decoder
    from rljax.sample import SamplingParams
    from rljax.sampler.engine import Engine, EngineConfig
    from rljax.sampler.scheduler import Request, Scheduler, complete

    start = time.perf_counter()
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    # The layout is the trainer's: the engine makes its own copy of the weights from it, as in training.
    cfg, params = models.load(work["model"], shardings=lambda cfg: sharding.tree_shardings(
        decoder.specs(cfg), sharding.TRAIN_RULES, mesh))
    prompt, sequences = len(work["prompts"][0]), len(work["prompts"])
    engine = Engine(cfg, EngineConfig(
        slots=sequences, cache_len=prompt + work["new"], prompt_buckets=(prompt,), prefill_rows=min(16, sequences),
        steps_per_dispatch=work["steps"], stop_ids=(), vocab_known=cfg.vocab_size,
    ), mesh)
    jax.block_until_ready(params)
    loaded, resident = time.perf_counter() - start, common.mark_memory()
    scheduler = Scheduler(engine)
    uids = iter(range(1 << 30))

    def run(new: int = work["new"]) -> dict[str, Any]:
        weights = engine.weights(params)
        requests = [Request(next(uids), list(prompt), SamplingParams(max_new_tokens=new)) for prompt in work["prompts"]]
        complete(scheduler, weights, requests)
        return {"tokens": sum(len(request.tokens) for request in requests)}

    start = time.perf_counter()
    run(work["steps"] + 1)
    report = {"load": loaded, "warm": time.perf_counter() - start, "resident": resident,
              "settings": f"jax {jax.__version__}, {work['steps']} steps per dispatch, cache {prompt + work['new']}"}
    return report, run


def torch_worker(work: dict[str, Any]):
    """transformers' generate, with the fastest of its settings."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    prompts = torch.tensor(work["prompts"])
    # Reads every weight, so that what is mapped from the file counts as loaded.
    sum(float(p.detach().sum()) for p in model.parameters())
    loaded, resident = time.perf_counter() - start, common.mark_memory()

    def run(attention: str, cache: str, new: int = work["new"]) -> dict[str, Any]:
        model.set_attn_implementation(attention)
        settings = transformers.GenerationConfig(
            max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True,
            cache_implementation=None if cache == "dynamic" else cache, eos_token_id=None, pad_token_id=0,
        )
        with torch.inference_mode():
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
        return {"tokens": out.numel() - prompts.numel()}

    start = time.perf_counter()
    tried = {}
    for choice in [(a, c) for a in ("sdpa", "eager") for c in ("dynamic", "static")]:
        run(*choice, new=2)
        begin = time.perf_counter()
        run(*choice, new=TRIAL)
        tried[choice] = time.perf_counter() - begin
    best = min(tried, key=tried.get)
    common.mark_memory()  # the other settings' memory is not the best one's
    seconds = ", ".join(f"{' '.join(choice)} {took:.1f} s" for choice, took in tried.items())
    report = {"load": loaded, "warm": time.perf_counter() - start, "resident": resident,
              "settings": f"torch {torch.__version__}, transformers {transformers.__version__}, {' '.join(best)} "
                          f"({TRIAL} tokens: {seconds}), {torch.get_num_threads()} threads"}
    return report, lambda: run(*best)


WORKERS = {"rljax": rljax_worker, "torch": torch_worker}


def main() -> None:
    """Start both, let them take turns, print the table."""
    options = common.parser(__doc__)
    options.add_argument("--sequences", type=int, default=64)
    options.add_argument("--prompt", type=int, default=64, help="prompt tokens of each")
    options.add_argument("--new", type=int, default=64, help="new tokens of each")
    options.add_argument("--steps", type=int, default=16, help="rljax: decoding steps per dispatch")
    options = options.parse_args()
    if options.worker:
        return common.serve(WORKERS[options.worker])
    work = make_work(options)
    contestants = [common.Contestant(name, __file__, work, options) for name in WORKERS]
    common.take_turns(contestants, options.repeats)
    common.print_results(f"{options.sequences} sequences, {options.prompt} prompt and {options.new} new tokens each, "
                         "float32, temperature 1", "new tokens", contestants)


if __name__ == "__main__":
    main()
