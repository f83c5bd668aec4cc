"""Write the trained policy as a plain transformers folder."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rlbatch.rollout.weights import full_parameters


class PretrainedExport(Callback):
    """Save the policy with ``save_pretrained`` when training ends; ``from_pretrained`` and ``policy: FOLDER`` load it.

    Parameters are gathered one by one; rank 0 alone keeps them, in host memory.

    Args:
        dirpath: Folder to write.
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
        state = {}
        for name, value in full_parameters(model):  # collective: every rank takes part
            if trainer.is_global_zero:
                state[name] = value.cpu().clone()
        if trainer.is_global_zero:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
            attention = model.config._attn_implementation
            model.config._attn_implementation = "sdpa"  # ours is registered in this process only
            try:
                model.save_pretrained(self.dirpath, state_dict=state)
            finally:
                model.config._attn_implementation = attention
        trainer.strategy.barrier()
