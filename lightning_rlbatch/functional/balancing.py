"""Split weighted samples into parts of nearly equal weight."""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from lightning_rlbatch.functional.workload import IntArray, Integers, to_int64

Part = tuple[int, int, list[int]]  # weight, number of samples, sample indices


def check_num_parts(num_parts: int) -> None:
    """Raise unless ``num_parts`` is a positive int."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int | np.integer):
        raise TypeError(f"`num_parts` must be an int but got {num_parts!r}.")
    if num_parts < 1:
        raise ValueError(f"`num_parts` must be at least 1 but got {num_parts}.")


def karmarkar_karp(weights: Integers, num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition by the largest differencing method.

    Start with one partial partition per sample (with ``equal_size``, per ``num_parts`` samples neighbouring in sorted order), and
    merge the two whose spread (heaviest minus lightest part) is largest, heaviest part onto lightest, until one is left.
    `balanced_partition` is better and faster; this one is the baseline that other frameworks use.

    Args:
        weights: ``[N]``, integers, at least 0.
        num_parts: Number of parts; it may exceed N, which leaves parts empty.
        equal_size: Sizes of parts differ by at most one.

    Returns:
        ``num_parts`` lists of indices, heaviest part first.

    Raises:
        TypeError: The weights are not integers.
        ValueError: A weight is negative, or ``num_parts`` is not positive.

    Source:
        Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982); with equal sizes: Michiels, Korst, Aarts and
        van Leeuwen, "Performance Ratios for the Differencing Method Applied to the Balanced Number Partitioning Problem"
        (2003). Ties are broken as verl does, so that part sums agree with it.

    Example:
        >>> karmarkar_karp([8, 7, 6, 5, 4], 2)
        [[1, 3, 4], [0, 2]]
    """
    check_num_parts(num_parts)
    values = to_int64(weights, "weights").tolist()
    ascending = sorted(range(len(values)), key=lambda i: (values[i], i))
    width = num_parts if equal_size else 1
    short = len(values) % width  # the lightest row takes the remainder
    rows = ([ascending[:short]] if short else []) + [ascending[i : i + width] for i in range(short, len(values), width)]
    heap = [_keyed(sorted(((values[i], 1, [i]) for i in row), reverse=True), num_parts) for row in rows]
    heapify(heap)
    while len(heap) > 1:
        first, second = heappop(heap)[-1], heappop(heap)[-1]
        heappush(heap, _keyed(_merged(first, second, num_parts), num_parts))
    parts = heap[0][-1] if heap else []
    return [sorted(part[2]) for part in parts] + [[] for _ in range(num_parts - len(parts))]


def _keyed(parts: list[Part], num_parts: int) -> tuple[int, int, int, list[int], list[Part]]:
    """Put the sort key in front of a partial partition: largest spread first, then heaviest first part."""
    lightest = parts[-1][0] if len(parts) == num_parts else 0
    weight, size, members = parts[0]
    return lightest - weight, -weight, -size, [-i for i in members], parts


def _merged(first: list[Part], second: list[Part], num_parts: int) -> list[Part]:
    """Join the i-th heaviest part of one with the i-th lightest of the other; empty parts are implied at the end of both."""
    overlap = max(0, len(first) + len(second) - num_parts)
    kept = len(first) - overlap
    joined = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(first[kept:], reversed(second[len(second) - overlap :]))]
    return sorted(first[:kept] + second[: len(second) - overlap] + joined, reverse=True)


def balanced_partition(weights: Integers, num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition so that the heaviest part is as light as we can make it.

    Args:
        weights: ``[N]``, integers, at least 0.
        num_parts: Number of parts; it may exceed N, which leaves parts empty.
        equal_size: Sizes of parts differ by at most one (they are N / num_parts rounded down or up).

    Returns:
        ``num_parts`` lists of ascending indices, heaviest part first.

    Raises:
        TypeError: The weights are not integers.
        ValueError: A weight is negative, or ``num_parts`` is not positive.

    Example:
        >>> balanced_partition([9, 5, 4, 3, 3], 2)
        [[0, 3], [1, 2, 4]]
    """
    check_num_parts(num_parts)
    values = to_int64(weights, "weights")
    parts = _longest_first(values, num_parts, equal_size)
    return [sorted(part) for part in sorted(parts, key=lambda part: (-int(values[part].sum()), min(part, default=len(values))))]


def _longest_first(values: IntArray, num_parts: int, equal_size: bool) -> list[list[int]]:
    """Give the heaviest remaining sample to the lightest part that is not yet full (LPT)."""
    order = np.argsort(-values, kind="stable").tolist()
    floor, num_larger = divmod(len(order), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    weights = values.tolist()
    heap = [(0, p) for p in range(num_parts)]
    for i in order:
        load, p = heap[0]
        parts[p].append(i)
        size = len(parts[p])
        if equal_size and size > floor:
            num_larger -= 1
        if equal_size and (size > floor or (size == floor and num_larger == 0)):
            heappop(heap)
        else:
            heapreplace(heap, (load + weights[i], p))
        if equal_size and size > floor and num_larger == 0:
            heap = [(load, p) for load, p in heap if len(parts[p]) < floor]
            heapify(heap)
    return parts
