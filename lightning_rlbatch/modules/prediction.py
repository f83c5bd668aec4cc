"""Generate without training: what ``trainer.predict`` returns."""

import json
from typing import TYPE_CHECKING, Any

from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.reductions import gather_strings
from lightning_rlbatch.modules.collection import asleep_after_errors
from lightning_rlbatch.modules.sampling import RolloutSampler
from lightning_rlbatch.modules.scoring_context import scoring_context
from lightning_rlbatch.modules.turns import texts

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo_collection import PPOCollection

_LISTS = ("completions", "completion_ids", "finish_reasons")  # columns with a value per completion


def generate_completions(module: "PPOCollection", prompts: PromptBatch, stream: int) -> list[dict[str, Any]]:
    """Sample completions of a prompt batch; every rank generates a share, and all of them return the same.

    Args:
        module: The PPO module, its engine's weights up to date.
        prompts: Prompts over all ranks.
        stream: Separates the random numbers of this batch from those of others.

    Returns:
        One row per prompt, in order: ``prompt`` (text, or messages), ``columns`` (the other columns of its row), and a list each of
        ``completions`` (texts, or messages), ``completion_ids`` (tokens) and ``finish_reasons`` (``"stop"`` or ``"length"``).
    """
    sampler = RolloutSampler(module, prompts, stream, "Predictions")
    with scoring_context(module), asleep_after_errors(module):
        responses = sampler.responses(sampler.own, module.sampling(prompts, temperature=module.validation_temperature), stream)
    group = module.meshes.world_group
    with fail_together(group, "decoding"):  # by the user's tokenizer, and messages of an environment may be anything
        completions = texts(prompts, responses).completions
        own = json.dumps(
            [(response.prompt, text, response.token_ids, response.finish_reason) for response, text in zip(responses, completions)]
        )
    rows: list[dict[str, Any]] = [
        {
            "prompt": prompts.prompts[index] if prompts.conversation(index) is None else prompts.conversation(index),
            "columns": prompts.columns[index],
            **{name: [] for name in _LISTS},
        }
        for index in range(len(prompts))
    ]
    for share in gather_strings(own, group):
        for prompt, *values in json.loads(share):
            for name, value in zip(_LISTS, values):
                rows[prompt][name].append(value)
    return rows
