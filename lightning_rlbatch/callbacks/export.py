"""Write the trained policy as a plain transformers folder."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import has_file
from typing_extensions import override

from lightning_rlbatch.modules.adapters import adapter_layers
from lightning_rlbatch.rollout.weights import full_parameters
from lightning_rlbatch.strategies.atomic import beside, discard, publish
from lightning_rlbatch.strategies.state import full_model_state


class PretrainedExport(Callback):
    """Save the policy with ``save_pretrained`` when training ends; ``from_pretrained`` and ``policy: FOLDER`` load it.

    The folder holds ``model.safetensors``, the configuration, the generation configuration and the tokenizer: the data module's if it is
    a transformers one, else that of the pretrained model which the policy was made of. Adapters (LoRA) are added to the weights that they
    adapt: the folder is that of the plain model.
    Parameters are gathered one by one; rank 0 alone keeps them, in host memory.

    Args:
        dirpath: Folder to write; it is replaced as a whole.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        model = getattr(getattr(pl_module, "policy", None), "model", None)
        if not isinstance(model, PreTrainedModel):
            raise MisconfigurationException(
                f"PretrainedExport saves module.policy.model, a transformers model, but got {type(model).__name__}."
            )
        state = pretrained_state(model, keep=trainer.is_global_zero)
        if trainer.is_global_zero:
            datamodule: Any = getattr(trainer, "datamodule", None)
            tokenizer = getattr(datamodule, "tokenizer", None) or tokenizer_of(getattr(pl_module, "policy_source", None))
            save_pretrained(model, state, Path(self.dirpath), tokenizer=tokenizer)
        trainer.strategy.barrier()


def pretrained_state(model: PreTrainedModel, *, keep: bool) -> dict[str, Tensor]:
    """Return the whole weights of a model by the names of the plain model, without adapters; collective if the model is sharded.

    Args:
        model: A model, with adapters or without.
        keep: Whether this rank wants the result; others get an empty one.

    Raises:
        ValueError: Adapters that are more than an addition to the weight.
    """
    if not adapter_layers(model):
        return full_model_state(model, keep=keep)
    state = {}
    for name, value in full_parameters(model, merge_adapters=True):
        if keep:
            state[name] = value.cpu()
        del value
    return state


def tokenizer_of(source: object) -> Any:
    """Return the tokenizer of a pretrained model, from this machine; None if there is none.

    Args:
        source: What a model was made of: a folder, a hub name, or anything else.
    """
    if not isinstance(source, str):
        return None
    try:
        is_here = has_file(source, "tokenizer_config.json", local_files_only=True)
        return AutoTokenizer.from_pretrained(source, local_files_only=True) if is_here else None
    except (OSError, ValueError):  # not the name of a model, or one that transformers cannot load: the weights matter more
        return None


def save_pretrained(model: PreTrainedModel, state: dict[str, Tensor], folder: Path, *, tokenizer: Any = None) -> None:
    """Write a model with given weights as a transformers folder, in place of what has that name.

    Args:
        model: Gives the configurations; its own weights do not matter.
        state: Whole weights by the model's names.
        folder: Where to.
        tokenizer: Saved too if it has ``save_pretrained``.
    """
    new = beside(folder, "new")
    discard(new)
    new.mkdir(parents=True)
    attention = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"  # ours is registered in this process only
    try:
        model.save_pretrained(new, state_dict=state)
    finally:
        model.config._attn_implementation = attention
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(new)
    publish(new, folder)
