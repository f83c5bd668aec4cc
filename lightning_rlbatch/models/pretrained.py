"""Find out within seconds whether a pretrained model or tokenizer is there, before transformers looks for it for a minute."""

import os
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.hub import has_file

from lightning_rlbatch.models.pretrained_files import is_model_without_tokenizer, without_tokenizer

MODEL_FILES = ("config.json", "adapter_config.json")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")


def require_pretrained(source: str, option: str, files: Sequence[str] = MODEL_FILES) -> None:
    """Refuse a folder or hub name that holds none of some files.

    A folder or what the hub's cache holds is found without asking the network. Anything else is asked for once, with a time limit:
    transformers itself asks for every file several times, waits in between, and never says which option was wrong.

    Args:
        source: Folder or hub name.
        option: Name of the option, for the message.
        files: One of them must be there.

    Raises:
        ValueError: Nothing was found. Names the option, what was looked at and what to do.
    """
    if Path(source).is_dir():
        if files is TOKENIZER_FILES and is_model_without_tokenizer(Path(source)):
            raise ValueError(f"{option}={source!r}: {without_tokenizer(source)}")
        if not any((Path(source) / name).is_file() for name in files):
            raise ValueError(f"{option}={source!r}: the folder has no {files[0]}, so it is not what `save_pretrained` writes.{_advice()}")
        return
    if source.count("/") > 1 or source.startswith(("/", ".", "~")):  # a hub name has one slash at most
        raise ValueError(f"{option}={source!r}: there is no such folder. {_spelling()}.")
    try:
        if any(has_file(source, name, local_files_only=True) for name in files) or any(has_file(source, name) for name in files):
            return
        found = f"the hub has no {files[0]} of that name, or could not be reached"
    except (OSError, ValueError) as error:  # ValueError: no possible name, such as a path
        found = f"on the hub: {str(error).splitlines()[0].rstrip('.')}"
    raise ValueError(f"{option}={source!r}: no such folder here, and {found}.{_advice()}")


def _advice() -> str:
    return f" {_spelling()}, download the model first, or unset HF_HUB_OFFLINE."


def _spelling() -> str:
    return f"Check the spelling (folders are looked for from {os.getcwd()}; functions are named by their whole import path)"
