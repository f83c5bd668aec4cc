"""Rollout engines: whatever samples completions of the current policy."""

from lightning_rlbatch.rollout.engine import (
    Completion,
    FinishReason,
    ProgressCallback,
    RolloutEngine,
    RolloutRequest,
    SamplingParams,
    WeightStream,
    rollout_seed,
)
from lightning_rlbatch.rollout.engine_config import EngineConfig, ReplayEngineConfig, TransformersEngineConfig, VLLMEngineConfig
from lightning_rlbatch.rollout.engine_problems import EngineContext
from lightning_rlbatch.rollout.replay_engine import RecordedCompletion, RecordingEngine, ReplayEngine
from lightning_rlbatch.rollout.transformers_engine import TransformersEngine
from lightning_rlbatch.rollout.vllm_engine import VLLMEngine

__all__ = [
    "Completion",
    "EngineConfig",
    "EngineContext",
    "FinishReason",
    "ProgressCallback",
    "RecordedCompletion",
    "RecordingEngine",
    "ReplayEngine",
    "ReplayEngineConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingParams",
    "TransformersEngine",
    "TransformersEngineConfig",
    "VLLMEngine",
    "VLLMEngineConfig",
    "WeightStream",
    "rollout_seed",
]
