"""Mini-batches of a stream whose lengths only the rank that reads it knows."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from lightning_rlbatch.distributed.micro_steps import max_num_micro_steps
from lightning_rlbatch.functional.per_rank import count_micro_steps, plan_rank
from lightning_rlbatch.functional.plan_input import check_at_least
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT

FAILED = 2**40  # more micro-steps than any rank can need: tells the other ranks to raise too

Sample = TypeVar("Sample")


def stream_mini_batches(
    samples: Iterable[Sample],
    length_of: Callable[[Sample], int],
    *,
    samples_per_rank: int,
    group: dist.ProcessGroup | None,
    max_tokens_per_rank: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    coefficient: int = DEFAULT_COEFFICIENT,
    oversize: Literal["error", "isolate"] = "error",
) -> Iterator[list[list[Sample]]]:
    """Cut a local stream into mini-batches with the same number of micro-batches on every rank.

    One all-reduce (MAX) per mini-batch agrees on the number of micro-steps and on the end: a rank whose stream is exhausted goes on with
    fillers (``[]``) until the last one is. Without all lengths samples cannot move between ranks, so that `TokenBudgetSampler` is better
    wherever lengths are known. It runs collectives while it iterates: use it in the training process, not in loader workers.

    Args:
        samples: This data-parallel rank's samples, disjoint from the other ranks' and equal on sequence-parallel peers.
        length_of: Returns the tokens of a sample.
        samples_per_rank: Samples that every rank adds to a mini-batch; the last mini-batches may hold fewer.
        group: The data-parallel group; None means the default group if there is one, else this process alone.
        max_tokens_per_rank: See `plan_mini_batch`.
        micro_batch_size: See `plan_mini_batch`.
        sp_size: See `plan_mini_batch`.
        coefficient: See `attention_workload`.
        oversize: See `plan_mini_batch`. With ``"error"`` all ranks raise when one of them reads such a sample.

    Yields:
        Micro-batches of one mini-batch; ``[]`` is a filler.

    Raises:
        ValueError: A setting is out of range, a sample exceeds the budget, or another rank failed. A rank whose stream or ``length_of``
            raises gets its own exception.

    Example:
        >>> list(stream_mini_batches(["abc", "de", "f"], len, samples_per_rank=2, group=None, max_tokens_per_rank=4))
        [[['abc'], ['de']], [['f']]]
    """
    check_at_least("samples_per_rank", samples_per_rank, 1)
    cap: dict[str, Any] = dict(
        max_tokens_per_rank=max_tokens_per_rank,
        micro_batch_size=micro_batch_size,
        sp_size=sp_size,
        coefficient=coefficient,
        oversize=oversize,
    )
    stream = iter(samples)
    while True:
        mine: list[Sample] = []
        lengths: list[int] = []
        error: Exception | None = None
        try:  # whatever fails here fails on one rank, and the others wait for its number
            mine = list(islice(stream, samples_per_rank))
            lengths = [length_of(sample) for sample in mine]
            local = count_micro_steps(lengths, **cap) if mine else 0
        except Exception as caught:
            error, local = caught, FAILED
        steps = max_num_micro_steps(local, group)
        if steps == FAILED:
            raise error or ValueError("Another rank of the data-parallel group could not read or cut its samples; its message says why.")
        if steps == 0:
            return
        yield [[mine[i] for i in bucket] for bucket in plan_rank(lengths, num_micro_steps=steps, **cap)]
