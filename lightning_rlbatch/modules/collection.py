"""Collect the rollouts of one iteration: sample, reward, exchange, score, estimate advantages."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.prompts import PromptBatch, contiguous_share
from lightning_rlbatch.data.store import SAMPLE_ID, RolloutStore, RolloutTable, gather_table
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.reductions import all_reduce_max, all_reduce_sums
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules.progress import rollout_progress
from lightning_rlbatch.modules.scoring_context import scoring_context
from lightning_rlbatch.rollout.engine import Completion, RolloutRequest, SamplingParams, rollout_seed
from lightning_rlbatch.rollout.weights import full_parameters

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo import PPOModule

VALIDATION_STREAM = 2**32  # keeps the random numbers of validation apart from those of any iteration


class RolloutCollector:
    """One collection. Every method that communicates is called by every rank, in the same order.

    Args:
        module: The PPO module.
        prompts: Prompts over all ranks; the same object content on every rank.
        stream: Number that separates the random numbers of this collection from all others (the iteration).
    """

    def __init__(self, module: "PPOModule", prompts: PromptBatch, stream: int) -> None:
        self.module = module
        self.prompts = prompts
        self.stream = stream
        self.meshes = module.meshes
        self.seconds: dict[str, float] = {}
        self.own = contiguous_share(prompts.num_samples, self.meshes.world_size, self.meshes.rank)

    # -- training --------------------------------------------------------------------------------------------------------------

    def run(self, mini_batches: Sequence[Sequence[int]], options: BatchingOptions) -> tuple[RolloutStore, dict[str, float]]:
        """Return the store of this iteration and the metrics of its collection.

        Args:
            mini_batches: Prompt indices of each mini-batch of the first epoch.
            options: How samples are cut.
        """
        module = self.module
        with scoring_context(module):
            with self._timed("sync_weights"):
                sync_weights(module)
            completions, rewards, by_name = self._sample(module.sampling(self.prompts), "Rollouts")
            samples = self._pack(completions, rewards)
            with self._timed("exchange"):
                table = gather_table(samples, self._group_ids(), self.prompts.rollouts_per_prompt, self.meshes)
                store = RolloutStore(samples, table, [table.ids_of_prompts(members) for members in mini_batches], options, self.meshes)
                store.to(module.device)
            with self._timed("scoring"):
                self._score(store)
            store.update(per_token=module.compute_advantages(store))
        return store, self._metrics(table, completions, by_name)

    def _group_ids(self) -> Tensor:
        return torch.tensor(self.prompts.positions, dtype=torch.int64).repeat_interleave(self.prompts.rollouts_per_prompt)

    def _pack(self, completions: Sequence[Completion], rewards: Sequence[float]) -> PackedBatch:
        rows = [
            self._row(self.prompts.prompt_ids[index // self.prompts.rollouts_per_prompt], completion, reward, index)
            for index, completion, reward in zip(self.own, completions, rewards)
        ]
        if not rows:
            template = self._row([0], Completion([0], [0.0], "stop"), 0.0, 0)
            return PackedBatch.empty(PackedBatch.from_samples([template]).schema)
        return PackedBatch.from_samples(rows)

    @staticmethod
    def _row(prompt_ids: list[int], completion: Completion, reward: float, sample_id: int) -> dict[str, Tensor]:
        prompt = len(prompt_ids)
        return {
            "input_ids": torch.tensor([*prompt_ids, *completion.token_ids], dtype=torch.int64),
            "response_mask": torch.tensor([False] * prompt + [True] * len(completion.token_ids)),
            "rollout_log_probs": torch.tensor([0.0] * prompt + list(completion.log_probs), dtype=torch.float32),
            "reward": torch.tensor(reward, dtype=torch.float64),
            SAMPLE_ID: torch.tensor(sample_id, dtype=torch.int64),
        }

    def _score(self, store: RolloutStore) -> None:
        module = self.module
        temperature = module.temperature
        fields = {"old_log_probs": lambda micro: module.policy(micro, temperature=temperature).log_probs}
        if (reference := module.reference) is not None:
            fields["ref_log_probs"] = lambda micro: reference(micro, temperature=temperature).log_probs
        if (critic := module.critic) is not None:
            fields["values"] = lambda micro: critic(micro, with_log_probs=False, with_values=True).values
        for name, forward in fields.items():
            store.update(per_token=store.score(_named(name, forward)))

    # -- sampling and rewards ------------------------------------------------------------------------------------------------------

    def _sample(self, sampling: SamplingParams, description: str) -> tuple[list[Completion], list[float], dict[str, list[float]]]:
        size = self.prompts.rollouts_per_prompt
        requests = [
            RolloutRequest(
                self.prompts.prompt_ids[index // size],
                rollout_seed(self.prompts.seed, self.stream, self.prompts.positions[index // size], index % size),
            )
            for index in self.own
        ]
        # The phases of one rank only (its own prompts, its own reward calls) fail on every rank, or none would notice.
        progress = rollout_progress(self.module.trainer, len(self.own), description)
        with fail_together(self.meshes.world_group, "generation"), self._timed("generation"), progress as update:
            completions = self.module.rollout_engine.generate(requests, sampling, on_progress=update)
        with fail_together(self.meshes.world_group, "rewards"), self._timed("rewards"):
            chosen = [index // size for index in self.own]
            names = {name for row in self.prompts.columns for name in row}
            texts = [self.prompts.tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in completions]
            rewards, by_name = self.module.compute_rewards(
                prompts=[self.prompts.prompts[prompt] for prompt in chosen],
                completions=texts,
                completion_ids=[completion.token_ids for completion in completions],
                columns={name: [self.prompts.columns[prompt].get(name) for prompt in chosen] for name in sorted(names)},
            )
        return completions, rewards, by_name

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    # -- metrics ---------------------------------------------------------------------------------------------------------------------

    def _metrics(self, table: RolloutTable, completions: Sequence[Completion], by_name: dict[str, list[float]]) -> dict[str, float]:
        metrics = reward_metrics(all_reduce_sums(self._sums(completions, by_name), self.meshes.world_group), "reward", "length")
        lengths = sorted(table.num_response_tokens)
        metrics["length/max"] = float(lengths[-1])
        metrics["length/p95"] = float(lengths[max(0, -(-95 * len(lengths) // 100) - 1)])
        metrics["reward/zero_variance_positive"], metrics["reward/zero_variance_zero"] = zero_variance_groups(table)
        valid = [reward for reward in table.rewards.tolist() if not math.isnan(reward)]
        metrics["reward/std"] = statistics.pstdev(valid) if valid else 0.0
        slowest = all_reduce_max({f"time/{phase}": seconds for phase, seconds in self.seconds.items()}, self.meshes.world_group)
        return metrics | slowest

    @staticmethod
    def _sums(completions: Sequence[Completion], by_name: dict[str, list[float]]) -> dict[str, float]:
        sums = {
            "rollouts": float(len(completions)),
            "tokens": float(sum(len(completion.token_ids) for completion in completions)),
            "truncated": float(sum(completion.finish_reason == "length" for completion in completions)),
        }
        for name, rewards in by_name.items():
            valid = [reward for reward in rewards if not math.isnan(reward)]
            sums |= {f"reward:{name}": math.fsum(valid), f"verdicts:{name}": float(len(valid))}
        return sums

    # -- validation --------------------------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Sample and reward this rank's share of validation prompts.

        Returns:
            Sums to add over batches and ranks and to hand to :func:`reward_metrics`; the same names on every rank.
        """
        sampling = self.module.sampling(self.prompts, temperature=self.module.validation_temperature)
        with scoring_context(self.module):
            completions, _, by_name = self._sample(sampling, "Validation rollouts")
        return self._sums(completions, by_name)


