"""Cut the units of one rank into micro-batches.

Every cut returns at least the requested number of buckets if units suffice, and more if the cap needs it.
"""

import numpy as np

from lightning_rlbatch.functional.balancing import karmarkar_karp
from lightning_rlbatch.functional.plan_input import PlanInput
from lightning_rlbatch.functional.rows import Bucket, fewest_rows, fill_buckets, next_num_rows
from lightning_rlbatch.functional.workload import IntArray


def chunks(units: Bucket, size: int) -> list[Bucket]:
    """Cut every ``size`` units; one empty bucket if there are none."""
    return [units[i : i + size] for i in range(0, len(units), size)] or [[]]


def cut_in_order(job: PlanInput, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Close a bucket when the next unit does not fit; the number of buckets is the smallest that keeps the order."""
    if job.micro_batch_size is not None:
        return chunks(units, job.units_per_bucket)
    if job.padded:
        return _next_fit(job, units)
    buckets: list[Bucket] = [[]]
    free = job.budget
    for u in units:
        size = int(job.tokens[u])
        if buckets[-1] and size > free:
            buckets.append([])
            free = job.budget
        buckets[-1].append(u)
        free -= size
    return buckets


def cut_padded(job: PlanInput, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Cut for padding: units of similar length share a bucket, whose cost is number of samples x longest.

    Longest first, consecutive units: no other cut needs fewer buckets. Among the cuts into that number the heaviest bucket is as
    light as a consecutive cut allows, found by bisection on a cap of the workload.
    """
    order = sorted(units, key=lambda u: (-int(job.longest[u]), u))
    longest, heaviest = job.longest[order].tolist(), job.heaviest[order].tolist()
    starts = _starts(job, longest, heaviest, None, len(order))
    target = max(num_buckets, len(starts))
    low, high = -1, len(order) * job.group_size * max(heaviest, default=0)
    while high - low > 1:
        middle = (low + high) // 2
        tighter = _starts(job, longest, heaviest, middle, target)
        if len(tighter) <= target:
            high, starts = middle, tighter
        else:
            low = middle
    return [order[start:end] for start, end in zip(starts, [*starts[1:], len(order)])]


def _starts(job: PlanInput, longest: list[int], heaviest: list[int], work_cap: int | None, most: int) -> list[int]:
    """Return where `_next_fit` starts a bucket in units of falling length; stops when there are more than ``most``.

    The first unit of a bucket is its longest, so that it alone tells how many the bucket holds.
    """
    starts, start, size = [0], 0, job.group_size
    while start < len(longest) and len(starts) <= most:
        fit = _quotient(job.budget, size * longest[start], len(longest))
        if work_cap is not None:
            fit = min(fit, _quotient(work_cap, size * heaviest[start], len(longest)))
        start += max(1, fit)  # a unit above the cap has a bucket of its own
        if start < len(longest):
            starts.append(start)
    return starts


def _quotient(cap: int, size: int, without_size: int) -> int:
    return cap // size if size else without_size


def _next_fit(job: PlanInput, units: Bucket) -> list[Bucket]:
    """Cut in order where number of samples x longest would exceed the budget."""
    buckets: list[Bucket] = [[]]
    longest = 0
    for u in units:
        longest = max(longest, int(job.longest[u]))
        if buckets[-1] and (len(buckets[-1]) + 1) * job.group_size * longest > job.budget:
            buckets.append([])
            longest = int(job.longest[u])
        buckets[-1].append(u)
    return buckets


def cut_by_differencing(job: PlanInput, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Cut by Karmarkar-Karp into at least ``num_buckets``, more if the budget needs it."""
    if job.micro_batch_size is not None:
        return chunks(units, job.units_per_bucket)
    if job.padded:
        return cut_padded(job, units, num_buckets)
    tokens, work = job.tokens[units], job.work[units]
    k, num_tries = min(fewest_rows(tokens, 1, job.budget), max(1, len(units))), 1
    while not _fits(parts := karmarkar_karp(work, k), tokens, job.budget):
        k, num_tries = min(next_num_rows(k, num_tries), len(units)), num_tries + 1
    if num_buckets > k:
        wider = karmarkar_karp(work, min(num_buckets, max(1, len(units))))
        parts = wider if _fits(wider, tokens, job.budget) else parts
    return [[units[i] for i in part] for part in parts]


def cut_by_load(job: PlanInput, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Cut by filling the lightest bucket with room, into at least ``num_buckets``, more if the budget needs it."""
    if job.micro_batch_size is not None:
        return chunks(units, job.units_per_bucket)
    if job.padded:
        return cut_padded(job, units, num_buckets)
    tokens, work = job.tokens[units], job.work[units]
    k, num_tries = max(num_buckets, fewest_rows(tokens, 1, job.budget)), 1
    while (buckets := fill_buckets(tokens, work, k, job.budget)) is None:
        k, num_tries = next_num_rows(k, num_tries), num_tries + 1
    return [sorted(units[i] for i in bucket) for bucket in buckets]


def _fits(parts: list[Bucket], tokens: IntArray, budget: int) -> bool:
    return all(len(part) <= 1 or int(tokens[part].sum()) <= budget for part in parts)


def spread(job: PlanInput, buckets: list[Bucket], num_buckets: int) -> list[Bucket]:
    """Split the heaviest bucket of several units, in order, until there are enough; fillers only if units run out.

    Static micro-batches keep their size: there only fillers are added.
    """
    buckets, work = list(buckets), job.work
    while job.micro_batch_size is None and len(buckets) < num_buckets and any(len(b) > 1 for b in buckets):
        heaviest = max((b for b in range(len(buckets)) if len(buckets[b]) > 1), key=lambda b: (int(work[buckets[b]].sum()), -b))
        units = buckets[heaviest]
        running = np.cumsum(work[units])
        cut = min(range(1, len(units)), key=lambda c: (abs(2 * int(running[c - 1]) - int(running[-1])), c))
        buckets[heaviest : heaviest + 1] = [units[:cut], units[cut:]]
    return buckets + [[] for _ in range(num_buckets - len(buckets))]
