"""Plan a mini-batch: cut it into micro-batches under a hard token cap and spread them over data-parallel ranks.

Invariants of every plan (`BatchPlan.check` verifies them): every sample appears exactly once; no micro-batch exceeds the budget
``sp_size * max_tokens_per_rank``, which as a multiple of ``sp_size`` also covers the padding to such a multiple (a lone sample under
``oversize="isolate"`` excepted); all ranks run the same number of micro-steps; equal input gives an equal plan on every rank.
"""

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from lightning_rlbatch.functional.balancing import balanced_partition, karmarkar_karp
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.rows import Bucket, deal_rows, fewest_rows, fill_buckets, plan_rows
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT, IntArray, Integers, to_int64, workload_array

Oversize = Literal["error", "isolate"]
Planner = Literal["global", "per_rank"]


@dataclass(frozen=True)
class _Job:
    """Checked input: samples, the units that stay together, and the cap of a bucket in tokens or in units."""

    lengths: IntArray
    workloads: IntArray
    tokens: IntArray  # per unit
    work: IntArray  # per unit
    group_size: int
    sp_size: int
    max_tokens_per_rank: int | None
    micro_batch_size: int | None

    @property
    def budget(self) -> int:
        assert self.max_tokens_per_rank is not None
        return self.max_tokens_per_rank * self.sp_size

    @property
    def units_per_bucket(self) -> int:
        assert self.micro_batch_size is not None
        return self.micro_batch_size // self.group_size

    def to_plan(self, ranks: list[list[Bucket]]) -> BatchPlan:
        size = self.group_size
        assignment = [[[i for u in sorted(bucket) for i in range(u * size, u * size + size)] for bucket in rank] for rank in ranks]
        return BatchPlan(
            assignment,
            self.lengths,
            self.workloads,
            sp_size=self.sp_size,
            max_tokens_per_rank=self.max_tokens_per_rank,
            micro_batch_size=self.micro_batch_size,
            group_size=size,
        )


def plan_mini_batch(
    seq_lens: Integers,
    *,
    dp_size: int,
    max_tokens_per_rank: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    coefficient: int = DEFAULT_COEFFICIENT,
    balance: bool = True,
    equal_size: bool = False,
    group_size: int = 1,
    oversize: Oversize = "error",
    min_num_micro_steps: int = 1,
    num_micro_steps_multiple: int = 1,
    planner: Planner = "global",
) -> BatchPlan:
    """Assign the samples of a mini-batch to data-parallel ranks and micro-steps.

    Exactly one of ``max_tokens_per_rank`` (dynamic: as few micro-steps as fit) and ``micro_batch_size`` (static: so many samples
    each, the last may be short) is given.

    Args:
        seq_lens: ``[N]``, integers, tokens per sample; the same on every rank.
        dp_size: Number of data-parallel ranks.
        max_tokens_per_rank: Token budget of one GPU; a micro-batch of a sequence-parallel group holds ``sp_size`` times as many.
        micro_batch_size: Samples per micro-batch.
        sp_size: GPUs of a sequence-parallel group.
        coefficient: See `attention_workload`; samples are balanced by workload, and capped by tokens.
        balance: False gives rank r the r-th contiguous block (sizes differ by at most one), cut in order.
        equal_size: Numbers of samples per rank differ by at most one (by one group with ``group_size``).
        group_size: So many consecutive samples stay in one micro-batch (2 for preference pairs).
        oversize: What to do with a sample (or group) above the budget: ``"error"``, or ``"isolate"``, a micro-batch of its own.
        min_num_micro_steps: Run at least so many micro-steps.
        num_micro_steps_multiple: Make their number a multiple of this (pipeline schedules need it).
        planner: ``"global"`` plans all ranks and micro-steps together; ``"per_rank"`` is the two-layer baseline: equal-count
            Karmarkar-Karp over ranks, then Karmarkar-Karp into micro-batches inside each rank.

    Returns:
        The plan, the same for equal input. Fillers (``[]``) appear only where a rank has too few samples.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A setting is out of range, or a sample exceeds the budget; the message names it.

    Source:
        Two-layer baseline: verl, "HybridFlow" (Sheng et al., 2024). Barrier at every micro-step, hence the sum of row maxima as
        objective: ODC, arXiv 2601.19362.

    Example:
        >>> plan = plan_mini_batch([9, 8, 7, 6, 5, 4, 3], dp_size=2, max_tokens_per_rank=12)
        >>> plan.assignment, plan.num_micro_steps
        ([[[1, 6], [3, 4]], [[2, 5], [0]]], 2)
    """
    job = _checked_job(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize)
    _check_at_least("dp_size", dp_size, 1)
    _check_at_least("min_num_micro_steps", min_num_micro_steps, 1)
    _check_at_least("num_micro_steps_multiple", num_micro_steps_multiple, 1)
    _check_choice("planner", planner, ("global", "per_rank"))
    multiple = num_micro_steps_multiple
    if planner == "per_rank" or not balance or equal_size:
        blocks = _blocks(len(job.tokens), dp_size) if not balance else _equal_blocks(job.work, dp_size, planner)
        pack = _cut_in_order if planner == "global" and not balance else _cut_by_differencing
        ranks = [pack(job, block, 1) for block in blocks]
        k = _round_up(max(min_num_micro_steps, *map(len, ranks)), multiple)
        return job.to_plan([_spread(pack(job, block, k), job.work, k) for block in blocks])
    if job.micro_batch_size is not None:
        return job.to_plan(_static_rows(job, dp_size, _round_up(min_num_micro_steps, multiple), multiple))
    k = _round_up(max(min_num_micro_steps, fewest_rows(job.tokens, dp_size, job.budget)), multiple)
    return job.to_plan(deal_rows(plan_rows(job.tokens, job.work, dp_size, job.budget, k, multiple)))


