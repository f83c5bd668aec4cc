"""Write a checkpoint in the background while training goes on."""

import copy
import threading
from collections.abc import Callable
from os import PathLike
from typing import Any


class BackgroundSave:
    """One checkpoint that is being written and takes its name when it is complete.

    What depends on the checkpoint (a link to it, the removal of an older one) is done after that, in the order given, and not at all if
    writing failed: at every moment there is a complete checkpoint.

    Args:
        path: The checkpoint's name, for errors.
        write: Writes and publishes it; runs in a thread of its own.
    """

    def __init__(self, path: str | PathLike[str], write: Callable[[], None]) -> None:
        self.path = path
        self._write = write
        self._lock = threading.Lock()
        self._afterwards: list[Callable[[], None]] = []
        self._is_done = False
        self._error: BaseException | None = None
        # A daemon: a process that ends on an error leaves an unfinished checkpoint behind, which never gets its name.
        self._thread = threading.Thread(target=self._run, daemon=True, name="rlbatch-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
            with self._lock:  # whoever adds something now waits, then finds that it is done
                for action in self._afterwards:
                    action()
                self._is_done = True
        except BaseException as error:  # torch's CheckpointException is no Exception
            self._error = error

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do something once the checkpoint is complete, or at once if it is; nothing if it failed.

        Args:
            action: Runs in the background thread, or here.
        """
        with self._lock:
            if not self._is_done:
                self._afterwards.append(action)
                return
        action()

    def join(self, timeout: float) -> None:
        """Wait for the end, whatever it is.

        Args:
            timeout: Most seconds to wait.
        """
        self._thread.join(timeout)

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            RuntimeError: It could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"The background save of {self.path} failed: {self._error}") from self._error


def snapshot(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that training cannot change any more.

    Args:
        checkpoint: A Lightning checkpoint; the tensors of its models and optimizers are copies already.
    """
    kept = {"state_dict": checkpoint.get("state_dict"), "optimizer_states": checkpoint.get("optimizer_states")}
    memo: dict[int, Any] = {id(value): value for value in _tensors(kept)}
    return copy.deepcopy(checkpoint, memo)


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if hasattr(value, "untyped_storage") else []
