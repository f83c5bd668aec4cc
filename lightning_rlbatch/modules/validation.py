"""Sample and reward held-out prompts, with sums that add over batches and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.distributed.reductions import all_gather_rows, stable_hash
from lightning_rlbatch.functional.majority import majority_reward
from lightning_rlbatch.functional.pass_at_k import best_of_k
from lightning_rlbatch.modules.collection import VALIDATION_STREAM, add_model_rewards, asleep_after_errors, reward_metrics, rollout_sums
from lightning_rlbatch.modules.sampling import Rollout, RolloutSampler
from lightning_rlbatch.modules.scoring_context import scoring_context

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo import PPOModule

_BEST, _MAJORITY, _GROUPS = "best_of:", "majority_of:", "groups_of:"


def evaluate_prompts(module: "PPOModule", prompts: PromptBatch, batch_index: int) -> dict[str, float]:
    """Sample and reward this rank's share of a validation batch; collective over all ranks.

    Args:
        module: The PPO module, its engine's weights up to date.
        prompts: Prompts over all ranks.
        batch_index: Number of the batch within the pass: every pass draws the same random numbers, so that passes compare policies.

    Returns:
        Sums to add over batches and ranks; the same names on every rank.
    """
    finds = module.compute_answers if prompts.rollouts_per_prompt > 1 else None
    sampler = RolloutSampler(module, prompts, VALIDATION_STREAM + batch_index, "Validation rollouts", find_answers=finds)
    with scoring_context(module), asleep_after_errors(module):
        rollouts = sampler.sample(module.sampling(prompts, temperature=module.validation_temperature))
        if module.reward_scorer is not None:
            add_model_rewards(module, rollouts, _options(module))
    logged = sampler.reward_log.all_sums(module.meshes.world_group)
    return rollout_sums(module.component_names, rollouts) | logged | _sums_of_groups(module, prompts, rollouts)


def validation_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of all validation batches and ranks by their counts.

    Args:
        sums: What :func:`evaluate_prompts` returned, added up.

    Returns:
        What ``reward_metrics`` makes; ``val/reward/best_of_k``: the expected best reward of k tries, pass@k for rewards of 0 and 1; and
        ``val/reward/majority_of_k``: the reward of the answer that most of all k tries agree on.
    """
    of_groups: dict[str, float] = {}
    for sign in (_BEST, _MAJORITY):
        for name in (name for name in sums if name.startswith(sign)):
            count = sums[_GROUPS + name]
            of_groups |= {f"val/reward/{name.replace(':', '_')}": sums[name] / count} if count else {}
    return reward_metrics(sums, "val/") | of_groups


def _options(module: "PPOModule") -> BatchingOptions:
    options = getattr(getattr(module.trainer, "datamodule", None), "options", None)
    if not isinstance(options, BatchingOptions):  # prompts of a loader of the user's own
        options = BatchingOptions(micro_batch_size=1)
    return dataclasses.replace(options, padded=not module.remove_padding)


def _sums_of_groups(module: "PPOModule", prompts: PromptBatch, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return sums over prompts: the best of k = 2, 4, 8, ... below the rollouts of a prompt, and of all; the majority of all."""
    size = prompts.rollouts_per_prompt
    if size == 1:
        return {}
    own = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    votes = torch.tensor([-1 if rollout.answer is None else stable_hash(rollout.answer) for rollout in rollouts], dtype=torch.int64)
    rewards, _ = all_gather_rows(own, module.meshes.world_group)  # the rollouts of a prompt may lie on two ranks
    votes, _ = all_gather_rows(votes, module.meshes.world_group)
    groups = torch.arange(len(prompts)).repeat_interleave(size)
    found = {f"{_MAJORITY}{size}": majority_reward(rewards, groups, [None if vote < 0 else vote for vote in votes.tolist()])}
    for k in sorted({*(2**power for power in range(1, size.bit_length()) if 2**power < size), size}):
        found[f"{_BEST}{k}"] = best_of_k(rewards, groups, k)
    counts_here = float(module.meshes.rank == 0)  # every rank has all of them
    sums: dict[str, float] = {}
    for name, (total, count) in found.items():
        sums |= {name: counts_here * float(total), _GROUPS + name: counts_here * float(count)}
    return sums
