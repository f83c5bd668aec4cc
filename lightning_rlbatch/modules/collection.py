"""Collect the rollouts of one iteration: sample, reward, exchange, score, prepare."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rlbatch.data.batching import BatchingOptions, Role
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import RolloutStore, RolloutTable, gather_table
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.reductions import all_reduce_max, all_reduce_sums
from lightning_rlbatch.functional.filters import overlong_penalty, zero_variance_groups
from lightning_rlbatch.functional.metrics import length_metrics
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules.ppo_checks import check_group_size
from lightning_rlbatch.modules.preparation import RolloutPreparation
from lightning_rlbatch.modules.reward_log import logged_means
from lightning_rlbatch.modules.reward_model import score_sequences
from lightning_rlbatch.modules.sampling import Rollout, RolloutSampler, pack_rollouts
from lightning_rlbatch.modules.scoring_context import scoring_context
from lightning_rlbatch.rollout.weights import full_parameters

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo_collection import PPOCollection

VALIDATION_STREAM = 2**32  # keeps the random numbers of validation apart from those of any iteration


class RolloutCollector:
    """One collection; every rank runs it together.

    Args:
        module: The PPO module.
        prompts: Prompts over all ranks, the same on every rank.
        iteration: RL iteration.
    """

    def __init__(self, module: "PPOCollection", prompts: PromptBatch, iteration: int) -> None:
        self.module = module
        self.iteration = iteration
        self.meshes = module.meshes
        self.sampler = RolloutSampler(module, prompts, iteration, "Rollouts")
        self.seconds: dict[str, float] = {}

    def run(self, mini_batches: Sequence[Sequence[int]], options: BatchingOptions) -> tuple[RolloutStore, dict[str, float]]:
        """Return the store of this iteration and the metrics of its collection.

        Args:
            mini_batches: Prompt indices of each mini-batch of the first epoch.
            options: How samples are cut.
        """
        module, sampler = self.module, self.sampler
        check_group_size(module, sampler.prompts.rollouts_per_prompt)
        with scoring_context(module):
            with self._timed("sync_weights"):
                sync_weights(module)
            with asleep_after_errors(module):
                rollouts = self._sample()
            if module.reward_scorer is not None:
                with self._timed("reward_model"):
                    add_model_rewards(module, rollouts, options)
            with self._timed("exchange"):
                samples = self._with_penalty(pack_rollouts(rollouts, sampler.own.start, len(module.component_names)))
                table = gather_table(samples, self._group_ids(), sampler.prompts.rollouts_per_prompt, self.meshes)
                store = RolloutStore(samples, table, [table.ids_of_prompts(members) for members in mini_batches], options, self.meshes)
                store.to(module.device)
                store.extra = {sampler.own.start + place: rollout.extra for place, rollout in enumerate(rollouts) if rollout.extra}
            with self._timed("scoring"):
                score_rollouts(module, store)
            prepared = RolloutPreparation(module, store).run()
        return store, self._metrics(store, rollouts) | prepared

    @property
    def prompts(self) -> PromptBatch:
        """The prompts that were rolled out in the end, replacements included."""
        return self.sampler.prompts

    def _sample(self) -> list[Rollout]:
        sampling = self.module.sampling(self.sampler.prompts)
        rollouts = self.sampler.sample_until_useful(sampling, self.module.max_sampling_rounds)
        if self.module.advantage.needs_baseline_rewards:
            self.sampler.greedy_baselines(rollouts, sampling)
        let_engine_sleep(self.module)  # its memory belongs to scoring and the update now
        return rollouts

    def _with_penalty(self, samples: PackedBatch) -> PackedBatch:
        buffer = self.module.overlong_buffer
        if buffer is None or not samples.num_samples:
            return samples
        # From the first sampled token to the end: the limit bounds the turns of an environment too.
        lengths = torch.stack([mask.cummax(0).values.sum() for mask in samples.split_per_sample("response_mask")])
        limit = self.sampler.prompts.max_response_length
        penalty = overlong_penalty(lengths, max_length=limit, buffer=buffer, factor=self.module.overlong_factor)
        return samples.with_fields(per_sample={"reward": samples["reward"] + penalty})

    def _group_ids(self) -> Tensor:
        positions = torch.tensor(self.sampler.prompts.positions, dtype=torch.int64)
        return positions.repeat_interleave(self.sampler.prompts.rollouts_per_prompt)

    def _metrics(self, store: RolloutStore, rollouts: Sequence[Rollout]) -> dict[str, float]:
        table, own = store.table, rollout_sums(self.module.component_names, rollouts)
        own |= self.sampler.reward_log.all_sums(self.meshes.world_group)
        sums = all_reduce_sums(own, self.meshes.world_group)
        metrics = reward_metrics(sums) | {f"length/{name}": value for name, value in _lengths(table).items()}
        equal = zero_variance_groups(table.rewards, table.group_ids)
        groups = max(1, int(equal.num_groups))
        valid = table.rewards[~table.rewards.isnan()]
        seconds = self.seconds | self.sampler.seconds
        return (
            metrics
            | {
                "reward/mean": float(valid.mean()) if len(valid) else math.nan,
                "reward/std": float(valid.std(unbiased=False)) if len(valid) else math.nan,
                "reward/zero_variance_all_right": int(equal.num_all_right) / groups,
                "reward/zero_variance_all_wrong": int(equal.num_all_wrong) / groups,
                "reward/resampled_groups": float(self.sampler.num_resampled_groups),
                "train/prompt_epoch": self.prompts.prompt_epoch,
            }
            | all_reduce_max({f"time/{phase}": value for phase, value in seconds.items()}, self.meshes.world_group)
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def score_rollouts(module: "PPOCollection", store: RolloutStore) -> None:
    """Add old log-probs, reference log-probs and values to a store, as far as the module has these models; collective.

    Args:
        module: The PPO module.
        store: Rollouts on the ranks that train on them.
    """
    for name, forward in module.scoring_passes().items():
        role: Role = "critic" if name == "values" and module.critic is not None else "log_prob"
        store.update(per_token=store.score(_named(name, forward), role=role))


def add_model_rewards(module: "PPOCollection", rollouts: Sequence[Rollout], options: BatchingOptions) -> None:
    """Add the reward model's scores to rollouts, in place; collective over all ranks.

    Args:
        module: The PPO module, with a reward model.
        rollouts: This rank's, any number.
        options: How they are cut; the forward-only budget applies.
    """
    assert module.reward_scorer is not None
    sequences = [[*rollout.prompt_ids, *rollout.completion.token_ids] for rollout in rollouts]
    scores = score_sequences(sequences, module.reward_scorer, options, module.meshes, module.device)
    for rollout, score in zip(rollouts, scores):
        weighted = module.reward_model_weight * score
        rollout.reward = weighted if math.isnan(rollout.reward) else rollout.reward + weighted
        rollout.components.append(score)


def sync_weights(module: "PPOCollection") -> None:
    """Copy the trained policy into the module's rollout engine; collective over all ranks, and an error of one is an error of all.

    Args:
        module: The PPO module, its policy sharded or not.
    """
    engine, error = module.rollout_engine, None
    weights = full_parameters(module.policy.model, merge_adapters=getattr(engine, "merges_adapters", False))
    with asleep_after_errors(module):
        try:
            engine.wake()
            engine.update_weights(weights)
        except Exception as caught:
            error = caught
        for _ in weights:  # what an engine left: the other ranks wait for this one's part of each parameter
            pass
        with fail_together(module.meshes.world_group, "updating the engine's weights"):
            if error is not None:
                raise error


def let_engine_sleep(module: "PPOCollection") -> None:
    """Let the module's rollout engine sleep; all ranks call it, and an error of one is an error of all.

    Args:
        module: The PPO module.
    """
    with fail_together(module.meshes.world_group, "letting the engine sleep"):
        module.rollout_engine.sleep()


@contextmanager
def asleep_after_errors(module: "PPOCollection") -> Iterator[None]:
    """Let the module's engine sleep if what samples with it fails or is stopped: the process may go on, and wants the memory.

    Args:
        module: The PPO module.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the error to be told is the first one
            module.rollout_engine.sleep()
        raise