def plan_rank(
    seq_lens: Integers,
    *,
    num_micro_steps: int,
    max_tokens_per_rank: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    coefficient: int = DEFAULT_COEFFICIENT,
    group_size: int = 1,
    oversize: Oversize = "error",
) -> list[list[int]]:
    """Cut one rank's samples into a given number of micro-batches: the second layer of the two-layer baseline.

    For data whose lengths only this rank knows: take `count_micro_steps` of the local samples, reduce it by MAX over the data-parallel
    group (``distributed.max_num_micro_steps``), then call this.

    Args:
        seq_lens: ``[N]``, integers, tokens of this rank's samples.
        num_micro_steps: Micro-batches to make, at least `count_micro_steps` of the same arguments.
        max_tokens_per_rank: See `plan_mini_batch`.
        micro_batch_size: See `plan_mini_batch`.
        sp_size: See `plan_mini_batch`.
        coefficient: See `plan_mini_batch`.
        group_size: See `plan_mini_batch`.
        oversize: See `plan_mini_batch`.

    Returns:
        ``num_micro_steps`` lists of sample indices, heaviest first; a rank short of work spreads its samples over more, sparser
        micro-batches, and ``[]`` appears only where it has fewer samples than micro-steps.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A setting is out of range, a sample exceeds the budget, or the number of micro-steps is too small.

    Example:
        >>> plan_rank([5, 3, 2, 6], num_micro_steps=3, max_tokens_per_rank=8)
        [[3], [0], [1, 2]]
    """
    job = _checked_job(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize)
    everything = list(range(len(job.tokens)))
    needed = len(_cut_by_differencing(job, everything, 1))
    if num_micro_steps < needed:
        raise ValueError(
            f"`num_micro_steps` must be at least {needed} for {len(job.lengths)} samples of {int(job.lengths.sum())} tokens but got "
            f"{num_micro_steps}. Reduce `count_micro_steps` by MAX over the data-parallel group."
        )
    buckets = _spread(_cut_by_differencing(job, everything, num_micro_steps), job.work, num_micro_steps)
    return job.to_plan([buckets]).assignment[0]


def count_micro_steps(
    seq_lens: Integers,
    *,
    max_tokens_per_rank: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    coefficient: int = DEFAULT_COEFFICIENT,
    group_size: int = 1,
    oversize: Oversize = "error",
) -> int:
    """Return how many micro-batches one rank's samples need in the two-layer baseline.

    Starts at tokens / budget, rounded up, and grows until Karmarkar-Karp keeps every micro-batch within the budget.

    Args:
        seq_lens: ``[N]``, integers, tokens of this rank's samples.
        max_tokens_per_rank: See `plan_mini_batch`.
        micro_batch_size: See `plan_mini_batch`.
        sp_size: See `plan_mini_batch`.
        coefficient: See `plan_mini_batch`.
        group_size: See `plan_mini_batch`.
        oversize: See `plan_mini_batch`.

    Returns:
        At least 1, so that a rank without samples takes part.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A setting is out of range, or a sample exceeds the budget.

    Example:
        >>> count_micro_steps([7, 7, 7], max_tokens_per_rank=8)
        3
    """
    job = _checked_job(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize)
    return len(_cut_by_differencing(job, list(range(len(job.tokens))), 1))


