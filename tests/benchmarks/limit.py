"""What a machine allows: the least seconds of a decoding work, from rates that are measured on the machine itself.

The rates, each the best of several tries in one turn: reading memory (a jitted sum over 256 MiB), and float32 matrix
products by number of rows over weights of the model's shapes, all layers one after the other and so larger than the
caches: the best of XLA's, NumPy's and rljax's kernel. Turns alternate with the contestants', whose medians they are
compared with.
The bound counts every distinct prompt's products once, without attention, at the rate of 1,024 rows; then as many
decoding steps as full slots need, each either its products or the reading of all weights, whichever takes longer; and
the keys and values that each token reads. Everything else (drawing, attention's products, the host) it takes as free.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

PROMPT_ROWS = 1024
TRIES = 7


def sizes(folder: str) -> dict[str, int]:
    """Of a model without experts: layers, widths of products, parameters in layers and head, cache bytes a token."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head
    wide, layers, mlp = heads * head, config["num_hidden_layers"], config["intermediate_size"]
    return {"layers": layers, "hidden": hidden, "wide": wide, "kv": kv, "mlp": mlp,
            "body": layers * hidden * (2 * wide + 2 * kv + 3 * mlp), "head": hidden * config["vocab_size"],
            "cache": 2 * 4 * layers * kv}


def worker(work: dict[str, Any]):
    """A run measures the machine's rates: bytes a second, and product FLOP a second by rows."""
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np

    from rljax.kernels import cpu

    size = sizes(work["model"])
    block, layers = jnp.ones(1 << 26, jnp.float32), _weights(size)
    turned = jax.device_put([{name: np.ascontiguousarray(w.T) for name, w in layer.items()} for layer in layers])
    summed, ways = jax.jit(jnp.sum), [
        (jax.jit(functools.partial(_products, jnp, jnp.matmul)), jax.device_put(layers)),
        (functools.partial(_products, np, np.matmul), layers)]
    if cpu.available():
        ways.append((jax.jit(functools.partial(_products, jnp, cpu.product)), turned))

    def best(function, *arguments) -> float:
        jax.block_until_ready(function(*arguments))
        took = []
        for _ in range(TRIES):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            took.append(time.perf_counter() - start)
        return min(took)

    def run() -> dict[str, Any]:
        rates = {rows: 2 * size["body"] * rows / min(
            best(function, np.ones((rows, size["hidden"]), np.float32), weights) for function, weights in ways)
            for rows in sorted({*work["rows"], PROMPT_ROWS})}
        return {"bandwidth": block.nbytes / best(summed, block), "rates": rates}

    return run(), run


def _weights(size: dict[str, int]):
    """Random weights [layers][name] of the model's products."""
    import numpy as np

    shapes = {"q": (size["hidden"], size["wide"]), "k": (size["hidden"], size["kv"]), "v": (size["hidden"], size["kv"]),
              "o": (size["wide"], size["hidden"]), "gate": (size["hidden"], size["mlp"]),
              "up": (size["hidden"], size["mlp"]), "down": (size["mlp"], size["hidden"])}
    draw = np.random.default_rng(0)
    return [{name: draw.standard_normal(shape, np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()}
            for _ in range(size["layers"])]


def _products(xp, product, x, layers):
    """Every product of the layers, each needed for the next: nothing that XLA could leave out. xp: numpy, or JAX's."""
    for w in layers:
        heads = product(x, w["q"]) + sum(product(x, w[name]).max(-1, keepdims=True) for name in "kv")
        x = product(heads, w["o"])
        x = product(xp.maximum(product(x, w["gate"]), product(x, w["up"])), w["down"])
        x = x / (1 + abs(x).max(-1, keepdims=True))
    return x


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each rate over the turns."""
    return {"bandwidth": statistics.median(run["bandwidth"] for run in runs),
            "rates": {int(rows): statistics.median(run["rates"][rows] for run in runs) for rows in runs[0]["rates"]}}


def least_seconds(work: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part of `work` at least; "step" is one decoding step, and the larger of its two parts counts."""
    size, slots = sizes(work["model"]), work["slots"]
    rates, tokens = measured["rates"], sum(map(sum, work["lengths"]))
    parameters = size["body"] + size["head"]
    read = sum(length * len(prompt) + length * (length - 1) // 2
               for prompt, group in zip(work["prompts"], work["lengths"]) for length in group)
    parts = {"prefill": 2 * size["body"] * sum(map(len, work["prompts"])) / rates[PROMPT_ROWS],
             "products of a step": 2 * parameters * slots / rates[slots],
             "weights of a step": 4 * parameters / measured["bandwidth"],
             "steps": max(tokens / slots, max(map(max, work["lengths"]))),
             "cache": size["cache"] * read / measured["bandwidth"]}
    step = max(parts["products of a step"], parts["weights of a step"])
    return {**parts, "all": parts["prefill"] + parts["steps"] * step + parts["cache"]}


def describe(work: dict[str, Any], measured: dict[str, Any], name: str, rate: float) -> str:
    """The limit in words, with the ratio of contestant `name` at `rate` tokens/s to it."""
    parts = least_seconds(work, measured)
    limit = sum(map(sum, work["lengths"])) / parts["all"]
    rates = ", ".join(f"{value / 1e9:.0f} at {rows} rows" for rows, value in measured["rates"].items())
    return (f"the machine: reads {measured['bandwidth'] / 1e9:.1f} GB/s; products, GFLOP/s: {rates}\n"
            f"the limit: {limit:.0f} new tokens/s, {parts['all']:.2f} s (prompts {parts['prefill']:.2f} s; "
            f"{parts['steps']:.0f} steps of {work['slots']} slots, each at least {parts['products of a step']:.4f} s "
            f"of products and {parts['weights of a step']:.4f} s of reading weights; cache {parts['cache']:.2f} s); "
            f"{name} reaches {rate / limit:.2f} of it\n")
