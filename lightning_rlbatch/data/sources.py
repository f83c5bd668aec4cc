"""Sources of a DataModule: what configuration files name by an import path, and validation data that is not there."""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".yaml", ".yml", ".safetensors", ".gguf", ".bin", ".pt", ".ckpt")


def import_callable(path: str) -> Callable[..., Any] | None:
    """Return the function or class that a dotted path names.

    Args:
        path: Such as ``my_project.models.build_policy``.

    Returns:
        The object, or None if the text is no import path (a folder, a file or a hub name). What is there as a file or folder, or ends like
        a data file, is not imported: ``train.jsonl`` may stand beside a ``train.py``.

    Raises:
        ValueError: The module exists but has no such attribute, or the attribute cannot be called.
        ImportError: The module exists but its own imports fail.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")) or path.endswith(_FILES) or Path(path).exists():
        return None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            return None
        raise
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{path!r}: module {module_name!r} has no function or class {name!r}.")
    return found  # type: ignore[no-any-return]  # attributes of a module found at run time have no type


class NoValidation(list[Any]):
    """What a ``val_dataloader`` without data returns: no batches, and no warning of Lightning that there are none."""

    def __init__(self) -> None:
        super().__init__()
        warnings.filterwarnings("ignore", message="Total length of `NoValidation` across ranks is zero")

    @staticmethod
    def refuse(stage: str, source: Any, option: str) -> None:
        """Raise if validation is asked for and there is nothing to validate on: it would end at once and say nothing.

        Args:
            stage: As Lightning passes it to ``setup``.
            source: The configured validation data.
            option: Its name.

        Raises:
            ValueError: ``validate`` without data.
        """
        if stage == "validate" and source is None:
            raise ValueError(f"There is nothing to validate on: set {option}.")
