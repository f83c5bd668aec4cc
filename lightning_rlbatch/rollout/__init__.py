"""Rollout engines: whatever samples completions of the current policy."""

from lightning_rlbatch.rollout.engine import (
    Completion,
    RolloutEngine,
    RolloutRequest,
    SamplingParams,
    rollout_seed,
)
from lightning_rlbatch.rollout.transformers_engine import TransformersEngine

__all__ = ["Completion", "RolloutEngine", "RolloutRequest", "SamplingParams", "TransformersEngine", "rollout_seed"]
