"""Fill the grid of ranks and micro-steps under a token cap, planned as a whole.

A unit is one sample, or a group of samples that stays together. A bucket is the list of units of one micro-batch. A row is one
micro-step: ``dp_size`` buckets, of which every rank runs one while the others wait for the slowest.
"""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from lightning_rlbatch.functional.workload import IntArray

Bucket = list[int]


def fewest_rows(tokens: IntArray, dp_size: int, budget: int) -> int:
    """Return a lower bound on the number of micro-steps.

    The tokens must fit, and so must the units longer than half the budget, of which a bucket holds one.

    Args:
        tokens: ``[U]``, int64, tokens per unit; more than the budget counts as the budget.
        dp_size: Buckets per row.
        budget: Most tokens of a bucket.

    Returns:
        At least 1.

    Example:
        >>> fewest_rows(np.array([5, 5, 5]), 1, 8)
        3
    """
    total = int(np.minimum(tokens, budget).sum())
    num_long = int((2 * tokens > budget).sum())
    return max(1, -(-total // (dp_size * budget)), -(-num_long // dp_size))


def plan_rows(tokens: IntArray, work: IntArray, dp_size: int, budget: int, num_rows: int, multiple: int) -> list[list[Bucket]]:
    """Plan the smallest grid of at least ``num_rows`` micro-steps that holds all units.

    Args:
        tokens: ``[U]``, int64, tokens per unit; a unit above the budget gets a bucket for itself.
        work: ``[U]``, int64, workload per unit.
        dp_size: Buckets per row.
        budget: Most tokens of a bucket.
        num_rows: First number of rows to try, a multiple of ``multiple``.
        multiple: Step by which the number of rows grows until everything fits.

    Returns:
        Rows of ``dp_size`` buckets, heaviest row first.
    """
    k = num_rows
    while (buckets := fill_buckets(tokens, work, k * dp_size, budget)) is None:
        k += multiple
    return group_rows(buckets, [sum(work[b].tolist()) for b in buckets], dp_size)


def fill_buckets(tokens: IntArray, work: IntArray, num_buckets: int, budget: int) -> list[Bucket] | None:
    """Give the heaviest remaining unit to the lightest bucket with room (LPT under a token cap).

    Args:
        tokens: ``[U]``, int64, tokens per unit.
        work: ``[U]``, int64, workload per unit.
        num_buckets: Buckets to fill.
        budget: Most tokens of a bucket that holds more than one unit.

    Returns:
        ``num_buckets`` buckets, or None if some unit found no room.
    """
    order = np.argsort(-work, kind="stable").tolist()
    size, weight = tokens.tolist(), work.tolist()
    buckets: list[Bucket] = [[i] for i in order[:num_buckets]] + [[] for _ in range(num_buckets - len(order))]
    free = [budget - size[i] for i in order[:num_buckets]] + [budget] * (num_buckets - len(order))
    heap = [(weight[i], b) for b, i in enumerate(order[:num_buckets]) if free[b] >= 0]
    heapify(heap)
    parked: list[tuple[int, int, int]] = []  # (-free, bucket, load): too full for a longer unit, perhaps not for a shorter one
    for i in order[num_buckets:]:
        while parked and -parked[0][0] >= size[i]:
            _, b, load = heappop(parked)
            heappush(heap, (load, b))
        while heap and free[heap[0][1]] < size[i]:
            load, b = heappop(heap)
            heappush(parked, (-free[b], b, load))
        if not heap:
            return None
        load, b = heap[0]
        buckets[b].append(i)
        free[b] -= size[i]
        heapreplace(heap, (load + weight[i], b))
    return buckets


def group_rows(buckets: list[Bucket], load: list[int], dp_size: int) -> list[list[Bucket]]:
    """Sort buckets by workload and make every ``dp_size`` consecutive ones a row.

    For given buckets no other grouping has a smaller sum of row maxima, and the waste of the whole step, sum of (row maximum - row
    mean), is less than the difference between the heaviest and the lightest bucket.

    Args:
        buckets: A multiple of ``dp_size`` buckets.
        load: Workload of every bucket.
        dp_size: Buckets per row.

    Returns:
        Rows of ``dp_size`` buckets, heaviest first.
    """
    order = sorted(range(len(buckets)), key=lambda b: (-load[b], -len(buckets[b]), b))
    return [[buckets[b] for b in order[start : start + dp_size]] for start in range(0, len(order), dp_size)]


def deal_rows(rows: list[list[Bucket]]) -> list[list[Bucket]]:
    """Choose the rank of every bucket so that ranks get similar numbers of units, which is free within a row.

    Args:
        rows: Rows of ``dp_size`` buckets.

    Returns:
        ``[dp_size][rows]`` buckets.
    """
    ranks: list[list[Bucket]] = [[] for _ in rows[0]]
    count = [0] * len(ranks)
    for row in rows:
        fewest_first = sorted(range(len(ranks)), key=lambda r: (count[r], r))
        for r, bucket in zip(fewest_first, sorted(row, key=lambda b: (-len(b), b))):
            ranks[r].append(bucket)
            count[r] += len(bucket)
    return ranks
