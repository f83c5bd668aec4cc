"""Which pretrained models are on this machine, and which of them a name was meant for: looks at the disk only."""

import difflib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
_PREFIX, _SLASH = "models--", "--"


def _constants() -> Any:
    # By name: a dependency of transformers, which would take seconds to load. These constants take a tenth.
    return importlib.import_module("huggingface_hub.constants")


def hub_cache() -> Path:
    """Return the folder in which the hub's models are kept."""
    return Path(_constants().HF_HUB_CACHE)


def hub_is_offline() -> bool:
    """Say whether the hub may not be asked (``HF_HUB_OFFLINE``)."""
    return bool(_constants().HF_HUB_OFFLINE)


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model in the hub's cache; None if it is not there.

    Args:
        name: Such as ``Qwen/Qwen2.5-0.5B``.
    """
    snapshots = hub_cache() / (_PREFIX + name.replace("/", _SLASH)) / "snapshots"
    found = sorted(snapshots.glob("*/")) if snapshots.is_dir() else []
    return next((folder for folder in reversed(found) if any((folder / file).is_file() for file in _MODEL_FILES)), None)


def near_names(source: str) -> list[str]:
    """Return up to two folders or cached names that are spelt almost like a source.

    Args:
        source: That was not found.
    """
    names = [*_cached_names(), *_folders_beside(Path(source).expanduser())]
    lower = {name.lower(): name for name in names}
    return [lower[name] for name in difflib.get_close_matches(source.lower(), lower, 2, cutoff=0.75)]


def _cached_names() -> Iterator[str]:
    for folder in hub_cache().glob(f"{_PREFIX}*"):
        yield folder.name.removeprefix(_PREFIX).replace(_SLASH, "/", 1)


def _folders_beside(path: Path) -> Iterator[str]:
    """Yield the folders that differ from a path in one of its parts, as the path is written."""
    for depth, part in enumerate(path.parts):
        parent = Path(*path.parts[:depth])
        siblings = [folder.name for folder in parent.iterdir() if folder.is_dir()] if parent.is_dir() else []
        for name in difflib.get_close_matches(part, siblings, 3):
            found = Path(parent, name, *path.parts[depth + 1 :])
            if found.is_dir():
                yield str(found)
