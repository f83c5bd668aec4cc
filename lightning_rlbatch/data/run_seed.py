"""The seed of a run's data where the user gives none."""

import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.reductions import all_gather_ints

_MASK = 2**63 - 1  # what an int64 holds


def run_seed(seed: int | None, group: dist.ProcessGroup | None) -> int:
    """Return the seed of prompt order, membership and sampling, the same on every rank; collective.

    Args:
        seed: What the user gave; None takes that of ``seed_everything`` (or ``torch.manual_seed``) on rank 0.
        group: All ranks of the run; None for a process that runs alone.

    Example:
        >>> torch.manual_seed(3) and run_seed(None, None), run_seed(7, None)
        (3, 7)
    """
    return all_gather_ints([torch.initial_seed() & _MASK], group)[0][0] if seed is None else seed
