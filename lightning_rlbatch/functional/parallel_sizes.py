"""Compare sequence-parallel sizes for given lengths."""

from lightning_rlbatch.functional.plan_input import check_at_least
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT, Integers, to_int64


def sequence_parallel_times(
    seq_lens: Integers,
    *,
    world_size: int,
    max_tokens_per_rank: int,
    coefficient: int = DEFAULT_COEFFICIENT,
    communication: float = 0.0,
    overhead: int = 1024,
) -> dict[int, float]:
    """Predict the time of an optimizer step for every sequence-parallel size that divides the world and holds the longest sample.

    One sample heavier than a rank's fair share bounds the efficiency of every plan. Splitting it over P GPUs divides its time by P, and
    leaves ``world_size / P`` data-parallel ranks with P times the fair share each, at the price of all-to-all communication.

    Args:
        seq_lens: ``[N]``, integers, tokens of the samples of a typical mini-batch.
        world_size: GPUs in all.
        max_tokens_per_rank: Token budget of one GPU.
        coefficient: See `attention_workload`.
        communication: Share that sequence parallelism adds to the time of a micro-batch (P > 1), to be measured.
        overhead: Cost of a micro-step in tokens' worth of linear work on one GPU, whatever P.

    Returns:
        Sequence-parallel size to time, relative to a step in which no GPU ever waits (1.0; larger is slower). Empty if the longest sample
        fits no size.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A size is out of range.

    Example:
        >>> times = sequence_parallel_times([8000] + [500] * 31, world_size=8, max_tokens_per_rank=8000, overhead=0)
        >>> {size: round(time, 2) for size, time in times.items()}
        {1: 3.21, 2: 1.61, 4: 1.0, 8: 1.0}
    """
    check_at_least("world_size", world_size, 1)
    lengths = to_int64(seq_lens)
    times: dict[int, float] = {}
    for size in (s for s in range(1, world_size + 1) if world_size % s == 0):
        if int(lengths.max(initial=0)) > size * max_tokens_per_rank:
            continue
        plan = plan_mini_batch(
            lengths, dp_size=world_size // size, sp_size=size, max_tokens_per_rank=max_tokens_per_rank, coefficient=coefficient
        )
        ideal = sum(plan.workload(r, t) for r in range(plan.dp_size) for t in range(plan.num_micro_steps)) / world_size
        work = plan.step_workload() / size * (1.0 + (communication if size > 1 else 0.0))
        times[size] = (work + overhead * coefficient * plan.num_micro_steps) / ideal if ideal else 1.0
    return times
