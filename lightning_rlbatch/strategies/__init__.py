"""The FSDP2 strategy, registered with Lightning as ``rlbatch_fsdp``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_rlbatch.strategies.fsdp import RLBatchFSDPStrategy
from lightning_rlbatch.strategies.precision import FSDPMixedPrecision

# Lightning has no entry point for strategies: a name exists once the module that registers it is imported.
RLBatchFSDPStrategy.register_strategies(StrategyRegistry)

__all__ = ["FSDPMixedPrecision", "RLBatchFSDPStrategy"]
