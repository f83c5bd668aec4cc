"""``load_from_checkpoint`` of a checkpoint that is a folder with one file per rank."""

import io
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_rlbatch.strategies.sharded import METADATA, fill_alone, outline, read_meta


class LoadsShardedCheckpoints(pl.LightningModule):
    """Makes a module from a checkpoint file or from the folder of a sharded one, in one process, without a Trainer."""

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make the module again with the arguments and the weights of a checkpoint.

        Args:
            checkpoint_path: File, or folder that ``RLBatchFSDPStrategy(save_distributed_checkpoint=True)`` wrote on any number of ranks.
                Of a folder one tensor at a time is read into the module. A subclass with an ``on_load_checkpoint`` of its own is given
                the whole checkpoint, as it may rename or change what it holds.
            map_location: As in Lightning, as the following ones.
            hparams_file: YAML or CSV file of arguments in place of the checkpoint's.
            strict: Whether names must agree.
            weights_only: False trusts a checkpoint that holds other objects than tensors and plain values.
            **kwargs: Arguments of the module in place of the checkpoint's.

        Raises:
            RuntimeError: The checkpoint is damaged, or has other names or shapes than the module.
        """
        options: dict[str, Any] = {"hparams_file": hparams_file, "strict": strict, "weights_only": weights_only}
        folder = Path(checkpoint_path) if isinstance(checkpoint_path, (str, Path)) else None
        if folder is None or not (folder / METADATA).is_file():
            return super().load_from_checkpoint(checkpoint_path, map_location, **options, **kwargs)
        content, checkpoint = io.BytesIO(), outline(folder, read_meta(folder, weights_only=weights_only is not False))
        stored = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
        needs_values = not cls.on_load_checkpoint.__module__.startswith(("lightning.", "lightning_rlbatch."))
        if needs_values:
            whole = {name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in stored.items()}
            fill_alone(folder, whole, whole.keys())
            checkpoint["state_dict"] |= whole
        torch.save(checkpoint, content)  # Lightning takes a file: small if its tensors have no memory of their own
        content.seek(0)
        module = super().load_from_checkpoint(content, map_location, **options, **kwargs)
        if not needs_values:
            fill_alone(folder, module.state_dict(), stored.keys())
        return module
