"""Reward functions that real processes import by their path."""

import os
import time
from collections.abc import Sequence


def length_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Reward long completions; fail on the rank that the environment names."""
    if os.environ.get("RLBATCH_TEST_FAIL_ON_RANK") == os.environ.get("LOCAL_RANK"):
        raise ValueError(f"the reward of rank {os.environ['LOCAL_RANK']} failed at {time.time()}")
    return [float(len(completion)) for completion in completions]
