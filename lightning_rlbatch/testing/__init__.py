"""Helpers for test suites: ours and those of users."""

from lightning_rlbatch.testing.distributed import run_distributed
from lightning_rlbatch.testing.parity import ParityReport, assert_parity, compare_layouts, random_batch

__all__ = ["ParityReport", "assert_parity", "compare_layouts", "random_batch", "run_distributed"]
