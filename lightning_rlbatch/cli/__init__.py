"""The ``rlbatch`` command."""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_rlbatch.cli.main import main

if TYPE_CHECKING:
    from lightning_rlbatch.cli.lightning_cli import RLBatchCLI

__all__ = ["RLBatchCLI", "main"]


def __getattr__(name: str) -> Any:
    # `rlbatch explain` answers without Lightning.
    if name == "RLBatchCLI":
        return importlib.import_module("lightning_rlbatch.cli.lightning_cli").RLBatchCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
