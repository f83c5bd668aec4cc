"""Fill the grid of ranks and micro-steps under a token cap, planned as a whole.

A unit is one sample, or a group of samples that stays together. A bucket is the list of units of one micro-batch. A row is one
micro-step: ``dp_size`` buckets, of which every rank runs one while the others wait for the slowest.
"""

from bisect import bisect_right
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

import numpy as np

from lightning_rlbatch.functional.bounds import step_workload_bound
from lightning_rlbatch.functional.exchange import Exchange, level, settle
from lightning_rlbatch.functional.partition_starts import to_matrix
from lightning_rlbatch.functional.workload import IntArray

ROW_TOLERANCE = 1e-4
FEW_UNITS = 64  # up to here a plan is so coarse, and so cheap, that several starts pay
RESTARTS = 6

Bucket = list[int]


def fewest_rows(tokens: IntArray, dp_size: int, budget: int) -> int:
    """Return a lower bound on the number of micro-steps.

    The tokens must fit; and for every q, a bucket holds at most q of the units longer than budget / (q + 1).

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
    ascending = np.sort(tokens)
    q = np.arange(1, 33)
    num_longer = len(tokens) - np.searchsorted(ascending, budget // (q + 1), side="right")
    return max(1, -(-total // (dp_size * budget)), int((-(-num_longer // (q * dp_size))).max()))


def next_num_rows(num_rows: int, num_tries: int, multiple: int = 1) -> int:
    """Return the number of rows to try after a failure: the next one at first, then in steps of about 3%."""
    return num_rows + multiple * (1 if num_tries < 4 else max(1, num_rows // (32 * multiple)))


def plan_rows(
    tokens: IntArray, work: IntArray, dp_size: int, budget: int, num_rows: int, multiple: int, *, refine: bool = True, overhead: int = 0
) -> list[list[Bucket]]:
    """Plan a grid of at least ``num_rows`` micro-steps that holds all units, with a small sum of row maxima.

    Two fillings of the smallest grid that works, and with ``refine`` of the next larger one, are compared; the best one is refined by
    exchanges within and between rows.

    Args:
        tokens: ``[U]``, int64, tokens per unit; a unit above the budget gets a bucket for itself.
        work: ``[U]``, int64, workload per unit.
        dp_size: Buckets per row.
        budget: Most tokens of a bucket.
        num_rows: First number of rows to try, a multiple of ``multiple``.
        multiple: Step by which the number of rows grows until everything fits.
        refine: False returns the best first filling.
        overhead: Workload that one more micro-step costs.

    Returns:
        Rows of ``dp_size`` buckets, heaviest row first.
    """
    k, num_tries = num_rows, 1
    while not (found := _fillings(tokens, work, dp_size, budget, k, overhead)):
        k, num_tries = next_num_rows(k, num_tries, multiple), num_tries + 1
    if not refine:
        return min(found, key=lambda f: f[0])[1]
    if k * dp_size < len(tokens):
        found += _fillings(tokens, work, dp_size, budget, k + multiple, overhead)
    cost, rows = min(found, key=lambda f: f[0])
    better = refine_rows(rows, tokens, work, budget)
    rows = better if _cost(better, work, overhead) < cost else rows
    return _restart(rows, tokens, work, budget) if len(tokens) <= FEW_UNITS else rows


def _restart(rows: list[list[Bucket]], tokens: IntArray, work: IntArray, budget: int) -> list[list[Bucket]]:
    """Leave a local optimum of a small instance: fill anew in orders that differ a little (fixed seed), refine, keep the best."""
    generator = np.random.default_rng(0)
    dp_size, num_rows, cost = len(rows[0]), len(rows), _cost(rows, work, 0)
    bound = step_workload_bound(np.minimum(tokens, budget), work, dp_size, budget)
    for _ in range(RESTARTS):
        if cost <= bound * (1 + 10 * ROW_TOLERANCE):
            break
        blurred = work * generator.integers(768, 1281, len(work)) // 1024
        fillings = fill_buckets(tokens, blurred, num_rows * dp_size, budget), fill_rows(tokens, blurred, dp_size, budget, num_rows)
        for buckets in fillings:
            if buckets is None:
                continue
            other = refine_rows(group_rows(buckets, bucket_loads(buckets, work), dp_size), tokens, work, budget)
            rows, cost = min(((rows, cost), (other, _cost(other, work, 0))), key=lambda found: found[1])
    return rows


def _cost(rows: list[list[Bucket]], work: IntArray, overhead: int) -> int:
    loads = bucket_loads([bucket for row in rows for bucket in row], work)
    return int(loads.reshape(len(rows), -1).max(axis=1).sum()) + overhead * len(rows)


def _fillings(
    tokens: IntArray, work: IntArray, dp_size: int, budget: int, num_rows: int, overhead: int
) -> list[tuple[int, list[list[Bucket]]]]:
    fillings = [fill_buckets(tokens, work, num_rows * dp_size, budget), fill_rows(tokens, work, dp_size, budget, num_rows)]
    grouped = [group_rows(buckets, bucket_loads(buckets, work), dp_size) for buckets in fillings if buckets is not None]
    return [(_cost(rows, work, overhead), rows) for rows in grouped]


def fill_rows(tokens: IntArray, work: IntArray, dp_size: int, budget: int, num_rows: int) -> list[Bucket] | None:
    """Fill one row after the other with the longest units left.

    The ``dp_size`` longest units start the buckets of a row; then the lightest bucket takes the longest unit that fits its tokens and, once
    the row has its share of all tokens, does not raise the row's maximum.

    Args:
        tokens: ``[U]``, int64, tokens per unit.
        work: ``[U]``, int64, workload per unit.
        dp_size: Buckets per row.
        budget: Most tokens of a bucket that holds more than one unit.
        num_rows: Rows to fill.

    Returns:
        ``num_rows * dp_size`` buckets, or None if some unit found no room.
    """
    order = np.lexsort((np.arange(len(tokens)), work, tokens))
    pool = order.tolist(), tokens[order].tolist(), work[order].tolist()
    comparable = bool((np.diff(work[order]) >= 0).all())  # work grows with tokens, so that both limits are one position
    left = int(tokens.sum())
    buckets: list[Bucket] = []
    for t in range(num_rows):
        share = left / (num_rows - t) if t < num_rows - 1 else left + 1.0
        row, taken = _fill_row(pool, dp_size, budget, share, dp_size * (num_rows - t - 1), comparable)
        left -= taken
        buckets += row
    return None if pool[0] else buckets


def _fill_row(
    pool: tuple[list[int], list[int], list[int]], dp_size: int, budget: int, share: float, reserve: int, comparable: bool
) -> tuple[list[Bucket], int]:
    """Take one row out of the pool (units, tokens, work; ascending), leaving at least ``reserve`` units."""
    units, sizes, works = pool
    first = max(0, len(units) - dp_size)
    row: list[Bucket] = [[u] for u in reversed(units[first:])]
    loads, free = works[first:][::-1], [budget - s for s in reversed(sizes[first:])]
    taken, top = sum(sizes[first:]), max(loads, default=0)
    del units[first:], sizes[first:], works[first:]
    heap = [(load, b) for b, load in enumerate(loads) if free[b] >= 0]
    heapify(heap)
    while heap and len(units) > reserve:
        load, b = heap[0]
        place = bisect_right(sizes, free[b])
        if taken >= share and comparable:
            place = min(place, bisect_right(works, top - load))
        if place == 0 or (taken >= share and works[place - 1] > top - load):
            heappop(heap)
            continue
        place -= 1
        row[b].append(units[place])
        free[b] -= sizes[place]
        taken += sizes[place]
        load += works[place]
        top = max(top, load)
        heapreplace(heap, (load, b))
        del units[place], sizes[place], works[place]
    return row + [[] for _ in range(dp_size - len(row))], taken


def refine_rows(rows: list[list[Bucket]], tokens: IntArray, work: IntArray, budget: int) -> list[list[Bucket]]:
    """Lower the row maxima by exchanges of units, within the budget.

    The target of a row is its mean or its heaviest unit, whichever is larger. First all rows swap between their heavy and light buckets,
    then the worst buckets exchange with any bucket that has room below its row's maximum. Sorting the buckets anew afterwards never hurts.

    Args:
        rows: Rows of equally many buckets.
        tokens: ``[U]``, int64, tokens per unit.
        work: ``[U]``, int64, workload per unit.
        budget: Most tokens of a bucket that holds more than one unit.

    Returns:
        Rows with the same units, heaviest first.
    """
    dp_size, dummy = len(rows[0]), len(tokens)
    members = to_matrix([bucket for row in rows for bucket in row], dummy, extra=1)
    search = Exchange(np.append(work, 0), members, False, num_rows=len(rows), tokens=np.append(tokens, 0), budget=budget)
    mean = search.load.reshape(len(rows), -1).mean(axis=1)
    heaviest = search.weights[members].reshape(len(rows), -1).max(axis=1)
    target = (np.maximum(mean, heaviest) * (1 + ROW_TOLERANCE)).astype(np.int64)[search.row_of]
    level(search, target, 4)
    settle(search, target, (1,), 12, max_pairs=5_000)
    buckets = [[u for u in part if u != dummy] for part in search.members.tolist()]
    return group_rows(buckets, search.load, dp_size)


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


def bucket_loads(buckets: list[Bucket], work: IntArray) -> IntArray:
    """Return the workload of every bucket.

    Args:
        buckets: Lists of units.
        work: ``[U]``, int64, workload per unit.

    Returns:
        ``[len(buckets)]``, int64.
    """
    sizes = np.array([len(bucket) for bucket in buckets], dtype=np.int64)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(work[np.fromiter(chain.from_iterable(buckets), np.int64)])])
    ends = np.cumsum(sizes)
    return np.asarray(total[ends] - total[ends - sizes])


def group_rows(buckets: list[Bucket], load: IntArray, dp_size: int) -> list[list[Bucket]]:
    """Sort buckets by workload and make every ``dp_size`` consecutive ones a row.

    For given buckets no other grouping has a smaller sum of row maxima, and the waste of the whole step, sum of (row maximum - row
    mean), is less than the difference between the heaviest and the lightest bucket.

    Args:
        buckets: A multiple of ``dp_size`` buckets.
        load: ``[len(buckets)]``, int64, workload of every bucket.
        dp_size: Buckets per row.

    Returns:
        Rows of ``dp_size`` buckets, heaviest first.
    """
    order = np.lexsort((-np.array([len(bucket) for bucket in buckets]), -load)).tolist()
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