def recut(
    seq_lens: Integers,
    samples_per_rank: list[list[int]],
    *,
    max_tokens_per_rank: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    coefficient: int = DEFAULT_COEFFICIENT,
    oversize: Oversize = "error",
) -> BatchPlan:
    """Cut samples that already live on ranks into micro-batches for another pass, with a budget of its own.

    Args:
        seq_lens: ``[N]``, integers, tokens of all samples; the same on every rank.
        samples_per_rank: ``[dp_size]`` lists of sample indices, for example `BatchPlan.samples_per_rank`; every sample once.
        max_tokens_per_rank: Token budget of one GPU in this pass.
        micro_batch_size: Samples per micro-batch in this pass.
        sp_size: GPUs of a sequence-parallel group.
        coefficient: See `attention_workload`.
        oversize: See `plan_mini_batch`.

    Returns:
        A plan with the same samples on every rank and equal numbers of micro-steps.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A setting is out of range, a sample exceeds the budget, or the ranks do not hold every sample exactly once.

    Example:
        >>> recut([4, 4, 4, 9], [[0, 1, 2], [3]], max_tokens_per_rank=9).assignment
        [[[0, 2], [1]], [[3], []]]
    """
    job = _checked_job(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, 1, oversize)
    if not samples_per_rank or sorted(i for rank in samples_per_rank for i in rank) != list(range(len(job.lengths))):
        raise ValueError(
            f"`samples_per_rank` must hold each of the {len(job.lengths)} samples exactly once but got {sum(map(len, samples_per_rank))} "
            f"entries on {len(samples_per_rank)} ranks. Pass `samples_per_rank` of the plan of the same samples."
        )
    k = max(len(_cut_by_load(job, rank, 1)) for rank in samples_per_rank)
    return job.to_plan([_spread(_cut_by_load(job, rank, k), job.work, k) for rank in samples_per_rank])


def _check_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an int but got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least} but got {value}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))} but got {value!r}.")


def _checked_job(
    seq_lens: Integers,
    max_tokens_per_rank: int | None,
    micro_batch_size: int | None,
    sp_size: int,
    coefficient: int,
    group_size: int,
    oversize: Oversize,
) -> _Job:
    """Validate what all entry points share, and sum samples into units."""
    if (max_tokens_per_rank is None) == (micro_batch_size is None):
        raise ValueError(
            "Exactly one of `max_tokens_per_rank` (dynamic micro-batches) and `micro_batch_size` (static micro-batches) must be set "
            f"but got max_tokens_per_rank={max_tokens_per_rank} and micro_batch_size={micro_batch_size}. Remove one of them."
        )
    for name, value in (("max_tokens_per_rank", max_tokens_per_rank), ("micro_batch_size", micro_batch_size)):
        if value is not None:
            _check_at_least(name, value, 1)
    _check_at_least("sp_size", sp_size, 1)
    _check_at_least("group_size", group_size, 1)
    _check_choice("oversize", oversize, ("error", "isolate"))
    lengths = to_int64(seq_lens)
    if len(lengths) % group_size:
        raise ValueError(
            f"{len(lengths)} samples do not form groups of group_size={group_size}. Add or drop samples, or pass group_size=1."
        )
    if micro_batch_size is not None and micro_batch_size % group_size:
        raise ValueError(f"`micro_batch_size` must be a multiple of group_size={group_size} but got {micro_batch_size}.")
    workloads = workload_array(lengths, coefficient)
    tokens, work = (x.reshape(-1, group_size).sum(axis=1) for x in (lengths, workloads))
    if max_tokens_per_rank is not None:
        tokens = _check_budget(tokens, max_tokens_per_rank, sp_size, group_size, oversize)
    return _Job(lengths, workloads, tokens, work, group_size, sp_size, max_tokens_per_rank, micro_batch_size)


