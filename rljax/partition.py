"""Items into parts of about equal sums within a capacity: the search behind `packing.pack`. Host only, numpy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

SEARCH_STEPS = 10_000_000  # of the exact search before it gives up: a few seconds


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
