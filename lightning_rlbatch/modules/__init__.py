"""LightningModules that train on planned mini-batches."""

from lightning_rlbatch.modules.base import MicroBatchOutput, RLBatchModule
from lightning_rlbatch.modules.ppo import PPOModule
from lightning_rlbatch.modules.ratio_metric import RatioMetric
from lightning_rlbatch.modules.sft import SFTModule

__all__ = ["MicroBatchOutput", "PPOModule", "RLBatchModule", "RatioMetric", "SFTModule"]
