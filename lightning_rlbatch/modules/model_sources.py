"""Turn what a user configures as a model into a transformers model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lightning_rlbatch.data.sources import import_callable
from lightning_rlbatch.models.pretrained import require_pretrained
from lightning_rlbatch.models.without_weights import make_without_weights

ModelSource: TypeAlias = str | Callable[[], PreTrainedModel]
"""A function without arguments that makes the model (or peft's model, with adapters in its layers), its import path, the
folder or hub name of a pretrained model, or a model, of which a copy is used (every rank then keeps the original, whole)."""


class CopiesOf:
    """Makes copies of a model, as a function would make models; a module as an attribute would be a part of the module that trains.

    Args:
        model: What configuration files make of a ``class_path`` with ``init_args``, for example.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> PreTrainedModel:
        """Return a copy."""
        return cast(PreTrainedModel, copy.deepcopy(self.model))


def as_source(given: ModelSource) -> ModelSource:
    """Return a source that a module can keep as an attribute.

    Args:
        given: What a user configured.
    """
    return CopiesOf(given) if isinstance(given, nn.Module) else given


def load_model(
    source: ModelSource, dtype: torch.dtype = torch.float32, *, without_weights: bool = False, option: str = "policy"
) -> PreTrainedModel:
    """Make a model.

    Args:
        source: See ``ModelSource``.
        dtype: Dtype of the trained (master) weights of a pretrained model.
        without_weights: True makes a model whose parameters are on the meta device, for a strategy that brings the weights from rank 0;
            one that a function makes is whole if the function needs the weights, see :func:`make_without_weights`.
        option: Name of the option that ``source`` came from, for errors.

    Returns:
        A model in training mode whose configuration nobody else shares.

    Raises:
        TypeError: The function returned something else than a transformers model.
        ValueError: There is no such folder or hub name; within seconds.
    """
    maker = import_callable(source) if isinstance(source, str) else source
    if isinstance(source, str) and maker is None:
        require_pretrained(source, option)
        without_weights = without_weights and not (Path(source) / "adapter_config.json").exists()  # the configuration has no adapters
        model: object = _without_weights(source, dtype) if without_weights else AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    else:
        make = cast(Callable[[], PreTrainedModel], maker)
        model = make_without_weights(make) if without_weights else make()
    model = _inside_of_peft(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected {option} to make a transformers PreTrainedModel but got {type(model).__name__}.")
    model.config = copy.deepcopy(model.config)  # two models made from one config object would switch attention together
    model.train()
    return model


def _inside_of_peft(model: object) -> object:
    """Return the transformers model inside of what ``peft.get_peft_model`` returns: its layers hold the adapters."""
    base = getattr(model, "get_base_model", None)
    if isinstance(model, PreTrainedModel) or not callable(base):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise TypeError(
            f"{type(model).__name__} learns prompts, which are no part of the transformers model inside it and would be lost. Use adapters"
            " that change layers, such as LoRA."
        )
    return base()


def pretrained_name(source: ModelSource) -> str | None:
    """Return the folder or hub name of a pretrained model, None for a model that a function makes.

    Args:
        source: See ``ModelSource``; a function that a path names is imported.
    """
    if not isinstance(source, str):
        return None
    return source if import_callable(source) is None else None


def pretrained_ends(source: ModelSource) -> list[int]:
    """Return the tokens that end a completion by the ``generation_config.json`` of a pretrained model.

    Args:
        source: See ``ModelSource``. There are none for a function's model, whose configuration has numbers that nobody chose.
    """
    name = pretrained_name(source)
    if name is None:
        return []
    try:
        ends = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # there is no such file
        return []
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _without_weights(source: str, dtype: torch.dtype) -> object:
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]  # transformers has no type for it


def frozen_copy(model: PreTrainedModel, *, share: bool) -> PreTrainedModel:
    """Return a copy of a model whose parameters are not trained.

    Args:
        model: Any model; on the meta device the copy is too.
        share: True lets both use the same memory: right if each is sharded, which copies, before one of them is trained.
    """
    memo: dict[int, object] = {}
    if share:
        memo |= {id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()}
    copied = copy.deepcopy(model, memo)
    copied.requires_grad_(False)
    return copied


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model has no weights yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def disable_dropout(model: nn.Module) -> list[str]:
    """Set every dropout probability inside a model to 0, in place.

    Log-probs of two passes over the same tokens would differ with dropout, and the first probability ratio would not be 1.

    Args:
        model: Any module; transformers' attention reads probabilities from attributes, other layers from ``nn.Dropout``.

    Returns:
        Names of the modules that had a probability above 0.
    """
    changed = []
    for name, module in model.named_modules():
        attributes = [key for key, value in vars(module).items() if "dropout" in key and isinstance(value, float) and value > 0]
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            attributes.append("p")
        for attribute in attributes:
            setattr(module, attribute, 0.0)
        if attributes:
            changed.append(name)
    return changed
