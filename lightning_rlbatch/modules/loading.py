"""``load_from_checkpoint``: of folders with one file per rank too, and clear about arguments that no checkpoint can hold."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import Self, override

from lightning_rlbatch.modules.hyperparameters import required_arguments
from lightning_rlbatch.modules.own_hooks import KeepsOwnHooks
from lightning_rlbatch.modules.restarts import reopen_epoch
from lightning_rlbatch.strategies.atomic import is_local
from lightning_rlbatch.strategies.checkpoint_paths import is_sharded, require_checkpoint
from lightning_rlbatch.strategies.sharded import fill_alone, outline, read_meta

_CLASS = "_class_path"  # among the arguments that LightningCLI records
_UNRECORDED = "rlbatch_unrecorded_arguments"  # key in Lightning checkpoints


class LoadsFromCheckpoints(KeepsOwnHooks):
    """Makes a module from a checkpoint file or from the folder of a sharded one, in one process, without a Trainer.

    Attributes:
        unrecorded_arguments: Arguments of this module that its checkpoints cannot hold, such as a lambda.
    """

    unrecorded_arguments: Sequence[str] = ()
    _unrecorded_in_checkpoint: Sequence[str] = ()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_UNRECORDED] = list(self.unrecorded_arguments)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._unrecorded_in_checkpoint = checkpoint.get(_UNRECORDED, ())
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            reopen_epoch(checkpoint, self.trainer)
            changed = _changed(checkpoint.get("hyper_parameters", {}), dict(self.hparams))
            if changed:
                rank_zero_info(f"Resuming with other options of {type(self).__name__}: {'; '.join(changed)}.")

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
            TypeError: The checkpoint lacks arguments that have no default, because they could not be recorded; the message names them.
            RuntimeError: The checkpoint is damaged, or has other names or shapes than the module.
        """
        options: dict[str, Any] = {"hparams_file": hparams_file, "strict": strict, "weights_only": weights_only}
        path = Path(checkpoint_path) if isinstance(checkpoint_path, (str, Path)) and is_local(checkpoint_path) else None
        if path is not None:
            require_checkpoint(path, reads_folders=True)
        try:
            if path is not None and is_sharded(path):
                module = cls._load_from_folder(path, map_location, options, kwargs)
            else:
                module = super().load_from_checkpoint(checkpoint_path, map_location, **options, **kwargs)
        except Exception as error:
            recorded = None if path is None or hparams_file is not None else _recorded(path)
            missing = [] if recorded is None else sorted(required_arguments(cls) - recorded - kwargs.keys())
            if not missing:
                raise
            raise TypeError(f"{path} does not hold {' and '.join(missing)}, which {cls.__name__} needs. {_advice(cls, missing)}") from error
        lost = [name for name in module._unrecorded_in_checkpoint if name not in kwargs]
        if lost:
            rank_zero_warn(
                f"{', '.join(lost)}: what the run had could not be recorded, so {cls.__name__} has the default. {_advice(cls, lost)}"
            )
        return module

    @classmethod
    def _load_from_folder(cls, folder: Path, map_location: Any, options: dict[str, Any], arguments: dict[str, Any]) -> Self:
        content, checkpoint = io.BytesIO(), outline(folder, read_meta(folder, weights_only=options["weights_only"] is not False))
        stored = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
        needs_values = not cls.on_load_checkpoint.__module__.startswith(("lightning.", "lightning_rlbatch."))
        if needs_values:
            whole = {name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in stored.items()}
            fill_alone(folder, whole, whole.keys())
            checkpoint["state_dict"] |= whole
        torch.save(checkpoint, content)  # Lightning takes a file: small if its tensors have no memory of their own
        content.seek(0)
        module = super().load_from_checkpoint(content, map_location, **options, **arguments)
        if not needs_values:
            fill_alone(folder, module.state_dict(), stored.keys())
        return module


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words which recorded arguments differ; nothing of records in different forms, of LightningCLI and of Python."""
    if (_CLASS in before) != (_CLASS in now):
        return []
    old, new = _leaves(before), _leaves(now)
    return [
        f"{'class' if name == _CLASS else name} was {str(old.get(name))[:80]} and is {str(new.get(name))[:80]}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name.partition(".")[0] in before.keys() & now.keys()
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested arguments by their paths, ``advantage.init_args.lam``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
    return found


def _recorded(path: Path) -> set[str] | None:
    """Return the names of the arguments in a checkpoint, file or folder, without its weights; None if it holds more than plain values."""
    try:
        if is_sharded(path):
            meta = read_meta(path, weights_only=True)
        else:
            meta = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # a file may be anything; the error that led here says more
        return None
    return set(meta.get("hyper_parameters", {}))


def _advice(cls: type, names: Sequence[str]) -> str:
    return (
        "A lambda, a function of the script that ran, or an object has no import path to record. Pass it:"
        f" {cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in names)})."
    )
