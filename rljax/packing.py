"""Stage 5 of 7: samples become rows of one length, rows become micro-batches of one shape; and the loss weights.

Everything here is numpy on the host. A row holds whole samples; what a row cannot tell the device any more, the
share of each token in the step's loss, is computed before, for all samples of the step (`loss_weights`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.types import PackedBatch

LOSS_MODES = ("sample_mean", "token_mean", "constant")
SEARCH_STEPS = 10_000_000  # of the exact search before it gives up: a few seconds
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


def _first_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """First-fit decreasing: the longest item first, each into the first part with room."""
    room = np.full(len(lengths) + 1, capacity)
    parts: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable"):
        part = int(np.argmax(room[: len(parts) + 1] >= lengths[index]))
        if part == len(parts):
            parts.append([])
        parts[part].append(int(index))
        room[part] -= lengths[index]
    return parts


def min_partitions(lengths: Sequence[int], capacity: int) -> int:
    """Parts that first-fit decreasing needs so that no part's sum exceeds capacity; at most 11/9 of the fewest + 1.

    Raises ValueError naming the length and the capacity where one item alone exceeds it.
    """
    array = np.asarray(lengths, np.int64)
    if array.max(initial=0) > capacity:
        raise ValueError(f"item {array.argmax()} has length {array.max()}: the capacity is {capacity}")
    return len(_first_fit(array, capacity))


def balanced_partitions(lengths: Sequence[int], num_partitions: int, capacity: int) -> list[list[int]]:
    """Splits items into num_partitions parts of about equal sums, none of them above capacity.

    Returns the indices of each part, ascending. No part is empty while there are at least as many items as parts;
    with fewer items every item is alone. Karmarkar-Karp; where its result exceeds the capacity, first-fit
    decreasing, then an exact search of at most SEARCH_STEPS steps. Raises ValueError naming num_partitions and
    capacity where no split holds (or, said so, where the search gave up).
    Karmarkar and Karp 1982, "The differencing method of set partitioning".
    """
    if num_partitions < 1:
        raise ValueError(f"num_partitions is {num_partitions} for {len(lengths)} items: at least 1")
    array = np.asarray(lengths, np.int64)
    total, longest = array.sum(), array.max(initial=0)
    what = f"{len(array)} items of {total} tokens into {num_partitions} parts of at most {capacity}"
    if longest > capacity or total > num_partitions * capacity:
        raise ValueError(f"no split of {what}: the longest item has {longest}")
    parts = _karmarkar_karp(array, num_partitions)
    if max((array[part].sum() for part in parts), default=0) > capacity:
        parts = _first_fit(array, capacity)
        if len(parts) > num_partitions:
            parts = _exact_split(array, num_partitions, capacity, what)
        parts = _fill_empty(parts, num_partitions, array)
    return [sorted(part) for part in parts]


def _karmarkar_karp(lengths: np.ndarray, num_partitions: int) -> list[list[int]]:
    """Largest differencing: of the two most uneven partial splits, the fullest parts meet the emptiest ones.

    A partial split is a list of (sum, size, items) in descending order, without its empty parts.
    """

    def entry(split: list[tuple[int, int, tuple[int, ...]]], order: int) -> tuple:
        emptiest = split[-1][0] if len(split) == num_partitions else 0
        return emptiest - split[0][0], order, split

    heap = [entry([(length, 1, (index,))], index) for index, length in enumerate(lengths.tolist())]
    heapq.heapify(heap)
    for order in range(len(lengths), 2 * len(lengths) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        overlap = max(0, len(first) + len(second) - num_partitions)
        alone = len(first) - overlap, len(second) - overlap
        pairs = zip(first[alone[0] :], second[: -overlap - 1 : -1])
        merged = first[: alone[0]] + second[: alone[1]] + [tuple(x + y for x, y in zip(a, b)) for a, b in pairs]
        merged.sort(key=lambda part: part[:2], reverse=True)
        heapq.heappush(heap, entry(merged, order))
    parts = [list(items) for _, _, items in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_partitions - len(parts))]


def _fill_empty(parts: list[list[int]], num_partitions: int, lengths: np.ndarray) -> list[list[int]]:
    """Brings the number of parts up to num_partitions: the fullest part with two items or more is halved each time."""
    heap = [(len(part) < 2, -int(lengths[part].sum()), part) for part in parts]
    heapq.heapify(heap)
    while len(heap) < num_partitions and heap and not heap[0][0]:
        part = np.array(heapq.heappop(heap)[2])
        for half in _karmarkar_karp(lengths[part], 2):
            heapq.heappush(heap, (len(half) < 2, -int(lengths[part[half]].sum()), part[half].tolist()))
    return [part for _, _, part in heap] + [[] for _ in range(num_partitions - len(heap))]


def _exact_split(lengths: np.ndarray, num_partitions: int, capacity: int, what: str) -> list[list[int]]:
    """A split into at most num_partitions parts within capacity, by depth-first search; raises if there is none.

    Bin completion: each part takes the longest item left, and then every maximal set of others that wastes no more
    than all the parts can waste together. Equal items are one size with a count, and what is left after some parts
    is tried once, so symmetric splits are not repeated. Korf 2002, "A new algorithm for optimal bin packing".
    """
    unit = max(1, int(np.gcd.reduce(lengths)))
    sizes, inverse, counts = np.unique(-lengths // unit, return_inverse=True, return_counts=True)
    sizes, capacity = (-sizes).tolist(), capacity // unit
    path, searches, seen, steps = [], [], set(), 0  # path: how many items of each size are left after 0, 1, ... parts
    if _lower_bound(sizes, counts.tolist(), capacity) <= num_partitions:
        path = [tuple(counts.tolist())]
        searches = [_completions(sizes, path[0], capacity, num_partitions)]
    while searches and any(path[-1]):
        left = next(searches[-1], None)
        steps += 1 if isinstance(left, int) else len(sizes)
        if steps > SEARCH_STEPS:
            raise ValueError(f"found no split of {what} in {SEARCH_STEPS} steps: more parts or a larger capacity help")
        if left is None:
            searches.pop()
            path.pop()
        elif not isinstance(left, int):
            parts_left = num_partitions - len(path)
            if (left, parts_left) not in seen and _lower_bound(sizes, left, capacity) <= parts_left:
                seen.add((left, parts_left))
                path.append(left)
                searches.append(_completions(sizes, left, capacity, parts_left))
    if not path:
        raise ValueError(f"no split of {what}: an exhaustive search found none")
    pools = [np.flatnonzero(inverse.reshape(-1) == size).tolist() for size in range(len(sizes))]
    taken = [np.subtract(before, after) for before, after in zip(path, path[1:])]
    return [[pool.pop() for pool, count in zip(pools, part) for _ in range(count)] for part in taken]


def _completions(
    sizes: list[int], counts: tuple[int, ...], capacity: int, parts_left: int
) -> Iterator[tuple[int, ...] | int]:
    """The counts left after each way to fill one part that holds the largest item left; a 0 between marks a step.

    sizes descend. Fuller parts of larger items come first. A part is maximal (no item left fits into its room), and
    leaves no more room than the slack of all parts together.
    """
    largest = next(index for index, count in enumerate(counts) if count)
    left = list(counts)
    left[largest] -= 1
    room = capacity - sizes[largest]
    slack = parts_left * capacity - sum(size * count for size, count in zip(sizes, counts))
    if room and room in sizes and left[sizes.index(room)]:  # an exact fit by one item is never worse than by several
        left[sizes.index(room)] -= 1
        yield tuple(left)
        return
    reachable = _reachable_sums(sizes, left, room)
    stack = [(largest, room, slack, ())]
    while stack:
        index, room, slack, taken = stack.pop()
        yield 0
        while index < len(sizes) and (sizes[index] > room or not left[index]):
            index += 1
        if index == len(sizes):
            rest = list(left)
            for size, count in taken:
                rest[size] -= count
            yield tuple(rest)
            continue
        fitting = min(left[index], room // sizes[index]) if sizes[index] else left[index]
        for count in range(fitting + 1):
            room_then = room - count * sizes[index]
            # If an item of this size stays behind, the part is maximal only where it would not fit.
            slack_then = slack if count == left[index] else min(slack, sizes[index] - 1)
            lowest = max(room_then - slack_then, 0)
            if slack_then >= 0 and (reachable[index + 1] >> lowest) & ((2 << (room_then - lowest)) - 1):
                stack.append((index + 1, room_then, slack_then, (*taken, (index, count)) if count else taken))


def _reachable_sums(sizes: list[int], counts: list[int], limit: int) -> list[int]:
    """Entry i has bit b set if some items of sizes[i:] sum to b <= limit; all bits where limit makes that too long."""
    if limit > 1 << 16:
        return [-1] * (len(sizes) + 1)
    everything = (2 << limit) - 1
    reachable = [1]
    for size, count in zip(reversed(sizes), reversed(counts)):
        bits = reachable[-1]
        for _ in range(min(count, limit // max(size, 1))):
            bits |= (bits << size) & everything
        reachable.append(bits)
    return reachable[::-1]


def _lower_bound(sizes: list[int], counts: tuple[int, ...], capacity: int) -> int:
    """Parts needed at least: items above half are alone, and what is too large to join them needs more.

    L2 of Martello and Toth 1990, "Knapsack Problems", section 8.3. sizes descend.
    """
    large = [(size, count) for size, count in zip(sizes, counts) if count and 2 * size > capacity]
    bound = alone = sum(count for _, count in large)
    small_tokens, room = 0, 0
    for size, count in zip(sizes, counts):
        if count and 2 * size <= capacity:
            small_tokens += size * count
            while large and large[-1][0] + size <= capacity:
                joined, number = large.pop()
                room += number * (capacity - joined)
            bound = max(bound, alone + -(-(small_tokens - room) // capacity))
    return bound


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
