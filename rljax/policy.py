"""The policy's side of stage 6: log-probs of tokens, and the loss of a micro-batch with all its corrections.

The loss of a step is sum(loss_weight * token_loss) over all its micro-batches, with weights made on the host for
the whole step: no denominators here, so packing, micro-batch size and device count cannot change it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rljax import losses, ops, surrogates
from rljax.models import decoder
from rljax.models.config import ModelConfig
from rljax.types import PackedBatch, Params

Shards = tuple[int, int]  # how many parts of the rows, and of the vocabulary, lie on different devices
Sums = dict[str, jax.Array]  # scalars, added over the micro-batches of a step
MEAN = "mean/"  # prefix of a sum over trained tokens that becomes a mean once divided by their number
MAX = "max/"  # prefix of what is not added: the largest counts


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What the loss is made of (KNOBS `algo`) and how it is computed."""

    surrogate: str = "clip"  # a name of surrogates.BUILT_IN, or package.module:function
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    dual_clip: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    kl_unbiased: bool = False
    kl_metric: bool = False
    entropy_coef: float = 0.0
    old_logprobs: str = "batch"  # batch: as given; self: this very pass, for the only update of a rollout
    is_correction: str = "none"  # none, truncate, mask
    is_level: str = "token"  # token, sequence, geometric
    is_low: float = 0.0
    is_high: float = 2.0
    opsm_delta: float = 0.0
    temperature: float = 1.0
    compute_dtype: Any = jnp.float32
    remat: str = "none"  # none, dots, full: what the backward pass makes again
    vocab_chunk: int = 8192

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference is in the loss or a metric."""
        return self.kl_loss_coef > 0 or self.kl_metric


def hidden_before(cfg: ModelConfig, loss: LossConfig, params: Params, batch: PackedBatch) -> jax.Array:
    """[R, T, D]: entry t is the hidden state of token t - 1, which predicts token t."""
    hidden = decoder.forward(
        cfg, params, batch.tokens, batch.positions, batch.segment_ids, dtype=loss.compute_dtype, remat=loss.remat
    )
    return jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))


def token_scores(cfg: ModelConfig, loss: LossConfig, shards: Shards, params: Params, batch: PackedBatch):
    """Log-prob of each trained token given those before it in its segment, and the entropy there: [R, T] float32,
    nats, 0 where loss_mask is."""
    return ops.token_logprobs(
        hidden_before(cfg, loss, params, batch), decoder.head_weight(cfg, params).astype(loss.compute_dtype),
        batch.tokens, batch.loss_mask, temperature=loss.temperature, softcap=cfg.logits_softcap,
        chunk=loss.vocab_chunk, groups=shards[0], shards=shards[1],
    )


def objective(cfg: ModelConfig, loss: LossConfig, shards: Shards, params: Params, batch: PackedBatch):
    """`policy_loss` as a function of the parameters."""
    return policy_loss(loss, batch, *token_scores(cfg, loss, shards, params, batch))


def policy_loss(loss: LossConfig, batch: PackedBatch, logp: jax.Array, entropy: jax.Array) -> tuple[jax.Array, Sums]:
    """The micro-batch's share of the step's loss, and sums for the metrics.

    loss = sum w * (correction * surrogate + kl_loss_coef * KL(policy, reference) - entropy_coef * entropy), over
    trained tokens. Corrections multiply the surrogate alone and are in no denominator.
    """
    mask = batch.loss_mask > 0
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "loss_weight")
    batch = batch.replace(**{name: jnp.where(mask, getattr(batch, name), 0.0) for name in names},
                          extras={name: jnp.where(mask, values, 0.0) for name, values in batch.extras.items()})
    logp, entropy = jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)
    if loss.old_logprobs == "self":
        batch = batch.replace(old_logprobs=jax.lax.stop_gradient(logp))
    missing = ~jnp.isfinite(batch.rollout_logprobs)  # a replayed rollout may lack some: they get the ratio 1
    batch = batch.replace(rollout_logprobs=jnp.where(missing, batch.old_logprobs, batch.rollout_logprobs))
    policy, tokenwise = surrogates.find(loss.surrogate)(loss, batch, logp)
    if loss.is_correction != "none":
        weights, found = surrogates.sampler_correction(loss, batch)
        policy, tokenwise = weights * policy, tokenwise | found
    if loss.opsm_delta > 0:
        kept, found = surrogates.on_policy_sequences(loss, batch, logp)
        policy, tokenwise = kept * policy, tokenwise | found
    weight = batch.loss_weight
    parts = {"pg_loss": (weight * policy).sum(), "entropy_loss": (weight * entropy).sum()}
    total = parts["pg_loss"] - loss.entropy_coef * parts["entropy_loss"]
    if loss.needs_reference:
        drawn_by = batch.old_logprobs if loss.kl_unbiased else None
        kl = losses.approx_kl(logp, batch.ref_logprobs, loss.kl_loss_type, old_logp=drawn_by)
        parts["kl_loss"] = (weight * jnp.where(mask, kl, 0.0)).sum()
        total += loss.kl_loss_coef * parts["kl_loss"]
    observed = jax.lax.stop_gradient(_observe(loss, mask, logp, batch, tokenwise, missing))
    return total, {**parts, "loss": total, **observed}


def _observe(loss: LossConfig, mask: jax.Array, logp: jax.Array, batch: PackedBatch, tokenwise: Sums,
             missing: jax.Array) -> Sums:
    """Sums over trained tokens of what the surrogate reports and of the distances between the log-probs."""
    sums = {"tokens": mask.sum().astype(jnp.float32)}
    if loss.surrogate != "sft":
        difference = jnp.abs(batch.old_logprobs - batch.rollout_logprobs)
        tokenwise = {**tokenwise, "ppo_kl": batch.old_logprobs - logp, "train_rollout_logprob_abs_diff": difference}
        sums[f"{MAX}train_rollout_logprob_abs_diff_max"] = difference.max()
        sums["missing_rollout_logprobs"] = missing.sum().astype(jnp.float32)
    return sums | {MEAN + name: jnp.where(mask, values, 0.0).sum() for name, values in tokenwise.items()}