def rollout_sums(names: Sequence[str], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return counts and sums of some rollouts, to add over batches and ranks.

    Args:
        names: Names of the rewards' components.
        rollouts: Any number, none included.
    """
    sums = {
        "rollouts": float(len(rollouts)),
        "tokens": float(sum(sum(rollout.response_mask) for rollout in rollouts)),
        "truncated": float(sum(rollout.completion.finish_reason == "length" for rollout in rollouts)),
    }
    totals = [rollout.reward for rollout in rollouts if not math.isnan(rollout.reward)]
    sums |= {"rewards": math.fsum(totals), "rated": float(len(totals))}
    for position, name in enumerate(names):
        verdicts = [rollout.components[position] for rollout in rollouts if not math.isnan(rollout.components[position])]
        sums |= {f"reward:{name}": math.fsum(verdicts), f"verdicts:{name}": float(len(verdicts))}
    return sums


def reward_metrics(sums: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Divide sums over all rollouts by their counts.

    Args:
        sums: What :func:`rollout_sums` made, summed over batches and ranks.
        prefix: Prefix of the metrics' names.

    Returns:
        Mean reward and mean of each function (NaN without any verdict), what functions logged, mean response length and share of
        truncated responses.
    """
    rewards = {key.removeprefix("reward:"): value for key, value in sums.items() if key.startswith("reward:")}
    metrics = {f"{prefix}reward/{name}": _quotient(value, sums[f"verdicts:{name}"]) for name, value in rewards.items()}
    metrics |= logged_means(sums, prefix)
    metrics[f"{prefix}reward/mean"] = _quotient(sums["rewards"], sums["rated"])
    metrics[f"{prefix}length/mean"] = _quotient(sums["tokens"], sums["rollouts"])
    metrics[f"{prefix}length/truncated"] = _quotient(sums["truncated"], sums["rollouts"])
    return metrics


def _quotient(total: float, count: float) -> float:
    return total / count if count else math.nan  # nothing was counted: a gap in the curve, not a value of 0


def _lengths(table: RolloutTable) -> dict[str, float]:
    return length_metrics(torch.tensor(table.num_response_tokens), table.truncated)


def _named(name: str, forward: Callable[[PackedBatch], Tensor | dict[str, Tensor]]) -> Callable[[PackedBatch], dict[str, Tensor]]:
    def fields(micro_batch: PackedBatch) -> dict[str, Tensor]:
        result = forward(micro_batch)
        return result if isinstance(result, dict) else {name: result}

    return fields
