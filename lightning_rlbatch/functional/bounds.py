"""Lower bounds that no partition and no plan can beat; they tell a search when to stop and a user what is left to gain."""

import numpy as np

from lightning_rlbatch.functional.workload import IntArray


def free_partition_bound(weights: IntArray, num_parts: int) -> int:
    """Bound the heaviest part when parts may hold any number of samples.

    The largest of: the mean; the heaviest sample; for every j, the ``j + 1`` lightest of the ``j * num_parts + 1`` heaviest
    samples, because some part holds so many of them.

    Args:
        weights: ``[N]``, int64, at least 0.
        num_parts: Number of parts.

    Returns:
        An integer that the heaviest part of every partition reaches.

    Source:
        Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem" (1990), section 2, for the machine form.

    Example:
        >>> free_partition_bound(np.array([5, 5, 5]), 2)
        10
    """
    ordered = np.sort(weights)[::-1]
    prefix = np.concatenate([np.zeros(1, np.int64), np.cumsum(ordered)])
    if not len(ordered):
        return 0
    j = np.arange((len(ordered) - 1) // num_parts + 1)
    crowded = prefix[j * num_parts + 1] - prefix[j * num_parts - j]
    return max(-(-int(prefix[-1]) // num_parts), int(crowded.max()))


def equal_partition_bound(weights: IntArray, num_parts: int, *, strong: bool = True) -> int:
    """Bound the heaviest part when sizes of parts differ by at most one.

    Beside the mean, pigeonholes: of the ``t * k + r`` heaviest samples, more than t lie in each of q parts, ``q >= r / (m - t)``, and these
    parts hold at least ``max(r, q) + t * q`` of them; with the lightest samples to fill up to size, their mean bounds the heaviest. The
    smallest over q and the largest over t and r is the bound. k is the number of parts, m the larger size.

    Args:
        weights: ``[N]``, int64, at least 0.
        num_parts: Number of parts.
        strong: False tries one part only (q = 1), in O(N).

    Returns:
        An integer that the heaviest part of every such partition reaches.

    Example:
        >>> equal_partition_bound(np.array([9, 1, 1, 1]), 2)
        10
    """
    n, k = len(weights), num_parts
    if not n:
        return 0
    ordered = np.sort(weights)[::-1]
    prefix = np.concatenate([np.zeros(1, np.int64), np.cumsum(ordered)])
    light = prefix[-1] - prefix[::-1]  # light[c] = sum of the c lightest
    floor, larger = n // k, -(-n // k)
    j = np.arange((n - 1) // k + 1)
    single = prefix[j * k + 1] - prefix[j * k - j] + light[np.maximum(floor - j - 1, 0)]
    best = max(-(-int(prefix[-1]) // k), int(single.max()))
    if not strong:
        return best
    q = np.arange(1, k + 1)
    for t in range(larger):
        r = np.arange(1, min(k, n - t * k) + 1)[:, None]
        held = np.minimum(np.maximum(r, q) + t * q, t * k + r)
        filled = np.maximum(q * floor - held, 0)
        total = prefix[t * k + r] - prefix[t * k + r - held] + light[np.minimum(filled, n)]
        means = -(-total // q)
        means[(q * (larger - t) < r) | (q * (t + 1) > t * k + r)] = np.iinfo(np.int64).max
        best = max(best, int(means.min(axis=1).max()))
    return best


def step_workload_bound(tokens: IntArray, work: IntArray, dp_size: int, budget: int) -> int:
    """Bound the sum over micro-steps of the slowest rank's workload, for any number of micro-steps.

    Rows sorted by time: row i takes at least the ``(i - 1) * dp_size * q + 1``-th heaviest unit if q such units fit a bucket at most. The
    first j rows together hold at most the work that ``j * dp_size * budget`` tokens can carry; the other rows take at least the rest
    of the work divided by ``dp_size``. The bound of a plan without budget holds too.

    Args:
        tokens: ``[U]``, int64, tokens per unit, at most the budget.
        work: ``[U]``, int64, workload per unit.
        dp_size: Buckets per row.
        budget: Most tokens of a bucket.

    Returns:
        An integer that every plan's `BatchPlan.step_workload` reaches.

    Example:
        >>> step_workload_bound(np.array([8, 5, 5, 5]), np.array([8, 5, 5, 5]), 2, 8)
        13
    """
    if not len(tokens):
        return 0
    by_work = np.argsort(-work, kind="stable")
    sorted_work, sorted_tokens = work[by_work], tokens[by_work]
    total = int(work.sum())
    dense = np.argsort(-work / np.maximum(tokens, 1), kind="stable")
    room, carried = np.cumsum(tokens[dense]), np.cumsum(work[dense])
    best, rows = free_partition_bound(work, dp_size), 0
    shortest = np.minimum.accumulate(sorted_tokens).tolist()
    for j in range(1, -(-len(tokens) // dp_size) + 1):
        least = int(sorted_work[0]) if j == 1 else _row_minimum((j - 1) * dp_size, shortest, sorted_work, budget)
        if not least:
            break
        rows += least
        capacity = j * dp_size * budget
        full = int(np.searchsorted(room, capacity, side="right"))
        reach = int(carried[full - 1]) if full else 0
        if full < len(tokens):
            left = capacity - (int(room[full - 1]) if full else 0)
            reach += -(-left * int(work[dense[full]]) // max(1, int(tokens[dense[full]])))
        best = max(best, rows + -(-max(0, total - reach) // dp_size))
    return best


def _row_minimum(buckets_before: int, shortest: list[int], sorted_work: IntArray, budget: int) -> int:
    """Return the work of the heaviest unit that earlier rows cannot hold: q units longer than budget / (q + 1) fill a bucket."""
    for q in range(1, (len(shortest) - 1) // buckets_before + 1):
        if shortest[buckets_before * q] * (q + 1) > budget:
            return int(sorted_work[buckets_before * q])
    return 0
