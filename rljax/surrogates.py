"""Surrogate losses by name, and what corrects them for off-policy data.

A surrogate is `fn(loss, batch, logp) -> (token loss [R, T], {name: [R, T]})`, differentiable in logp, float32. `loss`
is the `LossConfig`; of `batch`, log-probs and advantages are 0 where loss_mask is, and `old_logprobs` are those that
the ratio takes. The token loss is weighted by `batch.loss_weight` and summed; the other arrays become
`train/` metrics, means over trained tokens: a user's function gives them names of its own, logged as
`train/extra/{name}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rljax import losses, plugins
from rljax.types import PackedBatch

TokenMetrics = dict[str, jax.Array]
Surrogate = Callable[[Any, PackedBatch, jax.Array], tuple[jax.Array, TokenMetrics]]


def clip(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
    """PPO's clipped ratio of each token (`losses.clipped_surrogate`)."""
    policy, clipped = losses.clipped_surrogate(
        logp, batch.old_logprobs, batch.advantages, loss.eps_clip, loss.eps_clip_high, loss.dual_clip
    )
    return policy, {"pg_clipfrac": clipped}


def gspo(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
    """The clipped ratio of the whole sequence, the same on all its tokens: exp of the mean log-ratio, through which
    the gradient flows (`losses.sequence_log_ratio`)."""
    ratio = losses.sequence_log_ratio(logp, batch.old_logprobs, batch.loss_mask, batch.segment_ids)
    policy, clipped = losses.clipped_surrogate(
        ratio, jnp.zeros_like(ratio), batch.advantages, loss.eps_clip, loss.eps_clip_high, loss.dual_clip
    )
    return policy, {"pg_clipfrac": clipped}


def cispo(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
    """REINFORCE weighted by the clipped ratio (`losses.cispo_surrogate`)."""
    policy, clipped = losses.cispo_surrogate(
        logp, batch.old_logprobs, batch.advantages, loss.eps_clip, loss.eps_clip_high
    )
    return policy, {"pg_clipfrac": clipped}


def reinforce(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
    """-A log p, whatever the old policy was (Williams 1992)."""
    return -batch.advantages * logp, {}


def sft(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
    """Negative log-likelihood of the given tokens."""
    return -logp, {}


BUILT_IN: dict[str, Surrogate] = {f.__name__: f for f in (clip, gspo, cispo, reinforce, sft)}


def find(name: str) -> Surrogate:
    """The surrogate called `name`; ValueError listing what exists. A user's metrics get the prefix `extra/`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    function = plugins.find("algo.surrogate", name, __name__, tuple(BUILT_IN), "")

    def with_prefix(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
        found = function(loss, batch, logp)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
            raise ValueError(f"algo.surrogate {name} returned {type(found).__name__}: expected (token loss, dict)")
        policy, metrics = found
        for key, value in {"token loss": policy, **metrics}.items():
            if jnp.shape(value) != logp.shape:
                raise ValueError(f"algo.surrogate {name}: {key} has shape {jnp.shape(value)}, expected one number for "
                                 f"each token, {logp.shape}")
        return policy, {f"extra/{key}": value for key, value in metrics.items()}

    return with_prefix


def sampler_correction(loss: Any, batch: PackedBatch) -> tuple[jax.Array, TokenMetrics]:
    """Importance weights [R, T] for tokens drawn by a sampler whose probabilities differ from the trainer's.

    The ratio exp(old - rollout) is taken of each token, of the product over its sample's trained tokens (`sequence`)
    or of their geometric mean (`geometric`), then truncated to or masked outside [is_low, is_high]. Metrics: the raw
    ratio (tis), the share outside the bounds, and the mean distance of the ratio from 1.
    """
    log_ratio = batch.old_logprobs - batch.rollout_logprobs
    if loss.is_level != "token":
        log_ratio = losses.sequence_log_ratio(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask,
                                              batch.segment_ids, total=loss.is_level == "sequence")
    ratio, _ = losses.importance_weights(log_ratio, 0.0, 0.0, jnp.inf, "truncate")
    weights, clipped = losses.importance_weights(log_ratio, 0.0, loss.is_low, loss.is_high, loss.is_correction)
    return weights, {"tis": ratio, "tis_clipfrac": clipped, "tis_abs": jnp.abs(ratio - 1.0)}


def on_policy_sequences(loss: Any, batch: PackedBatch, logp: jax.Array) -> tuple[jax.Array, TokenMetrics]:
    """Off-policy sequence masking: 0 on tokens of negative advantage whose sample has drifted, mean(old - new) above
    opsm_delta nats; else 1. [R, T], no gradient. DeepSeek-V3.2 2025 (arXiv:2512.02556)."""
    drift = -losses.sequence_log_ratio(
        jax.lax.stop_gradient(logp), batch.old_logprobs, batch.loss_mask, batch.segment_ids
    )
    dropped = (batch.advantages < 0) & (drift > loss.opsm_delta)
    return 1.0 - dropped, {"opsm_clipfrac": dropped.astype(jnp.float32)}
