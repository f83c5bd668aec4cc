"""Helpers for test suites: ours and those of users."""

from lightning_rlbatch.testing.distributed import run_distributed

__all__ = ["run_distributed"]
