"""The device meshes and process groups that data, losses and FSDP share."""

import dataclasses
import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DATA_PARALLEL = "data_parallel"  # the name that Lightning's ModelParallelStrategy looks up for its samplers
SEQUENCE_PARALLEL = "sequence_parallel"
REPLICATE = "replicate"
SHARD = "shard"


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Where this process stands among the data-parallel, sequence-parallel and FSDP ranks.

    Global rank = ``dp_rank * sp_size + sp_rank``: the ranks of a sequence-parallel group are neighbours, so that its
    all-to-alls stay inside a node. FSDP shards over all ranks, or over ``world_size / replicate_size`` neighbours (HSDP).

    Attributes:
        batch: Mesh with the dimensions ``("data_parallel", "sequence_parallel")``; None without a process group.
        fsdp: Mesh for ``fully_shard``: ``("shard",)``, or ``("replicate", "shard")`` for HSDP; None without a process group.
        dp_size: Number of data-parallel ranks: groups that hold different samples.
        dp_rank: Position among them.
        sp_size: Number of ranks that share each sample.
        sp_rank: Position among them.
        replicate_size: Number of copies of the parameters that HSDP keeps.
        dp_group: Ranks with this ``sp_rank``; None without a process group.
        sp_group: Ranks that share this rank's samples; None without a process group.
        world_group: All ranks; None without a process group.
        timeout: Longest wait of a collective in groups that are made for this run, those made later included; None is torch's default.
    """

    batch: DeviceMesh | None
    fsdp: DeviceMesh | None
    dp_size: int
    dp_rank: int
    sp_size: int
    sp_rank: int
    replicate_size: int
    dp_group: dist.ProcessGroup | None
    sp_group: dist.ProcessGroup | None
    world_group: dist.ProcessGroup | None
    timeout: datetime.timedelta | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.dp_size * self.sp_size

    @property
    def rank(self) -> int:
        """This process among all ranks."""
        return self.dp_rank * self.sp_size + self.sp_rank

    def ranks_of_dp(self, dp_rank: int) -> list[int]:
        """Return the global ranks that hold the samples of one data-parallel rank (an SP group).

        Raises:
            ValueError: There is no such data-parallel rank.
        """
        if not 0 <= dp_rank < self.dp_size:
            raise ValueError(f"`dp_rank` must be 0 to {self.dp_size - 1}, got {dp_rank}.")
        return list(range(dp_rank * self.sp_size, (dp_rank + 1) * self.sp_size))


def single_process_meshes() -> Meshes:
    """Return the meshes of a process that runs alone: sizes 1, groups and device meshes None.

    Every function of this package takes a None group to mean "this process only", so the same code runs under
    ``strategy="auto"``.
    """
    return Meshes(
        batch=None,
        fsdp=None,
        dp_size=1,
        dp_rank=0,
        sp_size=1,
        sp_rank=0,
        replicate_size=1,
        dp_group=None,
        sp_group=None,
        world_group=None,
    )


def build_meshes(
    device_type: str, *, sequence_parallel_size: int = 1, data_parallel_replicate_size: int = 1, timeout: datetime.timedelta | None = None
) -> Meshes:
    """Build the batch mesh and the FSDP mesh over all ranks of the default process group.

    All ranks must call it with the same arguments. Sizes are checked before any rank communicates, so a bad size is the
    same error on every rank. Without an initialised process group the result is `single_process_meshes`.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``, without an index.
        sequence_parallel_size: Number of neighbouring ranks that share each sample.
        data_parallel_replicate_size: Number of parameter copies; 1 shards over all ranks, more is HSDP. A copy holds whole
            sequence-parallel groups.
        timeout: Longest wait of a collective in the groups made here. None takes torch's default for the backend, which is
            NOT the default group's own timeout. A dimension that spans all ranks uses the default group as it is.

    Returns:
        The meshes, with this rank's place in them.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1 or does not divide the number of ranks.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    check_world(world_size, sequence_parallel_size=sequence_parallel_size, data_parallel_replicate_size=data_parallel_replicate_size)
    if not dist.is_initialized():
        return single_process_meshes()
    dp_size = world_size // sequence_parallel_size
    rank = dist.get_rank()
    ranks = torch.arange(world_size, dtype=torch.int)
    batch_ranks = ranks.view(dp_size, sequence_parallel_size)
    dp_rank, sp_rank = divmod(rank, sequence_parallel_size)
    dp_group = _group_of(batch_ranks[:, sp_rank].tolist(), timeout)
    sp_group = _group_of(batch_ranks[dp_rank].tolist(), timeout)
    world_group = _group_of(ranks.tolist(), timeout)
    return Meshes(
        batch=DeviceMesh.from_group([dp_group, sp_group], device_type, mesh=batch_ranks, mesh_dim_names=(DATA_PARALLEL, SEQUENCE_PARALLEL)),
        fsdp=_fsdp_mesh(device_type, world_group, data_parallel_replicate_size, timeout),
        dp_size=dp_size,
        dp_rank=dp_rank,
        sp_size=sequence_parallel_size,
        sp_rank=sp_rank,
        replicate_size=data_parallel_replicate_size,
        dp_group=dp_group,
        sp_group=sp_group,
        world_group=world_group,
        timeout=timeout,
    )


