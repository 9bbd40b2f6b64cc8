"""decode.py's worker for google-tunix: its Sampler and its Llama model with the same float32 weights.

What is chosen, and why:

- temperature 1 with top_p = 1 and no top_k: the one of its ways to draw that neither sorts nor softmaxes.
- A cache, a prompt length and a number of steps just large enough, not the powers of two that it would take.
- Its sampler draws a batch to `max_generation_steps` or until every sequence has ended, and refills nothing: the batch
  goes to its longest length, as it would with ending tokens. No token ends a sequence here, and no log-probs are asked
  for. All sequences are one batch, or `--peer-batch` at a time.
- The samples of a prompt are rows with the same prompt, as in its GRPO.
- Token ids go in through a tokenizer whose texts are lists of ids.

Its Llama class ignores `rope_theta` of its configuration and rotates with base 1,000,000; without the model's own base
its tokens are not the model's, so that default is replaced. Buffer lengths are part of the shapes that it compiles
for, so warming up is one whole run and one of one token. Its loop takes one step more than it gives tokens.
"""

from __future__ import annotations

import functools
import json
import pathlib
import time
from typing import Any

import common
from peer_rljax import GREEDY


class TokenIds:
    """A tokenizer whose texts are lists of token ids."""

    def encode(self, ids: list[int]) -> list[int]:
        return list(ids)

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


def load(folder: str):
    """tunix's Llama with the weights of a Hugging Face folder, in float32."""
    import jax.numpy as jnp
    from tunix.models.llama3 import model, params

    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    model.apply_rope = functools.partial(model.apply_rope, rope_theta=theta)
    sizes = model.ModelConfig(
        num_layers=config["num_hidden_layers"], vocab_size=config["vocab_size"], embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"], num_heads=config["num_attention_heads"], head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"], rope_theta=theta, norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    return params.create_model_from_safe_tensors(folder, sizes, dtype=jnp.float32)


def sampler(model, cache: int):
    """A sampler with a cache of `cache` positions."""
    from tunix.generate.sampler import CacheConfig, Sampler

    sizes = model.config
    return Sampler(model, TokenIds(), CacheConfig(cache, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim))


def worker(work: dict[str, Any]):
    """Batches in the given order, each to the longest of its lengths."""
    import jax

    compilations = common.count_compilations()
    start = time.perf_counter()
    model = load(work["model"])
    jax.block_until_ready(jax.tree.leaves(model))
    loaded, resident = time.perf_counter() - start, common.mark_memory()
    rows = [prompt for prompt, group in zip(work["prompts"], work["lengths"]) for _ in group]
    lengths = [length for group in work["lengths"] for length in group]
    longest, size = max(map(len, rows)), work["batch"] or len(rows)
    draw = sampler(model, longest + max(lengths))

    def run(new: int | None = None) -> dict[str, Any]:
        before, tokens = len(compilations), 0
        for start in range(0, len(rows), size):
            wanted = [min(length, new or length) for length in lengths[start : start + size]]
            out = draw(rows[start : start + size], max_generation_steps=max(wanted), max_prompt_length=longest,
                       temperature=1.0, top_p=1.0, seed=len(compilations) + start)
            tokens += sum(len(row[:length]) for row, length in zip(out.tokens, wanted))
        return {"tokens": tokens, "compilations": len(compilations) - before}

    start = time.perf_counter()
    count = min(GREEDY, max(lengths))
    alone = sampler(model, len(rows[0]) + count)
    greedy = alone(rows[:1], max_generation_steps=count, max_prompt_length=len(rows[0])).tokens[0].tolist()
    run(), run(new=1)
    report = {"load": loaded, "warm": time.perf_counter() - start, "resident": resident, "greedy": greedy,
              "compilations": len(compilations),
              "settings": f"jax {jax.__version__}, google-tunix 0.1.7, batches of {size}, prompts padded to {longest}, "
                          f"cache {longest + max(lengths)}, top_p 1 without top_k"}
    return report, run
