"""Cut samples that already have a rank into micro-steps that are alike on all ranks."""

import math
from bisect import bisect_right
from typing import TypeAlias

import numpy as np

from lightning_rlbatch.functional.cutting import chunks, cut_by_load, cut_padded, spread
from lightning_rlbatch.functional.plan_input import PlanInput
from lightning_rlbatch.functional.rows import Bucket, bucket_loads, fewest_rows

Pool: TypeAlias = tuple[list[int], list[int], list[int]]  # units, their tokens, their work; ascending


def cut_ranks(job: PlanInput, ranks: list[Bucket], min_num_micro_steps: int = 1, multiple: int = 1) -> list[list[Bucket]]:
    """Cut every rank's units into the same number of buckets, heaviest first.

    Filling row by row and filling every rank for itself are compared by the sum of row maxima.

    Args:
        job: Checked input.
        ranks: Units of every rank.
        min_num_micro_steps: Buckets per rank at least.
        multiple: The number of buckets per rank is a multiple of this.

    Returns:
        ``[ranks][num_micro_steps]`` buckets.
    """
    if job.micro_batch_size is not None or job.padded:
        return _cut_each(job, ranks, min_num_micro_steps, multiple)
    needed = max(fewest_rows(job.tokens[rank], 1, job.budget) for rank in ranks)
    k = -(-max(min_num_micro_steps, needed) // multiple) * multiple
    by_rank = _cut_each(job, ranks, k, multiple)
    by_row = _fill_rows(job, ranks, k)
    if by_row is None:
        return by_rank
    sorted_rows = [_heaviest_first(job, buckets) for buckets in by_row]
    return min((sorted_rows, by_rank), key=lambda plan: (len(plan[0]), _step_workload(job, plan)))


def _heaviest_first(job: PlanInput, buckets: list[Bucket]) -> list[Bucket]:
    load = bucket_loads(buckets, job.work)
    return [buckets[b] for b in np.argsort(-load, kind="stable").tolist()]


def _step_workload(job: PlanInput, ranks: list[list[Bucket]]) -> int:
    load = bucket_loads([bucket for rank in ranks for bucket in rank], job.work)
    return int(load.reshape(len(ranks), -1).max(axis=0).sum())


def _cut_each(job: PlanInput, ranks: list[Bucket], k: int, multiple: int) -> list[list[Bucket]]:
    def cut(rank: Bucket, num_buckets: int) -> list[Bucket]:
        if job.micro_batch_size is not None:
            return chunks(sorted(rank, key=lambda u: (-int(job.work[u]), u)), job.units_per_bucket)
        return cut_padded(job, rank, num_buckets) if job.padded else cut_by_load(job, rank, num_buckets)

    needed = max(len(cut(rank, 1)) for rank in ranks)
    k = -(-max(k, needed) // multiple) * multiple
    plans = [spread(job, cut(rank, k), k) for rank in ranks]
    return plans if job.micro_batch_size is not None else [_heaviest_first(job, buckets) for buckets in plans]


def _fill_rows(job: PlanInput, ranks: list[Bucket], num_rows: int) -> list[list[Bucket]] | None:
    """Fill one micro-step on all ranks, then the next; None if some unit found no room.

    Every rank takes its longest units until it has its share of its tokens; then every rank fills up to the row's maximum.
    """
    order = [sorted(rank, key=lambda u: (int(job.tokens[u]), int(job.work[u]), u)) for rank in ranks]
    pools = [(units, job.tokens[units].tolist(), job.work[units].tolist()) for units in order]
    left = [sum(sizes) for _, sizes, _ in pools]
    plan: list[list[Bucket]] = [[] for _ in ranks]
    for rows_left in range(num_rows, 0, -1):
        row = []
        for pool, tokens_left in zip(pools, left):
            share = tokens_left / rows_left if rows_left > 1 else math.inf
            row.append(_take(pool, [], job.budget, 0, math.inf, share, rows_left - 1))
        top = max(load for _, _, load in row)
        for r, pool in enumerate(pools):
            bucket, free, _ = _take(pool, *row[r], top, math.inf, rows_left - 1)
            left[r] -= job.budget - free
            plan[r].append(bucket)
    return None if any(units for units, _, _ in pools) else plan


def _take(pool: Pool, bucket: Bucket, free: int, load: int, top: float, share: float, reserve: int) -> tuple[Bucket, int, int]:
    """Move the longest units that fit from the pool into a bucket, until it has taken its share or would pass the load ``top``."""
    units, sizes, works = pool
    taken = 0
    while len(units) > reserve and taken < share:
        place = bisect_right(sizes, free) - 1 if bucket else len(units) - 1
        if place >= 0 and load + works[place] > top:
            place = min(place, bisect_right(works, top - load) - 1)  # exact where work grows with tokens
        if place < 0 or load + works[place] > top:
            break
        bucket.append(units[place])
        free -= sizes[place]
        taken += sizes[place]
        load += works[place]
        del units[place], sizes[place], works[place]
    return bucket, free, load
