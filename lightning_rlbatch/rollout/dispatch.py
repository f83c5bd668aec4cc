"""Share rollouts out to the ranks that generate them, alone or as tensor-parallel groups.

Invariants:

1. Every rank owns one contiguous share of the rollouts; shares differ by at most one, whatever the numbers.
2. The ranks of a tensor-parallel group hand the same requests to their engine in the same order: rank 0's share first.
3. Each rank gets back the completions of its own share, in its own order.
"""

from collections.abc import Sequence

import torch.distributed as dist

from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import all_gather_lengths, group_rank, group_size
from lightning_rlbatch.rollout.engine import Completion, ProgressCallback, RolloutEngine, RolloutRequest, SamplingParams
from lightning_rlbatch.rollout.engine_output import checked_completions

_NO_LIMIT = -1


def contiguous_share(num_items: int, num_parts: int, part: int) -> range:
    """Return the items of one of ``num_parts`` contiguous shares whose sizes differ by at most one, larger shares first.

    Args:
        num_items: Items in all; fewer than parts leaves some shares empty.
        num_parts: Number of shares.
        part: Which share.

    Example:
        >>> [contiguous_share(7, 4, part) for part in range(4)]
        [range(0, 2), range(2, 4), range(4, 6), range(6, 7)]
    """
    least, rest = divmod(num_items, num_parts)
    start = part * least + min(part, rest)
    return range(start, start + least + (part < rest))


def check_tensor_parallel_size(world_size: int, size: int) -> None:
    """Refuse a tensor-parallel size that does not divide the ranks; communicates with nobody.

    Args:
        world_size: Number of ranks.
        size: Ranks that generate together.

    Raises:
        ValueError: Names both numbers.
    """
    if size < 1:
        raise ValueError(f"Expected rollout_tensor_parallel_size to be at least 1 but got {size}.")
    if world_size % size:
        raise ValueError(
            f"rollout_tensor_parallel_size={size} must divide the number of ranks, {world_size} (devices x num_nodes)."
            f" Use a divisor of {world_size}, or a multiple of {size} ranks."
        )


def tensor_parallel_ranks(rank: int, size: int) -> list[int]:
    """Return the ranks that generate together with ``rank``: neighbours, so that a group lies within a node.

    Example:
        >>> tensor_parallel_ranks(5, 4)
        [4, 5, 6, 7]
    """
    first = rank - rank % size
    return list(range(first, first + size))


def tensor_parallel_group(meshes: Meshes, size: int) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that generate together with this one; all ranks call it.

    Args:
        meshes: Groups and sizes of the run; its timeout is that of a group made here.
        size: Ranks per group, 1 or a divisor of the number of ranks.

    Returns:
        None for size 1; the world's or the sequence-parallel group where these have the same ranks; else a new group.

    Raises:
        ValueError: The size does not divide the number of ranks; on every rank.
    """
    check_tensor_parallel_size(meshes.world_size, size)
    if size == 1:
        return None
    if size == meshes.world_size:
        return meshes.world_group
    if size == meshes.sp_size:
        return meshes.sp_group
    ranks = tensor_parallel_ranks(meshes.rank, size)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=meshes.timeout, use_local_synchronization=True)
    return group


def gather_requests(requests: Sequence[RolloutRequest], group: dist.ProcessGroup | None) -> tuple[list[RolloutRequest], range]:
    """Tell the ranks of a tensor-parallel group each other's requests.

    Args:
        requests: This rank's share; may be empty.
        group: Ranks that generate together; None for this process alone.

    Returns:
        The requests of all ranks of the group, the same list on each of them, and the positions of this rank's own.
    """
    if group_size(group) == 1:
        return list(requests), range(len(requests))
    shares = [_decode(row) for row in all_gather_lengths(_encode(requests), group)]
    start = sum(len(share) for share in shares[: group_rank(group)])
    return [request for share in shares for request in share], range(start, start + len(requests))


def generate_together(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    sampling: SamplingParams,
    group: dist.ProcessGroup | None,
    on_progress: ProgressCallback | None = None,
) -> list[Completion]:
    """Sample this rank's requests with an engine that the ranks of a group share; all of them call it, also without requests.

    An error of the engine on one rank is raised on all ranks of the group.

    Args:
        engine: Spans the group, or serves this rank alone if the group is None.
        requests: This rank's share.
        sampling: How to draw.
        group: Ranks that generate together.
        on_progress: Told what this rank's requests became.

    Returns:
        One completion for each of this rank's requests, in order.

    Raises:
        TypeError: See :func:`checked_completions`, as for the following ones.
        ValueError: A completion that is none.
        RuntimeError: The engine returned another number of completions than it got requests.
    """
    together, own = gather_requests(requests, group)
    shared = group_size(group) > 1
    with fail_together(group, "tensor-parallel generation"):
        returned = engine.generate(together, sampling, on_progress=None if shared else on_progress)
        completions = checked_completions(engine, returned, len(together))
    kept = [completions[index] for index in own]
    if shared and on_progress is not None:
        on_progress(len(kept), sum(len(completion.token_ids) for completion in kept))
    return kept


def _encode(requests: Sequence[RolloutRequest]) -> list[int]:
    flat: list[int] = []
    for request in requests:
        limit = _NO_LIMIT if request.max_new_tokens is None else request.max_new_tokens
        flat += [len(request.prompt_ids), request.seed, limit, *request.prompt_ids]
    return flat


def _decode(flat: Sequence[int]) -> list[RolloutRequest]:
    requests, start = [], 0
    while start < len(flat):
        length, seed, limit = flat[start : start + 3]
        ids = list(flat[start + 3 : start + 3 + length])
        requests.append(RolloutRequest(ids, seed, None if limit == _NO_LIMIT else limit))
        start += 3 + length
    return requests