def data_parallel_meshes() -> Meshes:
    """Return the meshes of a run whose ranks are all data-parallel (DDP): no group and no device mesh is made."""
    return dataclasses.replace(
        single_process_meshes(),
        dp_size=dist.get_world_size(),
        dp_rank=dist.get_rank(),
        dp_group=dist.group.WORLD,
        world_group=dist.group.WORLD,
    )


def check_world(world_size: int, *, sequence_parallel_size: int, data_parallel_replicate_size: int) -> None:
    """Refuse sizes that do not divide the number of ranks; communicates with nobody.

    Args:
        world_size: Number of ranks.
        sequence_parallel_size: As for `build_meshes`.
        data_parallel_replicate_size: As for `build_meshes`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1 or does not divide the number of ranks.
    """
    sp_size, replicate_size = sequence_parallel_size, data_parallel_replicate_size
    for name, size in (("sequence_parallel_size", sp_size), ("data_parallel_replicate_size", replicate_size)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"`{name}` must be an integer, got {size!r}.")
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    if world_size % sp_size:
        raise ValueError(
            f"`sequence_parallel_size`={sp_size} must divide the number of ranks, {world_size}. "
            f"Use a divisor of {world_size}, or a multiple of {sp_size} ranks (devices x num_nodes)."
        )
    if (world_size // sp_size) % replicate_size:
        raise ValueError(
            f"`data_parallel_replicate_size`={replicate_size} must divide the number of data-parallel ranks, "
            f"{world_size // sp_size} ({world_size} ranks / sequence_parallel_size={sp_size}). "
            f"Use a divisor of {world_size // sp_size}, or more ranks."
        )


def _fsdp_mesh(device_type: str, world_group: dist.ProcessGroup, replicate_size: int, timeout: datetime.timedelta | None) -> DeviceMesh:
    if replicate_size == 1:
        return DeviceMesh.from_group(world_group, device_type, mesh_dim_names=(SHARD,))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = torch.arange(world_size, dtype=torch.int).view(replicate_size, -1)
    copy, position = divmod(rank, ranks.shape[1])
    groups = [_group_of(ranks[:, position].tolist(), timeout), _group_of(ranks[copy].tolist(), timeout)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))


def _group_of(ranks: list[int], timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """Return a group of these ranks, called by exactly its members (not by all ranks: at 1,024 ranks that is 100 times the calls)."""
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    # `init_device_mesh` cannot pass a timeout to the groups it makes, so they are made here and the mesh is put on top.
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return group
