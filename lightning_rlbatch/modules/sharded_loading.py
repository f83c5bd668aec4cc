"""``load_from_checkpoint`` of a checkpoint that is a folder with one file per rank."""

import io
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch
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
                Of a folder one tensor at a time is read into the module; ``on_load_checkpoint`` sees names and shapes, not values.
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
        content, empty = io.BytesIO(), outline(folder, read_meta(folder, weights_only=weights_only is not False))
        torch.save(empty, content)  # Lightning takes a file: small, since its tensors have no memory of their own
        content.seek(0)
        module = super().load_from_checkpoint(content, map_location, **options, **kwargs)
        fill_alone(folder, module.state_dict(), empty["state_dict"].keys())
        return module
