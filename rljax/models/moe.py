"""A mixture of experts without capacity: tokens are sorted by expert and multiplied in ragged groups.

No token is dropped and each row of a product depends on that row alone, so a token's result does not depend on
its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def route(router: jax.Array, x: jax.Array, per_token: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """(weights [N, per_token] float32, experts [N, per_token] int32) for x [N, D]; softmax over all experts."""
    scores = jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), per_token)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


def mlp(params: dict[str, Any], x: jax.Array, activation: Callable[[jax.Array], jax.Array], per_token: int,
        normalize: bool) -> jax.Array:
    """Sum over a token's chosen experts of weight * down(activation(gate(x)) * up(x)), for x [..., D].

    params: router [D, E]; gate_proj, up_proj [E, D, F]; down_proj [E, F, D].
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, experts = route(params["router"], flat, per_token, normalize)
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=params["router"].shape[-1]).astype(jnp.int32)
    rows = flat[order // per_token]
    gate = jax.lax.ragged_dot(rows, params["gate_proj"].astype(x.dtype), sizes)
    up = jax.lax.ragged_dot(rows, params["up_proj"].astype(x.dtype), sizes)
    out = jax.lax.ragged_dot(activation(gate) * up, params["down_proj"].astype(x.dtype), sizes)
    # Back to token order by a gather, not a scatter-add, so that the sum over experts has one fixed order.
    back = out[jnp.argsort(order)].reshape(flat.shape[0], per_token, -1)
    return jnp.sum(back * weights[..., None].astype(x.dtype), axis=1).reshape(x.shape)
