"""``rlbatch export``: turn a checkpoint into a transformers folder, without a Trainer or the number of ranks that wrote it."""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from lightning_rlbatch.callbacks.export import pretrained_state, save_pretrained
from lightning_rlbatch.modules.model_sources import load_model
from lightning_rlbatch.strategies.sharded import METADATA, fill_alone, outline, read_meta


def main(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: Command line behind ``export``.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="rlbatch export", description="Write the model of a checkpoint as a transformers folder.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint file, or folder of a sharded checkpoint")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--policy", help="folder, hub name or function of the model; default: what the module was made with")
    parser.add_argument("--prefix", default="policy.model.", help="which model of the module (policy.model., critic.model., ...)")
    options = parser.parse_args(arguments)
    try:
        state, source = read_model(options.checkpoint, options.prefix)
        source = options.policy or source
        if not isinstance(source, str):
            raise ValueError("The checkpoint does not say what the model was made from. Pass --policy FOLDER, a hub name or a function.")
        model = load_model(source)
        model.load_state_dict(state)
        state = pretrained_state(model, keep=True)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"rlbatch export: {error}", file=sys.stderr)
        return 1
    has_tokenizer = (Path(source) / "tokenizer_config.json").exists()
    save_pretrained(model, state, options.output, tokenizer=AutoTokenizer.from_pretrained(source) if has_tokenizer else None)
    print(f"{sum(value.numel() for value in model.parameters()):,} parameters written to {options.output}")
    return 0


def read_model(path: Path, prefix: str) -> tuple[dict[str, Tensor], object]:
    """Read one model's weights from a checkpoint of either kind.

    Args:
        path: File or folder.
        prefix: Where the model hangs in the module, with a dot at its end.

    Returns:
        Weights by the model's own names, and what the module's hyperparameters say the policy was made from.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It holds nothing under the prefix.
    """
    if (path / METADATA).is_file():
        meta = outline(path, read_meta(path, weights_only=True))
        stored = meta["state_dict"]
        weights = {name: torch.empty_like(value) for name, value in stored.items() if name.startswith(prefix) and isinstance(value, Tensor)}
        fill_alone(path, weights, weights.keys())
    elif path.is_file():
        meta = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        weights = stored = meta["state_dict"]
    else:
        raise FileNotFoundError(f"no checkpoint at {path}: expected a file, or a folder with {METADATA}")
    state = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not state:
        roots = sorted({name.split(".")[0] for name in stored})
        raise ValueError(f"{path} holds no weights under {prefix!r}, only under {roots}. Pass --prefix.")
    return state, meta.get("hyper_parameters", {}).get("policy")
