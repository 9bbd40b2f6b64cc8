"""Stage 5 of 7: samples become rows of one length, rows become micro-batches of one shape; and the loss weights.

Everything here is numpy on the host. A row holds whole samples; what a row cannot tell the device any more, the
share of each token in the step's loss, is computed before, for all samples of the step (`loss_weights`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from rljax.partition import balanced_partitions, min_partitions
from rljax.types import PackedBatch

LOSS_MODES = ("sample_mean", "token_mean", "constant")
RESPONSE_FIELDS = ("loss_mask", "loss_weight", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
INTEGER_FIELDS = ("tokens", "positions", "segment_ids", "sample_index", "loss_mask")


@dataclasses.dataclass(frozen=True)
class PackItem:
    """One sample to pack: n tokens, of which the first prompt_len are the prompt; the rest are the response [m]."""

    tokens: np.ndarray  # [n] int, prompt and response
    prompt_len: int  # at least 1: the first token of a segment cannot be trained
    loss_mask: np.ndarray  # [m] 0/1
    loss_weight: np.ndarray  # [m], from `loss_weights`
    advantages: np.ndarray  # [m]
    old_logprobs: np.ndarray  # [m] nats
    ref_logprobs: np.ndarray  # [m] nats
    rollout_logprobs: np.ndarray  # [m] nats
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # each [m]; the same keys in all samples


def split_updates(n: int, global_batch_size: int) -> list[range]:
    """The samples of each update of a rollout: contiguous, in order, the last one smaller if need be.

    n samples; n = 6 by 4 gives sizes 4 and 2. Raises ValueError for a global_batch_size below 1.
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size is {global_batch_size} for {n} samples: at least 1")
    return [range(start, min(start + global_batch_size, n)) for start in range(0, n, global_batch_size)]


def loss_weights(loss_masks: Sequence[Sequence[int]], mode: str, length: int | None = None) -> list[np.ndarray]:
    """The weight of every response token in the loss of a whole step, which is sum(weight * token_loss).

        sample_mean  1 / trainable tokens of the sample / samples
        token_mean   1 / trainable tokens of the step
        constant     1 / length / samples                             (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)

    loss_masks: all samples of the step, 0/1 each. Returns one [len] float32 array for each, 0 under the mask. A
    sample with nothing to train is not counted among the samples; a step with nothing to train gets zeros.
    Raises ValueError for an unknown mode, for a mask that is not 0/1, and in mode constant without a length >= 1.
    """
    if mode not in LOSS_MODES:
        raise ValueError(f"unknown loss aggregation {mode!r}: one of {', '.join(LOSS_MODES)}")
    if mode == "constant" and not (length is not None and length >= 1):
        raise ValueError(f"loss aggregation 'constant' needs a length of at least 1, got {length}")
    masks = [np.asarray(mask, np.float64) for mask in loss_masks]
    for index, mask in enumerate(masks):
        if not np.isin(mask, (0.0, 1.0)).all():
            raise ValueError(f"sample {index}: the loss mask holds {mask[~np.isin(mask, (0, 1))][0]}: only 0 and 1")
    tokens = [mask.sum() for mask in masks]
    samples, total = sum(count > 0 for count in tokens), sum(tokens)
    if mode == "sample_mean":
        scales = [1.0 / (max(count, 1.0) * max(samples, 1)) for count in tokens]
    else:
        scale = 1.0 / max(total, 1.0) if mode == "token_mean" else 1.0 / (length * max(samples, 1))
        scales = [scale] * len(masks)
    return [(mask * scale).astype(np.float32) for mask, scale in zip(masks, scales)]