def _check_budget(tokens: IntArray, max_tokens_per_rank: int, sp_size: int, group_size: int, oversize: Oversize) -> IntArray:
    """Apply the oversize policy; an isolated unit counts as just over the budget, so that nothing joins it."""
    budget = max_tokens_per_rank * sp_size
    over = np.flatnonzero(tokens > budget)
    if not len(over):
        return tokens
    worst = int(over[np.argmax(tokens[over])])
    first, last = worst * group_size, worst * group_size + group_size - 1
    what = (f"Sample {first} has" if group_size == 1 else f"The group of samples {first} to {last} has") + f" {int(tokens[worst])} tokens"
    cap = f"a micro-batch may hold {budget} (max_tokens_per_rank={max_tokens_per_rank} x sequence_parallel_size={sp_size})"
    if oversize == "error":
        more = f" {len(over) - 1} more exceed it too." if len(over) > 1 else ""
        raise ValueError(f"{what} but {cap}.{more} Raise the budget, raise sequence_parallel_size, or pass oversize='isolate'.")
    warnings.warn(f"{what} but {cap}; {len(over)} oversize micro-batch(es) run alone and may run out of memory.", stacklevel=4)
    return np.minimum(tokens, budget + 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _blocks(num_units: int, dp_size: int) -> list[Bucket]:
    """Cut into contiguous blocks, the first ones larger by one if sizes cannot be equal."""
    floor, extra = divmod(num_units, dp_size)
    starts = [r * floor + min(r, extra) for r in range(dp_size + 1)]
    return [list(range(a, b)) for a, b in pairwise(starts)]


def _equal_blocks(work: IntArray, dp_size: int, planner: Planner) -> list[Bucket]:
    return (karmarkar_karp if planner == "per_rank" else balanced_partition)(work, dp_size, equal_size=True)


def _chunks(units: Bucket, size: int) -> list[Bucket]:
    return [units[i : i + size] for i in range(0, len(units), size)] or [[]]


def _cut_in_order(job: _Job, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Close a bucket when the next unit does not fit; the number of buckets is the smallest that keeps the order."""
    if job.micro_batch_size is not None:
        return _chunks(units, job.units_per_bucket)
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


def _cut_by_differencing(job: _Job, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Cut by Karmarkar-Karp into at least ``num_buckets``, more if the budget needs it."""
    if job.micro_batch_size is not None:
        return _chunks(units, job.units_per_bucket)
    tokens, work = job.tokens[units], job.work[units]
    k = needed = min(fewest_rows(tokens, 1, job.budget), max(1, len(units)))
    while not _fits(parts := karmarkar_karp(work, k), tokens, job.budget):
        k += 1
        needed = k
    if num_buckets > needed:
        wider = karmarkar_karp(work, min(num_buckets, max(1, len(units))))
        parts = wider if _fits(wider, tokens, job.budget) else parts
    return [[units[i] for i in part] for part in parts]


def _cut_by_load(job: _Job, units: Bucket, num_buckets: int) -> list[Bucket]:
    """Cut by filling the lightest bucket with room, into at least ``num_buckets``, more if the budget needs it."""
    if job.micro_batch_size is not None:
        return _chunks(units, job.units_per_bucket)
    tokens, work = job.tokens[units], job.work[units]
    k = max(num_buckets, fewest_rows(tokens, 1, job.budget))
    while (buckets := fill_buckets(tokens, work, k, job.budget)) is None:
        k += 1
    return [sorted(units[i] for i in bucket) for bucket in buckets]


def _fits(parts: list[Bucket], tokens: IntArray, budget: int) -> bool:
    return all(len(part) <= 1 or int(tokens[part].sum()) <= budget for part in parts)


def _spread(buckets: list[Bucket], work: IntArray, num_buckets: int) -> list[Bucket]:
    """Split the heaviest bucket of several units, in order, until there are enough; fillers only if units run out."""
    buckets = list(buckets)
    while len(buckets) < num_buckets and any(len(b) > 1 for b in buckets):
        heaviest = max((b for b in range(len(buckets)) if len(buckets[b]) > 1), key=lambda b: (int(work[buckets[b]].sum()), -b))
        units = buckets[heaviest]
        running = np.cumsum(work[units])
        cut = min(range(1, len(units)), key=lambda c: (abs(2 * int(running[c - 1]) - int(running[-1])), c))
        buckets[heaviest : heaviest + 1] = [units[:cut], units[cut:]]
    return buckets + [[] for _ in range(num_buckets - len(buckets))]


def _static_rows(job: _Job, dp_size: int, num_rows: int, multiple: int) -> list[list[Bucket]]:
    """Put the heaviest units into the first row, the next into the second, each row balanced by itself."""
    size = job.units_per_bucket
    k = _round_up(max(num_rows, -(-len(job.work) // (size * dp_size))), multiple)
    order = np.argsort(-job.work, kind="stable").tolist()
    rows: list[list[Bucket]] = []
    for t in range(k):
        units = order[t * size * dp_size : (t + 1) * size * dp_size]
        parts = balanced_partition(job.work[units], dp_size, equal_size=True)
        rows.append([[units[i] for i in part] for part in parts])
    return deal_rows(rows)
