"""Sample and reward held-out prompts, with sums that add over batches and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.distributed.reductions import all_gather_rows
from lightning_rlbatch.functional.pass_at_k import best_of_k
from lightning_rlbatch.modules.collection import VALIDATION_STREAM, add_model_rewards, asleep_after_errors, reward_metrics, rollout_sums
from lightning_rlbatch.modules.sampling import Rollout, RolloutSampler
from lightning_rlbatch.modules.scoring_context import scoring_context

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo_collection import PPOCollection

_BEST, _GROUPS = "best_of:", "groups_of:"


def evaluate_prompts(module: "PPOCollection", prompts: PromptBatch, batch_index: int) -> dict[str, float]:
    """Sample and reward this rank's share of a validation batch; collective over all ranks.

    Args:
        module: The PPO module, its engine's weights up to date.
        prompts: Prompts over all ranks.
        batch_index: Number of the batch within the pass: every pass draws the same random numbers, so that passes compare policies.

    Returns:
        Sums to add over batches and ranks; the same names on every rank.
    """
    sampler = RolloutSampler(module, prompts, VALIDATION_STREAM + batch_index, "Validation rollouts")
    with scoring_context(module), asleep_after_errors(module):
        rollouts = sampler.sample(module.sampling(prompts, temperature=module.validation_temperature))
        if module.reward_scorer is not None:
            add_model_rewards(module, rollouts, _options(module))
    return rollout_sums(module.component_names, rollouts) | _sums_of_best(module, prompts, rollouts)


def validation_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of all validation batches and ranks by their counts.

    Args:
        sums: What :func:`evaluate_prompts` returned, added up.

    Returns:
        What ``reward_metrics`` makes, and ``val/reward/best_of_k``: the expected best reward of k tries, pass@k for rewards of 0 and 1.
    """
    tries = [name.removeprefix(_BEST) for name in sums if name.startswith(_BEST)]
    best = {f"val/reward/best_of_{k}": sums[_BEST + k] / sums[_GROUPS + k] for k in tries if sums[_GROUPS + k]}
    return reward_metrics(sums, "val/") | best


def _options(module: "PPOCollection") -> BatchingOptions:
    options = getattr(getattr(module.trainer, "datamodule", None), "options", None)
    if not isinstance(options, BatchingOptions):  # prompts of a loader of the user's own
        options = BatchingOptions(micro_batch_size=1)
    return dataclasses.replace(options, padded=not module.remove_padding)


def _sums_of_best(module: "PPOCollection", prompts: PromptBatch, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return sums over prompts for k = 2, 4, 8, ... below the rollouts of a prompt, and for all of them."""
    size = prompts.rollouts_per_prompt
    if size == 1:
        return {}
    own = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    rewards, _ = all_gather_rows(own, module.meshes.world_group)  # the rollouts of a prompt may lie on two ranks
    groups = torch.arange(len(prompts)).repeat_interleave(size)
    sums: dict[str, float] = {}
    for k in sorted({*(2**power for power in range(1, size.bit_length()) if 2**power < size), size}):
        total, count = best_of_k(rewards, groups, k)
        counts_here = float(module.meshes.rank == 0)  # every rank has all of them
        sums |= {f"{_BEST}{k}": counts_here * float(total), f"{_GROUPS}{k}": counts_here * float(count)}
    return sums
