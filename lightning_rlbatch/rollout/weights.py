"""Stream the trainer's weights to a rollout engine, one whole parameter at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rlbatch.distributed.whole import reshard, whole_tensor

_BASE = "base_layer."


def full_parameters(module: nn.Module, *, merge_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole value of every parameter and persistent buffer; at most one gathered parameter is alive at a time.

    Persistent buffers (the router's bias of DeepSeek-V3, for instance) belong to a checkpoint as parameters do; others follow from the
    configuration.

    Gathering is collective: every rank must consume the iterator to its end. Its peak is the largest parameter, if the consumer lets go of
    one (``del``) before it takes the next.

    Args:
        module: A module that may be sharded by FSDP2, or part of one.
        merge_adapters: Add low-rank adapters (peft's LoRA, or any with ``base_layer``, ``active_adapters`` and ``get_delta_weight``) to
            the weights that they adapt, and yield these under the names that they have without adapters: for engines that know the
            plain model. The addition takes the size of the weight twice more.

    Yields:
        Name within ``module`` (that of a parameter in several places once) and the unsharded value, detached, on the device of the
        module (of its mesh, if offloaded).

    Raises:
        ValueError: Adapters that are not, or more than, an addition to the weight (DoRA and other variants) cannot be merged like this.
    """
    reshard(module)
    # Makes every parameter a shard again too, also of an FSDP root above the module: parameters must not be taken before.
    buffers = _persistent_buffers(module)
    adapters = _adapters(module) if merge_adapters else {}
    with torch.no_grad():
        for name, parameter in (*module.named_parameters(), *buffers):
            owner = next((prefix for prefix in adapters if name.startswith(prefix)), None)
            if owner is None:
                yield name, whole_tensor(parameter)
            elif name.startswith(owner + _BASE):
                plain = name.removeprefix(owner + _BASE)
                yield owner + plain, _merged(parameter, adapters[owner]) if plain == "weight" else whole_tensor(parameter)


def check_mergeable(module: nn.Module) -> None:
    """Refuse a policy whose adapters ``full_parameters`` cannot merge.

    Args:
        module: The policy, with adapters or without.

    Raises:
        ValueError: Names the adapter and its variant.
    """
    _adapters(module)


def _adapters(module: nn.Module) -> dict[str, Any]:
    """Return layers with adapters by the prefix of their parameters' names."""
    layers = {f"{name}.": layer for name, layer in module.named_modules() if _is_adapted(layer)}
    for prefix, layer in layers.items():
        if not (hasattr(layer, "active_adapters") and callable(getattr(layer, "get_delta_weight", None))):
            raise ValueError(
                f"The adapter of {prefix[:-1]} ({type(layer).__name__}) has no active_adapters or no get_delta_weight, and cannot be added"
                " to the weight. Give it both, as peft's LoRA has, or use an engine that computes with adapters (TransformersEngine)."
            )
        variants = ", ".join(map(str, getattr(layer, "lora_variant", None) or ()))
        if variants:
            raise ValueError(
                f"The adapter of {prefix[:-1]} ({type(layer).__name__}) is a variant of LoRA ({variants}), which cannot be added to the"
                " weight. Use plain LoRA, or an engine that computes with adapters (TransformersEngine)."
            )
    return layers


def _is_adapted(layer: nn.Module) -> bool:
    names = ("enable_adapters", "get_delta_weight")
    return hasattr(layer, "base_layer") and any(callable(getattr(layer, name, None)) for name in names)


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    saved = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def _merged(weight: Tensor, layer: Any) -> Tensor:
    value = whole_tensor(weight)
    for adapter in layer.active_adapters:
        value = value + whole_tensor(layer.get_delta_weight(adapter)).to(value.dtype)
    return value
