"""DataModules and samplers that yield planned mini-batches."""

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.dumps import RolloutDump
from lightning_rlbatch.data.indices import MicroBatchDataset, MicroBatchIndices, PlannedIndices
from lightning_rlbatch.data.loader import TokenBudgetLoader
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.recording import RecordedRollouts
from lightning_rlbatch.data.replay import ReplayDataModule
from lightning_rlbatch.data.rollout import RolloutDataModule
from lightning_rlbatch.data.sampler import TokenBudgetSampler
from lightning_rlbatch.data.sft import MiniBatchDataset, SFTDataModule
from lightning_rlbatch.data.streaming import stream_mini_batches

__all__ = [
    "BatchingOptions",
    "MicroBatchDataset",
    "MicroBatchIndices",
    "MiniBatch",
    "MiniBatchDataset",
    "PlannedIndices",
    "PromptBatch",
    "RecordedRollouts",
    "ReplayDataModule",
    "RolloutDataModule",
    "RolloutDump",
    "SFTDataModule",
    "TokenBudgetLoader",
    "TokenBudgetSampler",
    "stream_mini_batches",
]
