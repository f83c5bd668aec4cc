"""The update of PPO and its kin: what one micro-batch contributes to the loss."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.functional import PolicyLoss
from lightning_rlbatch.functional.aggregation import AggregationMode, Denominators, aggregate
from lightning_rlbatch.functional.kl import kl_penalty, needs_logits
from lightning_rlbatch.functional.losses import log_ratio, ratio_metrics
from lightning_rlbatch.functional.losses_covariance import token_keys
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.value import value_loss
from lightning_rlbatch.models.full_kl import ReferenceHead
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.modules.adapters import adapters_off
from lightning_rlbatch.modules.base import MicroBatchOutput, MicroBatchStep, RLBatchModule
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.modules.model_sources import ModelSource
from lightning_rlbatch.modules.preparation import data_parallel_peers
from lightning_rlbatch.modules.scoring_context import scoring_context


class PPOUpdate(RLBatchModule):
    """Losses of policy and critic on micro-batches of scored rollouts; :class:`PPOModule` sets the attributes.

    Attributes:
        policy: Scorer of the trained policy.
        critic: Scorer with a trunk of its own, or None.
    """

    policy: TokenScorer
    critic: TokenScorer | None
    policy_loss: PolicyLoss
    loss_aggregation: AggregationMode
    entropy_coefficient: float
    kl_coefficient: float
    kl_kind: str
    rollout_correction: RolloutCorrection | None
    value_coefficient: float
    value_clip: float | None
    temperature: float
    critic_source: ModelSource | None
    _frozen: dict[str, TokenScorer]

    @property
    def has_full_kl(self) -> bool:
        """Whether the KL penalty in the loss is summed over the vocabulary: the reference then runs in every micro-step."""
        return self.kl_coefficient > 0 and needs_logits(self.kl_kind)

    @property
    def has_values(self) -> bool:
        """Whether there is a value function, on its own trunk or on the policy's."""
        return self.critic_source is not None

    @override
    def update_scorers(self) -> list[TokenScorer]:
        reference = [self._frozen["reference"]] if self.has_full_kl and "reference" in self._frozen else []
        return [*super().update_scorers(), *reference]

    @override
    def backward_passes(self, batch: MiniBatch, denominators: Denominators) -> list[tuple[list[PackedBatch], MicroBatchStep]]:
        micro_batches = self._with_selection(batch.micro_batches, denominators)
        if batch.critic_micro_batches is None:
            return [(micro_batches, self.micro_batch_step)]
        return [(micro_batches, self.policy_step), (batch.critic_micro_batches, self.critic_step)]

    def _with_selection(self, micro_batches: list[PackedBatch], denominators: Denominators) -> list[PackedBatch]:
        if not self.policy_loss.needs_selection:
            return micro_batches
        # The choice of tokens looks at the whole mini-batch under the current weights, whatever the cut.
        with scoring_context(self):
            log_probs = torch.cat([self.policy(micro, temperature=self.temperature).log_probs for micro in micro_batches])
        whole = PackedBatch.concat(micro_batches)
        keys = token_keys(whole[SAMPLE_ID], whole.cu_seqlens, whole.num_tokens, seed=self.global_step)
        selected = self.policy_loss.select(
            log_probs,
            whole["old_log_probs"],
            whole["advantages"],
            self.score_mask(whole),
            keys,
            num_tokens=int(denominators.num_tokens),
            peers=data_parallel_peers(self),
        )
        parts = torch.split(selected, [micro.num_tokens for micro in micro_batches])
        return [micro.with_fields(per_token={"selected": part}) for micro, part in zip(micro_batches, parts)]

    @override
    def micro_batch_step(self, micro_batch: PackedBatch, denominators: Denominators) -> MicroBatchOutput:
        policy = self.policy_step(micro_batch, denominators)
        if self.critic is None:
            return policy
        critic = self.critic_step(micro_batch, denominators)
        return MicroBatchOutput(policy.loss + critic.loss, policy.sums | critic.sums)

    def policy_step(self, micro_batch: PackedBatch, denominators: Denominators) -> MicroBatchOutput:
        """Return the policy's loss on one micro-batch, with the value loss of a shared trunk."""
        shared = self.has_values and self.critic is None
        head = {"reference": self._reference_head(micro_batch)} if self.has_full_kl else {}
        scores = self.policy(micro_batch, temperature=self.temperature, with_entropy=True, with_values=shared, **head)
        if self.has_full_kl:
            micro_batch = micro_batch.with_fields(per_token={"full_kl": scores.full_kl})
        terms, metrics = self.policy_terms(micro_batch, scores.log_probs, scores.entropy)
        if "train/ratio" not in metrics:
            metrics = self._ratio_metrics(micro_batch, scores.log_probs) | metrics
        if shared:
            value_terms, value_metrics = self.value_terms(micro_batch, scores.values)
            terms, metrics = terms + value_terms, metrics | value_metrics
        return self._output(micro_batch, terms, metrics, denominators)

    def _ratio_metrics(self, micro_batch: PackedBatch, log_probs: Tensor) -> dict[str, Tensor]:
        """Return the metrics of the ratio, for losses of a user's own that report none: the doctor and the report read them."""
        if "old_log_probs" not in micro_batch:
            return {}
        mask = self.score_mask(micro_batch)
        delta = log_ratio(log_probs.detach(), micro_batch["old_log_probs"], mask)
        return {f"train/{name}": term for name, term in ratio_metrics(delta, mask).items()}

    @torch.no_grad()
    def _reference_head(self, micro_batch: PackedBatch) -> ReferenceHead:
        reference = self._frozen.get("reference")
        if reference is not None:
            head: ReferenceHead = reference(micro_batch, reference="own")
            return head
        with adapters_off(self.policy.model):
            head = self.policy(micro_batch, reference="own")
            return head

    def critic_step(self, micro_batch: PackedBatch, denominators: Denominators) -> MicroBatchOutput:
        """Return the loss of a critic with a trunk of its own on one micro-batch."""
        assert self.critic is not None
        values = self.critic(micro_batch, with_log_probs=False, with_values=True).values
        return self._output(micro_batch, *self.value_terms(micro_batch, values), denominators)

    def _output(self, micro_batch: PackedBatch, terms: Tensor, metrics: dict[str, Tensor], denominators: Denominators) -> MicroBatchOutput:
        mask = self.score_mask(micro_batch)
        loss = aggregate(terms, mask, micro_batch.cu_seqlens, self.loss_aggregation, denominators)
        num_tokens = mask.sum()
        return MicroBatchOutput(loss, {name: (torch.where(mask, term.detach(), 0).sum(), num_tokens) for name, term in metrics.items()})

    def value_terms(self, micro_batch: PackedBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted per-token terms of the value loss, and per-token metrics.

        Args:
            micro_batch: Samples with ``values`` (old ones) and ``returns``.
            values: ``[T]``, differentiable.
        """
        result = value_loss(values, micro_batch["values"], micro_batch["returns"], self.score_mask(micro_batch), clip=self.value_clip)
        metrics = {"value/loss": result.terms} | {f"value/{name.removeprefix('value_')}": term for name, term in result.metrics.items()}
        return self.value_coefficient * result.terms, metrics

    def policy_terms(self, micro_batch: PackedBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy's per-token loss terms, and per-token metrics to average over all response tokens.

        Args:
            micro_batch: Samples with ``old_log_probs``, ``advantages`` and, with a reference, ``ref_log_probs``; for the KL kinds ``full``
                and ``full+`` also ``full_kl``, differentiable.
            log_probs: ``[T]``, differentiable.
            entropy: ``[T]``, differentiable.

        Returns:
            Terms ``[T]`` and metrics ``[T]`` by name.
        """
        mask = self.score_mask(micro_batch)
        result = self.policy_loss(
            log_probs,
            micro_batch["old_log_probs"],
            micro_batch["advantages"],
            mask,
            micro_batch.cu_seqlens,
            weights=micro_batch["loss_weights"] if self.rollout_correction is not None else None,
            selected=micro_batch["selected"] if self.policy_loss.needs_selection else None,
        )
        terms = result.terms
        metrics = {"train/policy_loss": terms, "train/entropy": entropy}
        metrics |= {f"train/{name}": term for name, term in result.metrics.items()}
        if self.entropy_coefficient:
            terms = terms - self.entropy_coefficient * entropy
        if self.kl_coefficient > 0:
            full = micro_batch["full_kl"] if self.has_full_kl else None
            penalty = kl_penalty(log_probs, micro_batch["ref_log_probs"], mask, self.kl_kind, full=full)
            terms = terms + self.kl_coefficient * penalty
            metrics["kl/reference"] = penalty
        return terms, metrics
