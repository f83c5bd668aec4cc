"""Tell what a path is that was given for a checkpoint, before anything is read from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH

METADATA = "meta.pt"  # the name under which Lightning's own tools (consolidate_checkpoint) look for it
_SHARDS = "*.distcp"  # torch.distributed.checkpoint's


def is_sharded(path: Path) -> bool:
    """Return whether a path is the complete folder of a sharded checkpoint.

    Args:
        path: In a local or shared file system.
    """
    return (path / METADATA).is_file()


def require_checkpoint(path: Path, *, reads_folders: bool) -> None:
    """Refuse a path that is no checkpoint, or none for this strategy; communicates with nobody.

    Args:
        path: In a local or shared file system.
        reads_folders: Whether sharded checkpoints may be read.

    Raises:
        FileNotFoundError: There is nothing, or a part is missing.
        ValueError: It is something else. Each says what it is and what to pass.
    """
    if is_sharded(path):
        if not reads_folders:
            raise ValueError(
                f"{path} is a sharded checkpoint, a folder with a file per rank, which only strategy='rlbatch_fsdp' resumes: on any number"
                " of devices, one included. With save_distributed_checkpoint=False it saves ordinary files, which every strategy reads."
                " load_from_checkpoint of the module and `rlbatch export` read the folder too."
            )
    elif path.is_dir():
        _refuse_folder(path)
    elif not path.exists():
        link = f" It is a link to {path.readlink()}, which is gone." if path.is_symlink() else ""
        raise FileNotFoundError(f"No checkpoint at {path}: expected a file, or a folder with {METADATA} (a sharded checkpoint).{link}")
    elif path.match(_SHARDS) or path.name == ".metadata" or (path.name == METADATA and any(path.parent.glob(_SHARDS))):
        raise ValueError(f"{path} is one file of a sharded checkpoint. Pass its folder, {path.parent}.")


def require_states(content: Any, path: _PATH) -> None:
    """Refuse a file that holds something else than a Lightning checkpoint.

    Args:
        content: What was read.
        path: Where.

    Raises:
        ValueError: There is no model in it.
    """
    if not isinstance(content, Mapping) or "state_dict" not in content:
        held = f"the keys {sorted(map(str, content))[:5]}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(f"{path} is no checkpoint of a Lightning run: expected a dictionary with a state_dict, but it holds {held}.")


def _refuse_folder(path: Path) -> None:
    if any(path.glob(_SHARDS)) or (path / ".metadata").exists():
        raise FileNotFoundError(
            f"{path} is a sharded checkpoint without {METADATA}, which is written last: it was not written to its end, or not all of it was"
            " copied. Pass an older checkpoint, or copy the whole folder again."
        )
    if (path / "config.json").is_file():
        raise ValueError(
            f"{path} is a transformers folder, not a checkpoint to resume from. Pass it to the module (policy) to start from it."
        )
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix == ".ckpt" and not entry.name.startswith("."))
    held = f" It holds {', '.join(names[:5])}: pass one of them." if names else ""
    raise FileNotFoundError(f"{path} is a folder, but no sharded checkpoint ({METADATA} is missing).{held}")
