"""Tell what a Trainer's strategy means for batches and gradients, whichever strategy it is."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_rlbatch.distributed.mesh import Meshes, data_parallel_meshes, single_process_meshes
from lightning_rlbatch.strategies.fsdp import RLBatchFSDPStrategy


def meshes_of(trainer: "pl.Trainer") -> Meshes:
    """Return the groups and sizes of a run.

    Args:
        trainer: A Trainer whose processes have been set up.

    Returns:
        The meshes of :class:`RLBatchFSDPStrategy`; all ranks data-parallel under DDP; sizes 1 on one device.
    """
    if isinstance(trainer.strategy, RLBatchFSDPStrategy):
        return trainer.strategy.meshes
    return data_parallel_meshes() if dist.is_initialized() and trainer.world_size > 1 else single_process_meshes()


def averages_over(trainer: "pl.Trainer") -> Literal["fsdp", "ddp", "none"]:
    """Return who averages the gradients, in the words of ``gradient_scale``."""
    if isinstance(trainer.strategy, RLBatchFSDPStrategy):
        return "fsdp"
    return "ddp" if isinstance(trainer.strategy, DDPStrategy) else "none"


def check_collectives(trainer: "pl.Trainer", phase: str, **facts: Any) -> None:
    """Compare what the ranks are about to do, if the strategy has ``check_collectives``; else do nothing.

    Args:
        trainer: The Trainer.
        phase: What comes next.
        **facts: What must be the same on all ranks; see :class:`CollectiveCheck`.

    Raises:
        RuntimeError: Something differs; the same error on every rank.
    """
    if isinstance(trainer.strategy, RLBatchFSDPStrategy) and trainer.strategy.collective_check is not None:
        trainer.strategy.collective_check(phase, **facts)
