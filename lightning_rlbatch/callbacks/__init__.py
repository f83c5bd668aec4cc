"""Callbacks that watch, record and export."""

from lightning_rlbatch.callbacks.export import PretrainedExport

__all__ = ["PretrainedExport"]
