"""Plan a mini-batch: cut it into micro-batches under a hard token cap and spread them over data-parallel ranks.

Invariants of every plan (`BatchPlan.check` verifies them): every sample appears exactly once; no micro-batch exceeds the budget
``sp_size * max_tokens_per_rank``, which as a multiple of ``sp_size`` also covers the padding to such a multiple (a lone sample under
``oversize="isolate"`` excepted); all ranks run the same number of micro-steps; equal input gives an equal plan on every rank.
"""

from itertools import pairwise
from typing import Literal

import numpy as np

from lightning_rlbatch.functional.balancing import balanced_partition, karmarkar_karp
from lightning_rlbatch.functional.cutting import cut_by_differencing, cut_in_order, cut_padded, spread
from lightning_rlbatch.functional.exchange import Exchange, level, settle
from lightning_rlbatch.functional.fixed_ranks import cut_ranks
from lightning_rlbatch.functional.partition_starts import longest_first, to_matrix
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.plan_input import Oversize, PlanInput, check_at_least, check_choice, check_flags, checked_input
from lightning_rlbatch.functional.rows import ROW_TOLERANCE, Bucket, deal_rows, fewest_rows, group_rows, plan_rows
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT, Integers

MICRO_STEP_OVERHEAD = 1024  # tokens' worth of linear time that one more micro-step costs

Planner = Literal["global", "per_rank"]


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
    padded: bool = False,
    refine: bool = True,
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
        padded: Micro-batches are padded to their longest sample: a micro-batch then costs number of samples x longest.
        refine: False plans about ten times faster at a slightly larger cost (``planner="global"`` with a token budget only).

    Returns:
        The plan, the same for equal input. Fillers (``[]``) appear only where a rank has too few samples; with ``micro_batch_size``, too
        few for one more micro-batch of that size.

    Raises:
        TypeError: A value is not an integer, or a flag not a bool.
        ValueError: A setting is out of range, or a sample exceeds the budget; the message names it.

    Source:
        Two-layer baseline: verl, "HybridFlow" (Sheng et al., 2024). Barrier at every micro-step, hence the sum of row maxima as
        objective: ODC, arXiv 2601.19362.

    Example:
        >>> plan = plan_mini_batch([9, 8, 7, 6, 5, 4, 3], dp_size=2, max_tokens_per_rank=12)
        >>> plan.assignment, plan.num_micro_steps
        ([[[1, 5], [3, 6]], [[2, 4], [0]]], 2)
    """
    job = checked_input(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize, padded)
    check_at_least("dp_size", dp_size, 1)
    check_at_least("min_num_micro_steps", min_num_micro_steps, 1)
    check_at_least("num_micro_steps_multiple", num_micro_steps_multiple, 1)
    check_choice("planner", planner, ("global", "per_rank"))
    check_flags(balance=balance, equal_size=equal_size, refine=refine)
    multiple = num_micro_steps_multiple
    if balance and equal_size and planner == "global":
        return job.to_plan(cut_ranks(job, balanced_partition(job.work, dp_size, equal_size=True), min_num_micro_steps, multiple))
    if planner == "per_rank" or not balance:
        blocks = karmarkar_karp(job.work, dp_size, equal_size=True) if balance else _blocks(len(job.tokens), dp_size)
        pack = cut_in_order if planner == "global" and not balance else cut_by_differencing
        ranks = [pack(job, block, 1) for block in blocks]
        k = _round_up(max(min_num_micro_steps, *map(len, ranks)), multiple)
        return job.to_plan([spread(job, pack(job, block, k), k) for block in blocks])
    if job.micro_batch_size is not None:
        return job.to_plan(_static_rows(job, dp_size, _round_up(min_num_micro_steps, multiple), multiple))
    if job.padded:
        return job.to_plan(_padded_rows(job, dp_size, min_num_micro_steps, multiple))
    overhead = MICRO_STEP_OVERHEAD * coefficient
    k = _round_up(max(min_num_micro_steps, fewest_rows(job.tokens, dp_size, job.budget)), multiple)
    return job.to_plan(deal_rows(plan_rows(job.tokens, job.work, dp_size, job.budget, k, multiple, refine=refine, overhead=overhead)))


def recut(
    seq_lens: Integers,
    samples_per_rank: list[list[int]],
    *,
    max_tokens_per_rank: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    coefficient: int = DEFAULT_COEFFICIENT,
    oversize: Oversize = "error",
    padded: bool = False,
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
        padded: See `plan_mini_batch`.

    Returns:
        A plan with the same samples on every rank and equal numbers of micro-steps.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A setting is out of range, a sample exceeds the budget, or the ranks do not hold every sample exactly once.

    Example:
        >>> recut([4, 4, 4, 9], [[0, 1, 2], [3]], max_tokens_per_rank=9).assignment
        [[[1, 2], [0]], [[3], []]]
    """
    job = checked_input(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, 1, oversize, padded)
    if not samples_per_rank or sorted(i for rank in samples_per_rank for i in rank) != list(range(len(job.lengths))):
        raise ValueError(
            f"`samples_per_rank` must hold each of the {len(job.lengths)} samples exactly once but got {sum(map(len, samples_per_rank))} "
            f"entries on {len(samples_per_rank)} ranks. Pass `samples_per_rank` of the plan of the same samples."
        )
    return job.to_plan(cut_ranks(job, samples_per_rank))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _blocks(num_units: int, dp_size: int) -> list[Bucket]:
    """Cut into contiguous blocks, the first ones larger by one if sizes cannot be equal."""
    floor, extra = divmod(num_units, dp_size)
    starts = [r * floor + min(r, extra) for r in range(dp_size + 1)]
    return [list(range(a, b)) for a, b in pairwise(starts)]


def _static_rows(job: PlanInput, dp_size: int, num_rows: int, multiple: int) -> list[list[Bucket]]:
    """Put the heaviest units into the first row, the next into the second, then balance all rows by exchanges."""
    size = job.units_per_bucket
    k = _round_up(max(num_rows, -(-len(job.work) // (size * dp_size))), multiple)
    order = np.argsort(-job.work, kind="stable")
    buckets: list[Bucket] = []
    for t in range(k):
        units = order[t * size * dp_size : (t + 1) * size * dp_size]
        buckets += [units[part].tolist() for part in longest_first(job.work[units], dp_size, True)]
    search = Exchange(np.append(job.work, 0), to_matrix(buckets, len(job.work)), True, num_rows=k)
    target = (search.load.reshape(k, -1).mean(axis=1) * (1 + ROW_TOLERANCE)).astype(np.int64)[search.row_of]
    if search.members.shape[1]:
        level(search, target, 8)
        settle(search, target, (1, 2) if size <= 16 else (1,), 16)
    parts = [[u for u in part if u < len(job.work)] for part in search.members.tolist()]
    return deal_rows([parts[t * dp_size : (t + 1) * dp_size] for t in range(k)])


def _padded_rows(job: PlanInput, dp_size: int, num_rows: int, multiple: int) -> list[list[Bucket]]:
    """Cut all units in order of length, then make consecutive buckets of similar cost a row."""
    units = list(range(len(job.longest)))
    k = _round_up(max(num_rows, -(-len(cut_padded(job, units, 1)) // dp_size)), multiple)
    buckets = spread(job, cut_padded(job, units, k * dp_size), k * dp_size)
    load = np.array([len(b) * job.group_size * int(job.heaviest[b].max()) if b else 0 for b in buckets])
    return deal_rows(group_rows(buckets, load, dp_size))