def sync_weights(module: "PPOModule") -> None:
    """Copy the trained policy into the module's rollout engine; collective over all ranks.

    Args:
        module: The PPO module, its policy sharded or not.
    """
    module.rollout_engine.wake()
    module.rollout_engine.update_weights(full_parameters(module.policy.model))


def reward_metrics(sums: Mapping[str, float], reward_prefix: str, length_prefix: str) -> dict[str, float]:
    """Divide sums over all rollouts by their counts.

    Args:
        sums: Summed over batches and ranks.
        reward_prefix: Prefix of the mean reward per function.
        length_prefix: Prefix of the response lengths, in tokens.
    """
    metrics = {
        f"{length_prefix}/mean": sums["tokens"] / max(1.0, sums["rollouts"]),
        f"{length_prefix}/truncated": sums["truncated"] / max(1.0, sums["rollouts"]),
    }
    for key in sums:
        if key.startswith("reward:"):
            name = key.removeprefix("reward:")
            metrics[f"{reward_prefix}/{name}"] = sums[key] / max(1.0, sums[f"verdicts:{name}"])
    return metrics


def zero_variance_groups(table: RolloutTable) -> tuple[float, float]:
    """Return the shares of groups that teach nothing: all rollouts equally rewarded, above 0 or not.

    Args:
        table: Lengths and rewards of all rollouts.
    """
    groups: dict[int, list[float]] = {}
    for group, reward in zip(table.group_ids.tolist(), table.rewards.tolist()):
        if not math.isnan(reward):
            groups.setdefault(group, []).append(reward)
    equal = [rewards[0] for rewards in groups.values() if len(rewards) > 1 and min(rewards) == max(rewards)]
    count = max(1, len(groups))
    return sum(reward > 0 for reward in equal) / count, sum(reward <= 0 for reward in equal) / count


def _named(name: str, forward: Callable[[PackedBatch], Tensor]) -> Callable[[PackedBatch], dict[str, Tensor]]:
    return lambda micro_batch: {name: forward(micro_batch)}
