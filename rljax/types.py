"""The values that live on devices: `PackedBatch` and `TrainState`. The dimension legend stands in `sample.py`."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

Params = dict[str, Any]  # a plain nested dict; per-layer leaves are stacked [L, ...]


@flax.struct.dataclass
class PackedBatch:
    """One micro-batch of packed rows; every array is [R, T] and index t holds what belongs to token t.

    The first token of a segment has no log-prob: its entries are 0 and its loss_mask is 0. Padding has
    segment_id 0, sample_index -1 and 0 everywhere else. Log-probs are natural logarithms (nats).
    """

    tokens: jax.Array  # int32
    positions: jax.Array  # int32, restart at 0 in every segment
    segment_ids: jax.Array  # int32, 1, 2, ... within a row; 0 = padding
    sample_index: jax.Array  # int32, index into the step's list of samples; -1 = padding
    loss_mask: jax.Array  # int32, 1 = trained
    loss_weight: jax.Array  # float32: the step's loss is sum(loss_weight * token_loss)
    advantages: jax.Array  # float32
    old_logprobs: jax.Array  # float32, by the trainer before the rollout's first update
    ref_logprobs: jax.Array  # float32, by the reference
    rollout_logprobs: jax.Array  # float32, by the sampler
    extras: dict[str, jax.Array] = flax.struct.field(default_factory=dict)  # float32, from hooks


@flax.struct.dataclass
class TrainState:
    """What one update reads and writes; donated to the update."""

    step: jax.Array  # int32 scalar: updates applied, skipped ones not counted
    params: Params  # float32 master weights
    opt_state: Any  # optax state, float32 moments, sharded like params
    nonfinite: jax.Array  # int32 scalar: skipped updates in a row
