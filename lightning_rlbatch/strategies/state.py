"""Gather the states of sharded models and optimizers into ordinary tensors, and scatter them again."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_rlbatch.distributed.whole import reshard, whole_tensor


def gathered(tensor: Tensor, *, keep: bool) -> Tensor | None:
    """Return a whole tensor in host memory; collective if it is sharded.

    Args:
        tensor: Sharded or not.
        keep: False takes part in the gathering and returns None, so that one rank alone needs the memory.
    """
    whole = whole_tensor(tensor)
    if not keep:
        return None
    return whole.cpu() if isinstance(tensor, DTensor) else whole.cpu().clone()


def full_model_state(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the whole state dict of a module; every rank takes part, one parameter is gathered at a time.

    Args:
        module: The LightningModule.
        keep: Whether this rank wants the result; others get an empty one.

    Returns:
        Name to tensor in host memory. Tied parameters share one tensor, which ``torch.save`` writes once.
    """
    reshard(module)
    seen: dict[int, Tensor | None] = {}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # a module's extra state
            state[name] = value
            continue
        if id(value) not in seen:
            seen[id(value)] = gathered(value, keep=keep)
        state[name] = seen[id(value)]
    return state if keep else {}


def load_full_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Copy a whole state dict into a module, each rank its own shards; no communication.

    Args:
        module: The LightningModule.
        state: Name to whole tensor, the same on every rank (memory-mapped, so that a rank reads what it keeps).
        strict: Whether names must agree exactly.

    Raises:
        RuntimeError: Names or shapes disagree; names some of each kind.
    """
    reshard(module)
    own = module.state_dict(keep_vars=True)
    check_names(module, own.keys(), state.keys(), strict=strict)
    others = {}
    with torch.no_grad():
        for name in own.keys() & state.keys():
            target, value = own[name], state[name]
            if not isinstance(target, DTensor):
                others[name] = value
                continue
            if target.shape != value.shape:
                raise RuntimeError(f"{name!r} has the shape {list(value.shape)} in the checkpoint but {list(target.shape)} in the module.")
            target.to_local().copy_(_own_shard(value, target, dtype=target.dtype).to_local())
    if others:
        module.load_state_dict(others, strict=False)


def check_names(module: nn.Module, own: Set[str], stored: Set[str], *, strict: bool) -> None:
    """Refuse a checkpoint of other models.

    Args:
        module: For the message.
        own: Names in the module's state dict.
        stored: Names in the checkpoint.
        strict: False accepts everything.

    Raises:
        RuntimeError: Names differ; names some of each kind.
    """
    missing, unexpected = sorted(own - stored), sorted(stored - own)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"The checkpoint does not fit {type(module).__name__}: {len(missing)} names are missing in it ({missing[:3]}) and"
            f" {len(unexpected)} are unknown to the module ({unexpected[:3]}). Build the same models, or set strict_loading = False."
        )


def _own_shard(value: Tensor, like: DTensor, *, dtype: torch.dtype) -> DTensor:
    """Return this rank's part of a whole tensor that every rank holds, on the device of ``like``."""
    mesh = like.device_mesh
    if mesh.device_type != "cpu" and like.device.type == "cpu":  # offloaded: cut in host memory
        mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    return distribute_tensor(value.to(dtype), mesh, like.placements, src_data_rank=None)


def parameters_by_id(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Yield the number that torch's optimizer state dict gives to each parameter, and the parameter."""
    yield from enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def param_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group with its parameters as numbers, as in torch's optimizer state dict."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
    return groups


def full_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """Return torch's ordinary state dict of an optimizer with whole tensors; every rank takes part.

    A fresh optimizer has an empty state; torch's own function would take a step to fill it, which counts.

    Args:
        optimizer: Its parameters may be sharded.
        keep: Whether this rank wants the result; others get an empty one.
    """
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in parameters_by_id(optimizer):
        entries = optimizer.state.get(parameter, {})
        if entries:
            state[number] = {key: gathered(value, keep=keep) if isinstance(value, Tensor) else value for key, value in entries.items()}
    return {"state": state, "param_groups": param_groups(optimizer)} if keep else {}


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an ordinary optimizer state dict, each rank its own shards; no communication.

    Args:
        optimizer: Its parameters may be sharded.
        state: As :func:`full_optimizer_state` returned it, or any torch optimizer's ``state_dict()`` with the same groups.

    Raises:
        ValueError: The state counts other parameters.
    """
    parameters = dict(parameters_by_id(optimizer))
    unknown = [number for number in state["state"] if number not in parameters]
    if unknown:
        raise ValueError(f"The checkpoint's optimizer state has {len(unknown)} parameters more than this run's {len(parameters)}.")
    shards = {
        number: {key: _state_shard(key, value, parameters[number]) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    optimizer.load_state_dict({"state": shards, "param_groups": state["param_groups"]})


def _state_shard(key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.dim() == 0:
        return value
    if value.shape != parameter.shape:
        raise ValueError(
            f"The optimizer state {key!r} of shape {list(value.shape)} cannot be cut like its parameter of shape {list(parameter.shape)}."
            " Use an optimizer whose states have the parameter's shape, such as AdamW."
        )
    return _own_shard(value, parameter, dtype=value.dtype).clone()  # the file stays mapped otherwise
