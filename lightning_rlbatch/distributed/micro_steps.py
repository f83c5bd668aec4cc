"""Agree on the number of micro-steps when lengths are known only locally."""

import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.reductions import collective_device


def max_num_micro_steps(local: int, group: dist.ProcessGroup | None) -> int:
    """Return the largest local number of micro-steps in a process group.

    One all-reduce (MAX), which every rank of the group must call. It lets streaming datasets, whose lengths no rank knows in full, run
    the two-layer baseline: `count_micro_steps` of the local samples, this, then `plan_rank`.

    Args:
        local: Micro-steps that this rank needs.
        group: The data-parallel group; None means the default group if there is one, else this process alone.

    Returns:
        The maximum, the same on every rank.

    Raises:
        ValueError: ``local`` is negative on some rank; the same error on every rank.
    """
    largest, smallest = local, local
    if dist.is_available() and dist.is_initialized():
        device = collective_device(dist.group.WORLD if group is None else group)
        bounds = torch.tensor([local, -local], dtype=torch.int64, device=device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = int(bounds[0]), -int(bounds[1])
    if smallest < 0:
        raise ValueError(f"`local` must not be negative but is {smallest} on some rank, here {local}.")
    return largest
