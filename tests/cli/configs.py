"""Configurations that the tests of the command line share."""

import copy
from pathlib import Path
from typing import Any

import yaml

RUN: dict[str, Any] = {
    "trainer": {"accelerator": "cpu", "devices": 4, "strategy": {"class_path": "lightning_rlbatch.RLBatchFSDPStrategy", "init_args": {}}},
    "model": {
        "class_path": "lightning_rlbatch.PPOModule",
        "init_args": {"policy": "examples.hanoi.model.build_policy", "reward_functions": ["examples.scenarios.rewards.move_share"]},
    },
    "data": {
        "class_path": "lightning_rlbatch.RolloutDataModule",
        "init_args": {
            "train_prompts": str(Path(__file__).parents[1] / "data" / "prompts.jsonl"),
            "tokenizer": "examples.hanoi.task.HanoiTokenizer",
            "train_batch_size": 16,
            "mini_batch_size": 4,
            "rollouts_per_prompt": 8,
            "max_prompt_length": 100,
            "max_response_length": 412,
            "max_tokens_per_rank": 1024,
        },
    },
}


def config(
    *, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sound configuration with some options changed; an option set to ``...`` is removed."""
    result = copy.deepcopy(RUN)
    for target, changes in (
        (result["data"]["init_args"], data),
        (result["model"]["init_args"], model),
        (result["trainer"]["strategy"]["init_args"], strategy),
    ):
        target.update(changes or {})
        for name in [name for name, value in target.items() if value is ...]:
            del target[name]
    return result


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write a configuration and return its path."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)
