"""Stream the trainer's weights to a rollout engine, one whole parameter at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole value of every parameter; at most one gathered parameter is alive at a time.

    Gathering is collective: every rank must consume the iterator to its end.

    Args:
        module: A module that may be sharded by FSDP2, or part of one.

    Yields:
        Parameter name within ``module`` and its unsharded value, detached, on the module's device.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # a root stays gathered after a forward without gradient; its parameters are then no DTensors
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value
