"""``rlbatch export``: turn a checkpoint into a transformers folder, without a Trainer or the number of ranks that wrote it."""

import argparse
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.made import build_policy

if TYPE_CHECKING:
    from torch import Tensor

_SHARDED = "meta.pt"  # in the folder of a sharded checkpoint


def main(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: Command line behind ``export``.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="rlbatch export", description="Write the model of a checkpoint as a transformers folder.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint file, or folder of a sharded checkpoint")
    parser.add_argument("output", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--policy", help="folder, hub name or function of the model; default: what the module was made with")
    parser.add_argument("--prefix", default="policy.model.", help="which model of the module (policy.model., critic.model., ...)")
    options = parser.parse_args(arguments)
    try:
        _require_checkpoint(options.checkpoint)
        if options.output is None:
            raise ValueError(f"name the folder to write: rlbatch export {options.checkpoint} FOLDER")
        num_parameters = _export(options)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        print(f"rlbatch export: {error}", file=sys.stderr)
        return 1
    print(f"{num_parameters:,} parameters written to {options.output}")
    return 0


def _require_checkpoint(path: Path) -> None:
    """Refuse what is no checkpoint, before anything is loaded.

    Raises:
        FileNotFoundError: There is nothing.
        ValueError: It is something else; the message names checkpoints that were perhaps meant.
    """
    if path.is_file():
        if zipfile.is_zipfile(path):
            return
        is_configuration = path.suffix in (".yaml", ".yml")
        meant = sorted(_checkpoints_of(path)) if is_configuration else []
        what = "a configuration" if is_configuration else "no checkpoint"
    elif path.is_dir():
        if (path / _SHARDED).is_file():
            return
        meant = sorted(_checkpoints_in(path))
        what = "a transformers folder" if (path / "config.json").is_file() else "no checkpoint"
    else:
        raise FileNotFoundError(f"no checkpoint at {path}: expected a file, or a folder with {_SHARDED}")
    advice = f"Here: rlbatch export {meant[-1]} FOLDER." if meant else "The run's ModelCheckpoint has the folder."
    raise ValueError(f"{path} is {what}. The command needs the checkpoint of a run: a .ckpt file, or a folder with {_SHARDED}. {advice}")


def _checkpoints_in(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.glob("*.ckpt") if path.is_file() or (path / _SHARDED).is_file())


def _checkpoints_of(configuration: Path) -> Iterator[Path]:
    """Yield the checkpoints in the folders that a configuration's callbacks name."""
    try:
        callbacks = read_config(["--config", str(configuration)]).get("trainer", {}).get("callbacks")
    except (ConfigFileError, AttributeError):
        return
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        given = callback.get("init_args") if isinstance(callback, dict) else None
        if isinstance(given, dict) and isinstance(given.get("dirpath"), str):
            yield from _checkpoints_in(Path(given["dirpath"]))


def _export(options: Any) -> int:
    """Write the folder; return the number of parameters."""
    from lightning_rlbatch.callbacks.export import pretrained_state, save_pretrained, tokenizer_of

    state, source = read_model(options.checkpoint, options.prefix)
    source = options.policy or source
    if not isinstance(source, str | dict):
        raise ValueError("the checkpoint does not say what the model was made from. Pass --policy FOLDER, a hub name or a function.")
    model = build_policy(source)
    model.load_state_dict(state)
    state = pretrained_state(model, keep=True)
    num_parameters = sum(value.numel() for value in {value.data_ptr(): value for value in state.values()}.values())  # tied weights once
    save_pretrained(model, state, options.output, tokenizer=tokenizer_of(source))
    return num_parameters


def read_model(path: Path, prefix: str) -> tuple[dict[str, "Tensor"], object]:
    """Read one model's weights from a checkpoint of either kind.

    Args:
        path: File or folder.
        prefix: Where the model hangs in the module, with a dot at its end.

    Returns:
        Weights by the model's own names, and what the module's hyperparameters say the policy was made from.

    Raises:
        ValueError: It holds nothing under the prefix, or is no checkpoint of a Trainer.
    """
    import torch
    from torch import Tensor

    from lightning_rlbatch.strategies.sharded import METADATA, fill_alone, outline, read_meta

    if (path / METADATA).is_file():
        meta = outline(path, read_meta(path, weights_only=True))
        stored = meta["state_dict"]
        weights = {name: torch.empty_like(value) for name, value in stored.items() if name.startswith(prefix) and isinstance(value, Tensor)}
        fill_alone(path, weights, weights.keys())
    else:
        meta = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(meta, dict) or "state_dict" not in meta:
            raise ValueError(f"{path} holds no state_dict: expected a checkpoint that a Trainer wrote")
        weights = stored = meta["state_dict"]
    state = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not state:
        roots = sorted({name.split(".")[0] for name in stored})
        raise ValueError(f"{path} holds no weights under {prefix!r}, only under {roots}. Pass --prefix.")
    return state, meta.get("hyper_parameters", {}).get("policy")
