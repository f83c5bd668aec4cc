"""Turn scored rollouts into training data: penalties, importance correction, advantages."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rlbatch.data.store import RolloutStore
from lightning_rlbatch.distributed.reductions import all_gather_rows, all_reduce_sums
from lightning_rlbatch.functional.filters import drop_samples
from lightning_rlbatch.functional.importance import effective_sample_size, effective_sample_size_sums
from lightning_rlbatch.functional.kl import kl_penalty
from lightning_rlbatch.functional.metrics import explained_variance, explained_variance_sums, token_mean
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.peers import Peers
from lightning_rlbatch.modules.base import RLBatchModule

_STATISTICS = {"value/explained_variance": explained_variance, "rollout_correction/effective_sample_size": effective_sample_size}
SAMPLED_MASK = "sampled_mask"  # the response mask before some of its tokens were left out of the loss

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo_collection import PPOCollection


class RolloutPreparation:
    """One preparation; every rank runs it together.

    Args:
        module: The PPO module.
        store: Rollouts with old log-probs, reference log-probs and values as far as the module has these models.
    """

    def __init__(self, module: "PPOCollection", store: RolloutStore) -> None:
        self.module = module
        self.store = store
        self.sums: dict[str, Tensor | float] = {}

    def run(self) -> dict[str, float]:
        """Add the fields that the update reads to the store; return metrics over all ranks."""
        module, store = self.module, self.store
        self._mismatch(store.samples)
        token_rewards = self._kl_reward(store.samples) if module.kl_reward is not None else None
        if module.drop_truncated or module.rollout_correction is not None:
            store.update(per_token={SAMPLED_MASK: store.samples["response_mask"]})
        if module.drop_truncated:
            kept = drop_samples(store.samples["response_mask"], store.samples.cu_seqlens, ~store.samples["truncated"])
            store.update(per_token={"response_mask": kept})
        if module.rollout_correction is not None:
            self._correct(store.samples)
        store.update(per_token=module.compute_advantages(store, token_rewards))
        if module.has_values:
            self._explained_variance(store.samples)
        return self._reduced()

    def _mismatch(self, samples: PackedBatch) -> None:
        if "rollout_log_probs" not in samples:  # a dump of texts has none
            return
        # k3 of the engine's distribution against the trainer's, on the engine's samples: never negative.
        difference = kl_penalty(samples["rollout_log_probs"], samples["old_log_probs"], samples["response_mask"], "k3")
        self._add("kl/rollout_mismatch", *token_mean(difference, samples["response_mask"]))

    def _kl_reward(self, samples: PackedBatch) -> Tensor:
        module = self.module
        penalty = kl_penalty(samples["old_log_probs"], samples["ref_log_probs"], samples["response_mask"], module.kl_reward_kind)
        self._add("kl/reward", *token_mean(penalty, samples["response_mask"]))
        return -module.kl_reward_coefficient * penalty

    def _correct(self, samples: PackedBatch) -> None:
        assert self.module.rollout_correction is not None
        if "rollout_log_probs" not in samples:
            raise ValueError("rollout_correction needs the engine's log-probs, and these rollouts were recorded without. Set it to null.")
        mask = samples["response_mask"]
        result = self.module.rollout_correction(samples["old_log_probs"], samples["rollout_log_probs"], mask, samples.cu_seqlens)
        for name, metric in result.metrics.items():
            self._add(f"rollout_correction/{name}", *token_mean(metric, mask))
        self._add_parts("rollout_correction/effective_sample_size", effective_sample_size_sums(result.weights, mask))
        weights = result.weights
        if self.module.rollout_correction.normalize:
            sums = {"weights": weights.double().sum(), "tokens": result.response_mask.sum()}
            totals = all_reduce_sums(sums, self.module.meshes.dp_group)
            weights = weights * (totals["tokens"] / totals["weights"] if totals["weights"] else 0.0)
        self.store.update(per_token={"response_mask": result.response_mask, "loss_weights": weights})

    def _explained_variance(self, samples: PackedBatch) -> None:
        self._add_parts(
            "value/explained_variance", explained_variance_sums(samples["values"], samples["returns"], samples["response_mask"])
        )

    def _add(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        self.sums |= {f"{name}:numerator": numerator, f"{name}:denominator": denominator}

    def _add_parts(self, name: str, parts: Tensor) -> None:
        self.sums |= {f"{name}:{index}": part for index, part in enumerate(parts)}

    def _reduced(self) -> dict[str, float]:
        totals = all_reduce_sums(self.sums, self.module.meshes.dp_group)
        metrics = {}
        for name, compute in _STATISTICS.items():
            parts = [totals[f"{name}:{index}"] for index in range(len(totals)) if f"{name}:{index}" in totals]
            if parts:
                metrics[name] = float(compute(torch.tensor(parts, dtype=torch.float64)))
        for key, total in totals.items():
            if key.endswith(":numerator"):
                name = key.removesuffix(":numerator")
                count = totals[f"{name}:denominator"]
                metrics[name] = total / count if count else math.nan  # no token anywhere: a gap in the curve, not a value
        return metrics


def data_parallel_peers(module: RLBatchModule) -> Peers:
    """Return the data-parallel ranks as the pure functions see them."""
    return Peers(gather=lambda rows: all_gather_rows(rows, module.meshes.dp_group), rank=module.meshes.dp_rank)
