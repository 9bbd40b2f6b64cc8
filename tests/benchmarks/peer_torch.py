"""decode.py's worker for Hugging Face transformers with torch: `generate` in inference mode.

Of four settings (attention sdpa or eager, cache dynamic or static) the one with the least seconds for the work, as
estimated on part of the batch from the first token's time and the median of TRIAL further steps, after a run that does
not count: sdpa can take ten times as long as eager. Where
prompts are padded (on the left, with a mask), a setting counts only if the padding does not change the logits. A
sequence is done at its length (a StoppingCriteria); `generate` goes on until all of a batch are.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from typing import Any

import common
from peer_rljax import GREEDY

TRIAL, TRIAL_ROWS = 8, 16  # new tokens and sequences on which the settings are compared
TOLERANCE = 1e-2  # largest difference of a logit that padding may make; a wrong mask makes one of several units


def generate(model, choice: tuple[str, str], prompts: list[list[int]], lengths: list[list[int]],
             stamps: list[float] | None = None, **settings):
    """generate's output for prompts [P] padded on the left, sample s of prompt p done at lengths[p][s].

    `stamps` gets the time of every step.
    """
    import torch
    import transformers

    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = width + torch.tensor(lengths).flatten()
    model.set_attn_implementation(choice[0])

    def done(ids, scores, **_):
        if stamps is not None:
            stamps.append(time.perf_counter())
        return ids.shape[1] >= ends

    config = transformers.GenerationConfig(**{
        "max_new_tokens": int(ends.max()) - width, "num_return_sequences": len(lengths[0]), "use_cache": True,
        "cache_implementation": None if choice[1] == "dynamic" else choice[1], "eos_token_id": None, "pad_token_id": 0,
        "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "return_dict_in_generate": True, **settings})
    with torch.inference_mode():
        return model.generate(tokens, attention_mask=mask, generation_config=config,
                              stopping_criteria=[done])


def padding_is_harmless(model, choice: tuple[str, str], prompts: list[list[int]]) -> bool:
    """Whether the shortest prompt has the same logits alone and padded to the longest."""
    prompts = sorted(prompts, key=len)
    draw = functools.partial(generate, model, choice, do_sample=False, output_logits=True, top_p=None, top_k=None,
                             temperature=None)
    alone, padded = draw(prompts[:1], [[2]]), draw([prompts[0], prompts[-1]], [[2], [2]])
    return all(float((a[0] - b[0]).abs().max()) < TOLERANCE for a, b in zip(alone.logits, padded.logits))


def choose(model, prompts: list[list[int]], lengths: list[list[int]]) -> tuple[tuple[str, str], str]:
    """The fastest valid setting, and what was found of each."""
    part = max(1, TRIAL_ROWS // len(lengths[0]))
    found, longest = {}, max(map(max, lengths))
    for choice in [(a, c) for a in ("sdpa", "eager") for c in ("dynamic", "static")]:
        if len(set(map(len, prompts))) > 1 and not padding_is_harmless(model, choice, prompts):
            continue
        stamps: list[float] = []
        for new in (2, 1 + TRIAL):
            stamps[:] = [time.perf_counter()]
            generate(model, choice, prompts[:part], [[new] * len(group) for group in lengths[:part]], stamps)
        steps = [after - before for before, after in zip(stamps[1:], stamps[2:])]
        found[choice] = stamps[1] - stamps[0] + statistics.median(steps) * (longest - 1)
    seconds = ", ".join(f"{' '.join(choice)} {took:.1f} s" for choice, took in found.items())
    return min(found, key=found.get), seconds


def worker(work: dict[str, Any]):
    """Batches in the given order, each until the longest of its lengths."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    # Reads every weight, so that what is mapped from the file counts as loaded.
    sum(float(p.detach().sum()) for p in model.parameters())
    loaded, resident = time.perf_counter() - start, common.mark_memory()
    prompts, lengths = work["prompts"], work["lengths"]
    size = max(1, work["batch"] // len(lengths[0])) if work["batch"] else len(prompts)

    def run(new: int | None = None) -> dict[str, Any]:
        for start in range(0, len(prompts), size):
            wanted = [[min(length, new or length) for length in group] for group in lengths[start : start + size]]
            generate(model, best, prompts[start : start + size], wanted)
        return {"tokens": sum(min(length, new or length) for group in lengths for length in group), "compilations": 0}

    start = time.perf_counter()
    best, seconds = choose(model, prompts[:size], lengths[:size])
    greedy = generate(model, best, prompts[:1], [[min(GREEDY, max(map(max, lengths)))]], do_sample=False, top_p=None,
                      top_k=None, temperature=None).sequences[0, len(prompts[0]) :].tolist()
    common.mark_memory()  # the other settings' memory is not the best one's
    run(new=2)
    report = {"load": loaded, "warm": time.perf_counter() - start, "resident": resident, "greedy": greedy,
              "compilations": 0,
              "settings": f"torch {torch.__version__}, transformers {transformers.__version__}, {' '.join(best)} "
                          f"(estimated for {min(len(prompts) * len(lengths[0]), TRIAL_ROWS)} sequences: {seconds}), "
                          f"batches of {size * len(lengths[0])}, {torch.get_num_threads()} threads"}
    return report, run