def pack(
    samples: Sequence[PackItem], *, buckets: tuple[int, ...], max_tokens_per_device: int, data_shards: int
) -> list[PackedBatch]:
    """Packs a step's samples into micro-batches of one shape [R, T]; each sample once, whole, in one row.

    T is the smallest bucket that holds the longest sample. R is data_shards times the rows of one shard, which are
    at most max(1, max_tokens_per_device // T) and as few as the samples need, rounded up to an eighth of that
    maximum or to a power of two, whichever is less, so that few shapes are compiled. Shard d holds rows
    d R / data_shards and following. There are as many micro-batches as
    first-fit decreasing needs, and samples are spread evenly over them, their shards and those shards' rows.
    Returns numpy arrays, int32 and float32; `sample_index` is the index into `samples`. Where loss_mask is 0,
    weight and advantage are 0, and so is what is not finite. No samples give no micro-batches.
    Raises ValueError for a sample longer than the largest bucket, naming both, for arrays of a sample whose lengths
    disagree, for extras that only some samples have, and for a sample without a prompt.
    """
    if not samples:
        return []
    if max_tokens_per_device < 1 or data_shards < 1:
        raise ValueError(f"max_tokens_per_device {max_tokens_per_device} and data_shards {data_shards}: at least 1")
    for index, sample in enumerate(samples):
        _check_item(index, sample, samples[0].extras)
    lengths = [len(sample.tokens) for sample in samples]
    row_length = _bucket(lengths, buckets)
    fewest_rows = min_partitions(lengths, row_length)
    most_rows = max(1, max_tokens_per_device // row_length)
    micro_batches = -(-fewest_rows // (most_rows * data_shards))
    cells = micro_batches * data_shards  # a cell is one shard's rows of one micro-batch
    used_rows = -(-fewest_rows // cells)
    grain = max(1, most_rows // 8)
    shard_rows = min(most_rows, 1 << (used_rows - 1).bit_length(), -(-used_rows // grain) * grain)
    rows = balanced_partitions(lengths, min(len(samples), cells * used_rows), row_length)
    ordered = _spread_rows(rows, lengths, cells, used_rows, shard_rows)
    step = shard_rows * data_shards
    return [_fill(samples, ordered[first : first + step], row_length) for first in range(0, len(ordered), step)]


def _bucket(lengths: list[int], buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds the longest sample."""
    if not buckets or max(lengths) > max(buckets):
        raise ValueError(
            f"sample {int(np.argmax(lengths))} has {max(lengths)} tokens: "
            f"the largest length bucket is {max(buckets, default=0)}"
        )
    return min(bucket for bucket in buckets if bucket >= max(lengths))


def _check_item(index: int, sample: PackItem, extras: dict[str, np.ndarray]) -> None:
    """Raises ValueError naming the field of sample `index` that does not fit its tokens."""
    response = len(sample.tokens) - sample.prompt_len
    if sample.prompt_len < 1 or response < 0:
        raise ValueError(
            f"sample {index}: prompt_len is {sample.prompt_len} of {len(sample.tokens)} tokens: "
            "at least 1 (a first token has no log-prob) and at most all"
        )
    if sample.extras.keys() != extras.keys():
        raise ValueError(f"sample {index} has extras {sorted(sample.extras)}, sample 0 has {sorted(extras)}")
    fields = {name: getattr(sample, name) for name in RESPONSE_FIELDS}
    for name, values in [*fields.items(), *sample.extras.items()]:
        if len(values) != response:
            raise ValueError(f"sample {index}: {name} has {len(values)} entries for {response} response tokens")


def _spread_rows(
    rows: list[list[int]], lengths: list[int], cells: int, used_rows: int, cell_rows: int
) -> list[list[int]]:
    """All rows of all cells in order: the fullest row first, each to the emptiest cell with fewer than used_rows.

    Each cell is padded to cell_rows with empty rows. Cells descend by their tokens, so that the shards of one
    micro-batch, which wait for each other, hold about the same.
    """
    sums = [sum(lengths[index] for index in row) for row in rows]
    heap: list[tuple[int, int, list[list[int]]]] = [(0, cell, []) for cell in range(cells)]
    full = []
    for place in sorted(range(len(rows)), key=lambda place: -sums[place]):
        tokens, cell, members = heapq.heappop(heap)
        members.append(rows[place])
        target = full if len(members) == used_rows else heap
        heapq.heappush(target, (tokens + sums[place], cell, members))
    in_order = sorted(full + heap, key=lambda entry: (-entry[0], entry[1]))
    return [row for _, _, members in in_order for row in members + [[]] * (cell_rows - len(members))]


def _fill(samples: Sequence[PackItem], rows: list[list[int]], row_length: int) -> PackedBatch:
    """One micro-batch from the sample indices of its rows."""
    shape = (len(rows), row_length)
    integers = {name: np.zeros(shape, np.int32) for name in INTEGER_FIELDS}
    floats = {name: np.zeros(shape, np.float32) for name in RESPONSE_FIELDS if name not in integers}
    extras = {name: np.zeros(shape, np.float32) for name in samples[0].extras}
    integers["sample_index"][:] = -1
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, start=1):
            sample = samples[index]
            stop = start + len(sample.tokens)
            integers["tokens"][row, start:stop] = sample.tokens
            integers["positions"][row, start:stop] = np.arange(stop - start)
            integers["segment_ids"][row, start:stop] = segment
            integers["sample_index"][row, start:stop] = index
            response = slice(start + sample.prompt_len, stop)
            integers["loss_mask"][row, response] = sample.loss_mask
            for name, array in floats.items():
                array[row, response] = getattr(sample, name)
            for name, array in extras.items():
                array[row, response] = sample.extras[name]
            start = stop
    masked = integers["loss_mask"] == 0
    for name, array in (*floats.items(), *extras.items()):
        array[masked if name in ("loss_weight", "advantages") else masked & ~np.isfinite(array)] = 0.0
    return PackedBatch(**integers, **floats, extras=extras)


def unpack(
    batches: Sequence[PackedBatch], values: Sequence[np.ndarray], samples: Sequence[PackItem]
) -> list[np.ndarray]:
    """What `pack` does to a per-token array, undone: for each sample, in order, its response tokens' values [m].

    values: one [R, T] array for each of batches, which `pack` made of samples. Raises ValueError where numbers or
    shapes disagree.
    """
    shapes = [np.shape(array) for array in values], [np.shape(batch.tokens) for batch in batches]
    if shapes[0] != shapes[1]:
        raise ValueError(f"values of shapes {shapes[0]} for micro-batches of shapes {shapes[1]}")
    lengths = [len(sample.tokens) for sample in samples]
    index = np.concatenate([np.zeros(0, np.int32), *(np.ravel(batch.sample_index) for batch in batches)])
    if np.count_nonzero(index >= 0) != sum(lengths):
        raise ValueError(f"the micro-batches hold {np.count_nonzero(index >= 0)} tokens, the samples {sum(lengths)}")
    if not samples:
        return []
    flat = np.concatenate([np.ravel(array) for array in values])
    order = np.argsort(index, kind="stable")[index.size - sum(lengths) :]
    pieces = np.split(flat[order], np.cumsum(lengths)[:-1])
    return [piece[sample.prompt_len :] for piece, sample in zip(pieces, samples)]
