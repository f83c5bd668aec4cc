"""Callbacks that watch, record and export."""

from lightning_rlbatch.callbacks.balance_monitor import BalanceMonitor
from lightning_rlbatch.callbacks.checkpoint import RLBatchModelCheckpoint
from lightning_rlbatch.callbacks.doctor import TrainingDoctor, UnhealthyTraining
from lightning_rlbatch.callbacks.doctor_rules import Diagnosis, Thresholds
from lightning_rlbatch.callbacks.export import PretrainedExport
from lightning_rlbatch.callbacks.memory_rehearsal import MemoryRehearsal
from lightning_rlbatch.callbacks.parity_check import ParityCheck
from lightning_rlbatch.callbacks.pictures import batch_plan_picture
from lightning_rlbatch.callbacks.recorder import RolloutRecorder
from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback, Rollouts
from lightning_rlbatch.callbacks.rollout_logger import RolloutLogger
from lightning_rlbatch.callbacks.throughput_monitor import ThroughputMonitor

__all__ = [
    "BalanceMonitor",
    "Diagnosis",
    "MemoryRehearsal",
    "ParityCheck",
    "PretrainedExport",
    "RLBatchModelCheckpoint",
    "RolloutCallback",
    "RolloutLogger",
    "RolloutRecorder",
    "Rollouts",
    "Thresholds",
    "ThroughputMonitor",
    "TrainingDoctor",
    "UnhealthyTraining",
    "batch_plan_picture",
]
