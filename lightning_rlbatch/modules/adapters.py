"""Score with a policy's adapters switched off: the base model is the reference, and no second copy of it is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def adapter_layers(model: nn.Module) -> list[Any]:
    """Return the adapter layers inside a model: those of peft (LoRA and kin), and any other with the same two names.

    Args:
        model: A model, for example one that ``peft.inject_adapter_in_model`` has changed.

    Returns:
        Modules with a ``base_layer`` and a method ``enable_adapters(enabled: bool)``.
    """
    return [layer for layer in model.modules() if hasattr(layer, "base_layer") and callable(getattr(layer, "enable_adapters", None))]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base layers alone inside of the context; what is trained is the same afterwards.

    Args:
        model: A model with adapter layers.
    """
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    layers = adapter_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])  # peft switches this too
