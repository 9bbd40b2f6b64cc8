"""One GRPO update, rljax beside Hugging Face transformers with torch: the same float32 weights, samples and loss.

Samples have prompts of 40 to 64 tokens and long-tailed responses, 256 tokens together at most. An update is forward
and backward over all samples (clipped surrogate on the response tokens, sample mean), clipping by the global norm and
AdamW, at rate 0, so that every run does the same and the gradient norms can be compared. rljax packs the samples and
steps as in training, entropies included. transformers takes batches of 8 in the given order, padded on the right to
the longest (causal, so no mask is needed), makes logits of the response positions only, and steps with fused AdamW;
attention sdpa or eager, whichever is faster. Counted are real tokens, prompt and response, no padding. Peak memory
is the process's high-water mark less what is resident after loading, with weights and moments, in its own process.
--extra adds transformers with batches sorted by length, and with gradient checkpointing.

    python tests/benchmarks/train.py --torch-env .venv-torch
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import common

BATCH = 8


def make_work(options) -> dict[str, Any]:
    """Token ids and an advantage of each sample. The first is as long as may be: some sample of a step always is."""
    draw = random.Random(options.seed)
    samples = []
    for index in range(options.samples):
        prompt = draw.randint(40, 64)
        response = options.longest if index == 0 else int(draw.lognormvariate(4.0, 0.7))
        response = max(4, min(response, options.longest - prompt))
        tokens = [draw.randrange(100, 40000) for _ in range(prompt + response)]
        samples.append({"tokens": tokens, "prompt": prompt, "advantage": draw.gauss(0.0, 1.0)})
    return {"model": str(options.model.resolve()), "samples": samples, "row": options.row,
            "max_tokens": options.max_tokens}


def rljax_worker(work: dict[str, Any]):
    """rljax's packing and trainer."""
    import jax
    import numpy as np

    from rljax import models, packing, sharding
    from rljax.optimizer import OptimizerConfig
    from rljax.policy import LossConfig
    from rljax.trainer import Trainer

    start = time.perf_counter()
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    trainer = Trainer(models.load_config(work["model"]), mesh, LossConfig(remat="dots"), OptimizerConfig(lr=0.0))
    params = models.load(work["model"], shardings=trainer.shardings)[1]
    kept = {"state": jax.block_until_ready(trainer.init(params))}
    del params
    loaded, resident = time.perf_counter() - start, common.mark_memory()
    masks = [np.ones(len(s["tokens"]) - s["prompt"]) for s in work["samples"]]
    items = [
        packing.PackItem(np.asarray(s["tokens"]), s["prompt"], mask, weight, mask * s["advantage"], *[mask * 0.0] * 3)
        for s, mask, weight in zip(work["samples"], masks, packing.loss_weights(masks, "sample_mean"))
    ]

    def run() -> dict[str, Any]:
        batches = packing.pack(items, buckets=(work["row"],), max_tokens_per_device=work["max_tokens"], data_shards=1)
        kept["shapes"] = f"{len(batches)} micro-batches of {batches[0].tokens.shape[0]} x {work['row']}"
        tokens = sum(len(item.tokens) for item in items)
        kept["state"], metrics = trainer.step(kept["state"], batches, on_policy=True)
        jax.block_until_ready(kept["state"])
        return {"tokens": tokens, "norm": float(metrics["grad_norm"])}

    start = time.perf_counter()
    run()
    return {"load": loaded, "warm": time.perf_counter() - start, "resident": resident,
            "settings": f"jax {jax.__version__}, {kept['shapes']}"}, run


def torch_worker(work: dict[str, Any], way: str = ""):
    """transformers with the ordinary loss; `way` is "", sorted or checkpoint."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).train()
    if way == "checkpoint":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments and reads every weight: what is mapped from the file counts as loaded
    optimizer.zero_grad(set_to_none=True)
    loaded, resident = time.perf_counter() - start, common.mark_memory()
    samples = work["samples"]
    if way == "sorted":
        samples = sorted(samples, key=lambda sample: len(sample["tokens"]))
    batches = [_pad(torch, samples[i : i + BATCH], len(samples)) for i in range(0, len(samples), BATCH)]

    def run(batches=batches) -> dict[str, Any]:
        for batch in batches:
            _loss(torch, model, *batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"tokens": sum(len(sample["tokens"]) for sample in samples), "norm": float(norm)}

    start = time.perf_counter()
    tried = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        run(batches[:1])
        begin = time.perf_counter()
        run(batches[:1])
        tried[attention] = time.perf_counter() - begin
    best = min(tried, key=tried.get)
    model.set_attn_implementation(best)
    common.mark_memory()  # the other attention's memory is not the best one's
    seconds = ", ".join(f"{name} {took:.1f} s" for name, took in tried.items())
    return {"load": loaded, "warm": time.perf_counter() - start, "resident": resident,
            "settings": f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()}"
                        f" threads, {best} (one batch: {seconds}), batches of {BATCH}"}, run


def _pad(torch, samples: list[dict[str, Any]], total: int):
    """(tokens [B, T], mask, advantages and weights [B, T - 1] of the tokens from the second on)."""
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = torch.tensor([s["tokens"] + [0] * (longest - len(s["tokens"])) for s in samples])
    at = torch.arange(1, longest)
    mask = torch.stack([(at >= s["prompt"]) & (at < len(s["tokens"])) for s in samples])
    advantages = torch.tensor([[s["advantage"]] for s in samples]).expand(mask.shape)
    weights = (1.0 / mask.sum(1, keepdim=True) / total).expand(mask.shape)
    return tokens, mask, advantages, weights


def _loss(torch, model, tokens, mask, advantages, weights):
    """sum w * max(-ratio A, -clip(ratio) A) over response tokens."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1][mask]
    logp = torch.log_softmax(model.lm_head(hidden), dim=-1).gather(1, tokens[:, 1:][mask][:, None])[:, 0]
    ratio, advantages = (logp - logp.detach()).exp(), advantages[mask]
    return (torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages) * weights[mask]).sum()


def prepare(name: str):
    """The worker of a contestant's name."""
    if name == "rljax":
        return rljax_worker
    return lambda work: torch_worker(work, name.partition(":")[2])


def main() -> None:
    """Start all, let them take turns, print the table."""
    options = common.parser(__doc__)
    options.add_argument("--samples", type=int, default=32)
    options.add_argument("--longest", type=int, default=256, help="tokens of a sample at most, prompt and response")
    options.add_argument("--row", type=int, default=512, help="rljax: length of a row")
    options.add_argument("--max-tokens", type=int, default=1024, help="rljax: tokens of a micro-batch at most")
    options.add_argument("--extra", action="store_true", help="also transformers sorted by length, and checkpointed")
    options = options.parse_args()
    if options.worker:
        return common.serve(prepare(options.worker))
    work = make_work(options)
    names = ["rljax", "torch", *["torch:sorted", "torch:checkpoint"] * options.extra]
    contestants = [common.Contestant(name, __file__, work, options) for name in names]
    common.take_turns(contestants, options.repeats)
    lengths = [len(sample["tokens"]) for sample in work["samples"]]
    common.print_results(f"One update on {len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, "
                         f"{sum(lengths)} together, float32", "real tokens", contestants,
                         {"norm": lambda contestant: f"{contestant.runs[-1]['norm']:.6g}"})


if __name__ == "__main__":
    main()
