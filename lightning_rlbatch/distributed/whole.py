"""Put what FSDP2 sharded together again, in no more memory than a tensor's own size."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard


def reshard(module: nn.Module) -> None:
    """Make every parameter a shard again: a root stays gathered after a forward without gradient, its parameters are then no DTensors.

    Args:
        module: Any module with FSDP2 modules in it.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, without gradient; collective over its mesh if it is sharded.

    Every rank sends its rows straight to their place in the result. ``DTensor.full_tensor`` needs the size of the result twice at its
    peak (the backend gathers into a buffer of its own), or more where the rows do not divide evenly.

    Args:
        tensor: Any shape and dtype. Sharded by rows over one dimension of its mesh, as FSDP2's parameters are by default, it takes its own
            size and no more; sharded in another way, what ``full_tensor`` takes.

    Returns:
        The same tensor if it is not sharded. Otherwise a new one on the device where the mesh communicates, also of shards that are
        offloaded to host memory.
    """
    value = tensor.detach()
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    local = value.to_local()
    sharded = [dim for dim, placement in enumerate(value.placements) if type(placement) is not Replicate]
    if not sharded:
        return local.clone()
    placement = value.placements[sharded[0]]
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0:
        moved = value if local.device.type == mesh.device_type else cast(DTensor, value.to(mesh.device_type))
        return moved.full_tensor()
    group = mesh.get_group(sharded[0])
    device = local.device if local.device.type == mesh.device_type else mesh.device_type  # the mesh sets the current device
    whole = torch.empty(value.shape, dtype=value.dtype, device=device)
    sent = []
    for rank, rows in enumerate(whole.chunk(group.size())):  # as FSDP2 cuts: the last ranks may have fewer rows, or none
        if rank == group.rank():
            rows.copy_(local)
        sent.append(dist.broadcast(rows, group=group, group_src=rank, async_op=True))
    for work in sent:
        if work is not None:
            work.wait()
    return whole
