"""The two-layer baseline for data whose lengths only their own rank knows."""

from lightning_rlbatch.functional.cutting import cut_by_differencing, spread
from lightning_rlbatch.functional.plan_input import Oversize, check_at_least, checked_input
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT, Integers


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
    check_at_least("num_micro_steps", num_micro_steps, 1)
    job = checked_input(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize)
    everything = list(range(len(job.tokens)))
    needed = len(cut_by_differencing(job, everything, 1))
    if num_micro_steps < needed:
        raise ValueError(
            f"`num_micro_steps` must be at least {needed} for {len(job.lengths)} samples of {int(job.lengths.sum())} tokens but got "
            f"{num_micro_steps}. Reduce `count_micro_steps` by MAX over the data-parallel group."
        )
    buckets = spread(job, cut_by_differencing(job, everything, num_micro_steps), num_micro_steps)
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
    job = checked_input(seq_lens, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize)
    return len(cut_by_differencing(job, list(range(len(job.tokens))), 1))
