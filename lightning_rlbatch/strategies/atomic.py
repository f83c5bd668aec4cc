"""Replace and remove checkpoints so that a process killed at any moment leaves the old one or the new one, never a piece."""

import ctypes
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_rlbatch.strategies.checkpoint_paths import require_checkpoint

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux' renameat2


def beside(path: Path, kind: str) -> Path:
    """Return the hidden name next to a checkpoint that holds its unfinished (``new``) or discarded (``old``) version.

    Args:
        path: The checkpoint.
        kind: ``"new"`` or ``"old"``.
    """
    return path.with_name(f".{path.name}.{kind}")


def discard(path: Path) -> None:
    """Remove a file, a link or a folder; a folder disappears at once and is emptied afterwards.

    Args:
        path: What to remove; it may be missing.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        hidden = beside(path, "old")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def publish(new: Path, path: Path) -> None:
    """Give a finished checkpoint its name, in place of what has that name now.

    Args:
        new: File or folder, complete and written to disk, in the same folder as ``path``.
        path: The name to take.
    """
    if not new.is_dir():
        if path.is_dir() and not path.is_symlink():
            discard(path)
        new.replace(path)
    elif path.is_dir() and not path.is_symlink():
        if not _exchange(new, path):  # no file system call swaps here: for a moment there is only `.NAME.old`
            old = beside(path, "old")
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            new.rename(path)
            new = old
        shutil.rmtree(new, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
        new.rename(path)
    _sync(path.parent)


@contextmanager
def writing(path: Path, new: Path) -> Iterator[None]:
    """Name the checkpoint in an error of the context, and remove its unfinished version.

    Args:
        path: The checkpoint.
        new: Its unfinished version.

    Raises:
        RuntimeError: In place of any error.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        with suppress(OSError):
            discard(new)
        cause = _cause(error)
        advice = (
            "The state of a module, data module or callback must be of tensors and plain values."
            if isinstance(cause, (pickle.PicklingError, TypeError, AttributeError))
            else "Make room on the disk, or give the callback a dirpath that can be written."
        )
        text = f"{path} could not be written ({type(cause).__name__}: {cause}). Older checkpoints are as they were. {advice}"
        raise RuntimeError(text) from error


@contextmanager
def reading(path: _PATH) -> Iterator[None]:
    """Name the checkpoint in an error of the context.

    Args:
        path: The checkpoint.

    Raises:
        RuntimeError: In place of any error.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        raise RuntimeError(f"{path} is no checkpoint, or a damaged one ({type(cause).__name__}: {cause}).") from error


def _cause(error: BaseException) -> BaseException:
    """Return the first rank's error where several ranks have written or read together."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    first = failures[0][0] if failures else error
    # `torch.save` closes its archive behind an error of the disk, and that fails with a position that says nothing.
    return first.__context__ if isinstance(first, RuntimeError) and isinstance(first.__context__, OSError) else first


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call is not None and call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _sync(path: Path) -> None:
    """Wait until a file's content or a folder's names are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_file(content: Any, path: Path) -> None:
    """Write an object with ``torch.save`` and wait until it is on disk.

    Args:
        content: What to save.
        path: File to write.
    """
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def save_bytes(content: bytes, path: Path) -> None:
    """Write a file in one step: it has its name when all of it is on disk.

    Args:
        content: What to write.
        path: File to write.
    """
    new = beside(path, "new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the files of a folder are on disk.

    Args:
        path: Folder without subfolders.
    """
    for file in path.iterdir():
        _sync(file)
    _sync(path)


def is_local(path: _PATH) -> bool:
    """Return whether a path lies in a file system that can rename, not in an object store."""
    return "file" in _protocols(path)


def _protocols(path: _PATH) -> tuple[str, ...]:
    protocol = get_filesystem(path).protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _in_place(storage: Any, location: str) -> Any:
    """Keep a tensor in host memory, as Lightning does."""
    return storage


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write local checkpoints next to their final name, then rename them; remote paths are left to Lightning.

    Lightning's own class writes into the system's temporary folder and, if that is another file system, copies from there: a
    process killed while it copies leaves half a file under the final name.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        new = beside(target, "new")
        with writing(target, new):
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(checkpoint, new)
            publish(new, target)

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Callable[..., Any] | None = _in_place, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not is_local(path):
            return super().load_checkpoint(path, map_location, weights_only)
        require_checkpoint(Path(path), reads_folders=False)
        with reading(path):  # Lightning's launchers read weights alone, too
            return super().load_checkpoint(path, map_location, weights_only)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        if is_local(path):
            discard(Path(path))
        else:
            super().remove_checkpoint(path)
