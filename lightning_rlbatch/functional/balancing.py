"""Split weighted samples into parts of nearly equal weight."""

from heapq import heapify, heappop, heappush

import numpy as np

from lightning_rlbatch.functional.bounds import equal_partition_bound, free_partition_bound
from lightning_rlbatch.functional.exchange import Exchange, level, settle
from lightning_rlbatch.functional.partition_starts import difference_rows, isolate_outliers, longest_first, to_matrix
from lightning_rlbatch.functional.workload import IntArray, Integers, to_int64

FEW_PER_PART = 16  # with more samples per part, exchanges of single samples reach the bound
FINE = 2e-5
TINY = 128  # samples up to which random restarts are affordable
KICKS = 20
MAX_ROUNDS = 40
MAX_STEPS = 60
MAX_CELLS = 2_000_000

Part = tuple[int, int, list[int]]  # weight, number of samples, sample indices


def check_num_parts(num_parts: int) -> None:
    """Raise unless ``num_parts`` is a positive int.

    Raises:
        TypeError: It is no int.
        ValueError: It is below 1.
    """
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


def balanced_partition(weights: Integers, num_parts: int, *, equal_size: bool = False, tolerance: float = 5e-4) -> list[list[int]]:
    """Partition so that the heaviest part is as light as we can make it.

    Balanced differencing or longest-first as a start, then exchanges of one sample between pairs of parts until the heaviest is within
    2e-5 of a lower bound. With 16 samples per part or fewer a stronger bound and exchanges of up to three samples follow, until the
    heaviest is within ``tolerance`` of it. No randomness, no clock: equal input gives equal output.

    Args:
        weights: ``[N]``, integers, at least 0.
        num_parts: Number of parts; it may exceed N, which leaves parts empty.
        equal_size: Sizes of parts differ by at most one (they are N / num_parts rounded down or up).
        tolerance: Relative distance to the lower bound at which the slow search for few samples per part stops.

    Returns:
        ``num_parts`` lists of ascending indices, heaviest part first.

    Raises:
        TypeError: The weights are not integers.
        ValueError: A weight is negative, or ``num_parts`` is not positive.

    Source:
        Zhang, Mouratidis and Pang, "Heuristic Algorithms for Balanced Multi-Way Number Partitioning" (2011) on why differencing alone
        fails on skewed weights; the exchange rounds are our own.

    Example:
        >>> balanced_partition([9, 5, 4, 3, 3], 2)
        [[0, 3], [1, 2, 4]]
    """
    check_num_parts(num_parts)
    values = to_int64(weights, "weights")
    if not len(values):
        return [[] for _ in range(num_parts)]
    members = _equal_members(values, num_parts, tolerance) if equal_size else _free_members(values, num_parts, tolerance)
    members = np.sort(members, axis=1)
    loads = np.append(values, 0)[members].sum(axis=1)
    parts = members[np.lexsort((members[:, 0], -loads))].tolist()
    sizes = (members < len(values)).sum(axis=1)[np.lexsort((members[:, 0], -loads))].tolist()
    return [part[:size] for part, size in zip(parts, sizes)]


def _equal_members(values: IntArray, num_parts: int, tolerance: float) -> IntArray:
    if len(values) <= FEW_PER_PART * num_parts:
        return _few_per_part(values, num_parts, True, tolerance)
    outliers = isolate_outliers(values, num_parts)
    open_samples = np.ones(len(values), dtype=np.bool_)
    open_samples[[i for part in outliers for i in part]] = False
    rest = np.flatnonzero(open_samples)
    heaviest = max((int(values[part].sum()) for part in outliers), default=0)
    inner = _many_per_part(values[rest], num_parts - len(outliers), heaviest)
    width = max(inner.shape[1], max(map(len, outliers), default=0))
    members = np.full((num_parts, width), len(values), dtype=np.int64)
    members[: len(inner), : inner.shape[1]] = np.append(rest, len(values))[inner]
    for row, part in enumerate(outliers, start=len(inner)):
        members[row, : len(part)] = part
    return members


def _many_per_part(values: IntArray, num_parts: int, heaviest_elsewhere: int) -> IntArray:
    bound = equal_partition_bound(values, num_parts, strong=False)
    target = max(heaviest_elsewhere, _within(bound, FINE))
    goal = np.full(num_parts, target)
    padded = np.append(values, 0)
    search = Exchange(padded, difference_rows(values, num_parts), equal_size=True)
    level(search, goal, MAX_ROUNDS)
    if int(search.load.max()) <= target:
        return search.members
    other = Exchange(padded, to_matrix(longest_first(values, num_parts, True), len(values)), equal_size=True)
    level(other, goal, MAX_ROUNDS)
    best = min((search, other), key=lambda s: int(s.load.max()))
    settle(best, goal, (1,), MAX_STEPS)
    return best.members


def _few_per_part(values: IntArray, num_parts: int, equal_size: bool, tolerance: float) -> IntArray:
    """Search with exchanges of several samples; with free sizes a spare dummy per row turns exchanges into moves."""
    padded = np.append(values, 0)
    bound = equal_partition_bound(values, num_parts, strong=False) if equal_size else free_partition_bound(values, num_parts)
    start = to_matrix(longest_first(values, num_parts, equal_size), len(values), extra=0 if equal_size else 1)
    search = Exchange(padded, start, equal_size)
    level(search, np.full(num_parts, _within(bound, FINE)), 2)
    if int(search.load.max()) > _within(bound, FINE) and equal_size:
        bound = equal_partition_bound(values, num_parts)
    target = _within(bound, tolerance)
    sizes = (1, 2, 3)[: min(start.shape[1], 1 if start.shape[1] > 2 * FEW_PER_PART else 3)]
    settle(search, np.full(num_parts, target), sizes, MAX_STEPS)
    if len(values) <= TINY and num_parts > 1:
        _restart(search, target, sizes)
    return search.members


def _restart(search: Exchange, target: int, sizes: tuple[int, ...]) -> None:
    """Leave a local optimum of a small instance by random swaps (fixed seed), settle again, and keep what is no worse."""
    generator = np.random.default_rng(0)
    rows, columns = search.members.shape
    for _ in range(KICKS):
        worst = int(search.load.max())
        if worst <= target:
            return
        kept = search.members.copy()
        for _ in range(3):
            a, b = generator.choice(rows, 2, replace=False)
            i, j = generator.integers(columns, size=2)
            search.members[a, i], search.members[b, j] = search.members[b, j], search.members[a, i]
        if search.equal_size and int((search.members == search.dummy).sum(axis=1).max()) > 1:
            search.reset(kept)
            continue
        search.reset(search.members)
        settle(search, np.full(rows, target), sizes, MAX_STEPS)
        if int(search.load.max()) > worst:
            search.reset(kept)


def _free_members(values: IntArray, num_parts: int, tolerance: float) -> IntArray:
    if len(values) <= FEW_PER_PART * num_parts:
        return _few_per_part(values, num_parts, False, tolerance)
    target = _within(free_partition_bound(values, num_parts), FINE)
    parts = longest_first(values, num_parts, False)
    members = to_matrix(parts, len(values), extra=1)
    if members.size > 4 * len(values) + MAX_CELLS:
        return members  # a few parts hold nearly all samples, of next to no weight: nothing to gain, and no room for the matrix
    search = Exchange(np.append(values, 0), members, equal_size=False)
    goal = np.full(num_parts, target)
    level(search, goal, MAX_ROUNDS)
    settle(search, goal, (1,), MAX_STEPS)
    return search.members


def _within(bound: int, tolerance: float) -> int:
    return bound + int(bound * tolerance)
