"""The ``rlbatch`` command."""

from lightning_rlbatch.cli.main import RLBatchCLI, main

__all__ = ["RLBatchCLI", "main"]
