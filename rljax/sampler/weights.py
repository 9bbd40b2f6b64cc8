"""The sampler's copy of the weights: cast or quantised, laid out for decoding, made on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax import sharding
from rljax.kernels import cpu
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.sampler.cache import quantize
from rljax.types import Params


def convert(cfg: ModelConfig, params: Params, dtype: Any, int8: bool = False) -> Params:
    """Cast to `dtype`, layers as a list of trees: slicing stacked weights inside a decoding loop would copy them all.

    Matrices of a layer are stored [out, in]: then, on a CPU in float32, a row of a product mostly has the same bits
    whatever the number of rows, and the kernel reads them as they lie. int8: they become int8 with a float32 scale
    [out] beside them. Experts' do not change.
    """
    cast = jax.tree.map(lambda x: x.astype(dtype), {name: params[name] for name in params if name != "layers"})
    layers = [{name: x[i] for name, x in params["layers"].items()} for i in range(cfg.num_layers)]
    return {**cast, "layers": [_converted(layer, dtype, int8) for layer in layers]}


def product(x: jax.Array, matrix: jax.Array, dtype: Any = None, kernel: str = "xla") -> jax.Array:
    """x [N, in] times a matrix [out, in] of the copy, without its scale: [N, out] in `dtype` (None = x's). kernel:
    "xla", or "cpu" for that of `kernels/`."""
    if kernel == "cpu":
        return cpu.product(x, matrix)
    return jax.lax.dot_general(x, matrix.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _is_matrix(name: str, leaf: Any) -> bool:
    return name.endswith("_proj") and len(leaf.shape) == 2


def _converted(layer: Params, dtype: Any, int8: bool) -> Params:
    made = {}
    for name, leaf in layer.items():
        if int8 and _is_matrix(name, leaf):
            made[name], made[decoder.scale_name(name)] = quantize(leaf.T, 1)
        else:
            made[name] = (leaf.T if _is_matrix(name, leaf) else leaf).astype(dtype)
    return made


def shardings(cfg: ModelConfig, mesh: Mesh, int8: bool = False) -> Params:
    """Shardings of what `convert` gives."""
    specs = decoder.specs(cfg)
    rules = sharding.ROLLOUT_RULES
    layer = {}
    for name, leaf in specs["layers"].items():
        shape, axes = leaf.shape[1:], leaf.axes[1:]
        if _is_matrix(name, decoder.Spec(shape, axes, leaf.init)):
            shape, axes = shape[::-1], axes[::-1]
            if int8:
                layer[decoder.scale_name(name)] = decoder.Spec(shape[:1], axes[:1], "ones")
        layer[name] = decoder.Spec(shape, axes, leaf.init)
    rest = {name: specs[name] for name in specs if name != "layers"}
    one_layer = sharding.tree_shardings(layer, rules, mesh)
    return {**sharding.tree_shardings(rest, rules, mesh), "layers": [one_layer] * cfg.num_layers}


class Converter:
    """`convert` as one program per layout of what comes in."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, dtype: Any, int8: bool):
        made = functools.partial(convert, cfg, dtype=dtype, int8=int8)
        self.shardings = shardings(cfg, mesh, int8)
        self._fresh = jax.jit(made, out_shardings=self.shardings)
        self._again = jax.jit(lambda old, params: made(params), out_shardings=self.shardings, donate_argnums=0,
                              keep_unused=True)

    def __call__(self, params: Params, old: Params | None = None) -> Params:
        """The copy of `params`; with `old`, a copy that nobody needs any more, in its memory."""
        return self._fresh(params) if old is None else self._again(old, params)

    def shapes(self, params: Params) -> Params:
        """What `__call__` gives, as shapes with shardings; `params` may be shapes as well."""
        made = jax.eval_shape(self._fresh, params)
        return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
                            made, self.shardings)
