"""How PPO and its kin come by what they train on: rollouts with rewards, log-probs and advantages."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from lightning_rlbatch.callbacks.rollout_hooks import Rollouts, call_on_rollout_end, call_on_rollout_start
from lightning_rlbatch.data.batching import BatchingOptions, options_for
from lightning_rlbatch.data.chat import Conversation
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import RolloutStore
from lightning_rlbatch.functional import KLController
from lightning_rlbatch.functional.filters import drop_samples
from lightning_rlbatch.functional.kl import KLKind
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules.adapters import adapters_off
from lightning_rlbatch.modules.collection import RolloutCollector, score_rollouts
from lightning_rlbatch.modules.model_sources import pretrained_ends
from lightning_rlbatch.modules.ppo_roles import PPORoles
from lightning_rlbatch.modules.preparation import SAMPLED_MASK, RolloutPreparation, data_parallel_peers
from lightning_rlbatch.modules.rewards import RewardFunction, call_rewards
from lightning_rlbatch.modules.scoring_context import scoring_context
from lightning_rlbatch.modules.turns import Environment
from lightning_rlbatch.rollout.engine import SamplingParams


class PPOCollection(PPORoles):
    """Samples, rewards and scores the rollouts of an iteration; :class:`PPOModule` sets the attributes.

    Attributes:
        kl_reward_coefficient: Coefficient of the KL penalty in the reward, of the iteration that comes next.
    """

    reward_functions: list[RewardFunction]
    reward_weights: list[float]
    reward_model_weight: float
    kl_reward_kind: KLKind
    kl_reward_coefficient: float
    drop_truncated: bool
    overlong_buffer: int | None
    overlong_factor: float
    max_sampling_rounds: int
    stop_token_ids: list[int] | None
    environment: Environment | None
    max_turns: int | None
    _collection_metrics: dict[str, float]

    def collect_rollouts(
        self,
        prompts: PromptBatch,
        iteration: int,
        mini_batches: Sequence[Sequence[int]] | None = None,
        options: BatchingOptions | None = None,
    ) -> RolloutStore:
        """Sample, reward, exchange and score the rollouts of one iteration; collective over all ranks.

        Args:
            prompts: Prompts of the iteration, the same on every rank.
            iteration: Number of the iteration, for the random numbers.
            mini_batches: Prompt indices of each mini-batch of the first epoch: they decide which rank gets a rollout. None: all are one.
            options: How samples are cut; None: as the run's data module says.

        Returns:
            This rank's rollouts with old log-probs and advantages.
        """
        mini_batches = [list(range(len(prompts)))] if mini_batches is None else mini_batches
        cut = self._batching() if options is None else options
        coefficient = self.kl_reward_coefficient

        def collect() -> RolloutStore:
            self.kl_reward_coefficient = coefficient  # of the first try; a stop throws away what was collected
            call_on_rollout_start(self.trainer, self, prompts, iteration)
            collector = RolloutCollector(self, prompts, iteration)
            store, self._collection_metrics = collector.run(mini_batches, cut)
            if self.kl_reward is not None:
                self._steer_kl(self.kl_reward, num_samples=len(store.table))
            call_on_rollout_end(self.trainer, self, Rollouts(store, collector.prompts, iteration))
            return store

        try:
            return self.stoppable(collect)
        except BaseException:
            self.kl_reward_coefficient = coefficient
            raise

    def _batching(self) -> BatchingOptions:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(getattr(data, "options", None), BatchingOptions):
            raise TypeError("collect_rollouts needs options, a BatchingOptions: this run has no data module that says how samples are cut.")
        return options_for(self, cast(Any, data).options)

    def _steer_kl(self, controller: KLController, *, num_samples: int) -> None:
        coefficient, kl = self.kl_reward_coefficient, self._collection_metrics["kl/reward"]
        self._collection_metrics["kl/reward_coefficient"] = coefficient
        if math.isfinite(kl):  # a NaN, of rollouts without a token, would stay in the coefficient for ever
            self.kl_reward_coefficient = controller.update(coefficient, current_kl=kl, num_samples=num_samples)

    def score_rollouts(self, store: RolloutStore) -> None:
        """Score rollouts that came from elsewhere (a recording, a dump) with the current models, and prepare them for the update.

        Args:
            store: Rollouts on the ranks that train on them.
        """
        if SAMPLED_MASK in store.samples:  # recorded by a run that left some tokens out of its loss
            store.update(per_token={"response_mask": store.samples[SAMPLED_MASK]})
        with scoring_context(self):
            score_rollouts(self, store)
            self._collection_metrics = RolloutPreparation(self, store).run()

    def scoring_passes(self) -> dict[str, Callable[[PackedBatch], Tensor | dict[str, Tensor]]]:
        """Return the forward-only passes over fresh rollouts: name of the per-token field and what computes it, or several by name."""
        reference, temperature = self.reference, self.temperature
        passes: dict[str, Callable[[PackedBatch], Tensor | dict[str, Tensor]]] = {"old_log_probs": self._policy_scores}
        if reference is not None:
            passes["ref_log_probs"] = lambda micro_batch: reference(micro_batch, temperature=temperature).log_probs
        elif self.needs_reference:
            passes["ref_log_probs"] = self._base_log_probs
        if (critic := self.critic) is not None:
            passes["values"] = lambda micro_batch: critic(micro_batch, with_log_probs=False, with_values=True).values
        return passes

    def _policy_scores(self, micro_batch: PackedBatch) -> dict[str, Tensor]:
        """Return all that the policy's own model tells of a micro-batch, out of one forward pass."""
        shared = self.has_values and self.critic is None
        extra = {"with_squares": True} if self.advantage.needs_sum_pi_squared else {}
        scores = self.policy(micro_batch, temperature=self.temperature, with_values=shared, **extra)
        fields = {"old_log_probs": scores.log_probs} | ({"values": scores.values} if shared else {})
        return fields | ({"sum_pi_squared": scores.sum_pi_squared} if extra else {})

    def _base_log_probs(self, micro_batch: PackedBatch) -> Tensor:
        with adapters_off(self.policy):
            log_probs: Tensor = self.policy(micro_batch, temperature=self.temperature).log_probs
            return log_probs

    def sampling(self, prompts: PromptBatch, *, temperature: float | None = None) -> SamplingParams:
        """Return how completions of these prompts are drawn."""
        eos = prompts.tokenizer.eos_token_id
        if self.stop_token_ids is None:
            self.stop_token_ids = pretrained_ends(self.policy_source)
        ends = dict.fromkeys([*([] if eos is None else [eos]), *self.stop_token_ids])
        options = self.sampling_options | ({} if temperature is None else {"temperature": temperature})
        return SamplingParams(max_new_tokens=prompts.max_response_length, stop_token_ids=tuple(ends), **options)

    def compute_rewards(
        self,
        *,
        prompts: Sequence[str | Conversation],
        completions: Sequence[str | Conversation],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the reward of each of this rank's completions, and each function's own rewards by name.

        Called without collectives around it: raise freely, every rank will raise.

        Args:
            prompts: Text per completion; a list of messages where the prompt was given as one.
            completions: Text each; a list of messages where the prompt was one.
            completion_ids: Tokens of each completion, turns of an environment included.
            columns: Other columns of the prompts' rows.
        """
        return call_rewards(
            self.reward_functions,
            self.reward_weights,
            prompts=prompts,
            completions=completions,
            completion_ids=completion_ids,
            columns=columns,
        )

    def compute_advantages(self, store: RolloutStore, token_rewards: Tensor | None) -> dict[str, Tensor]:
        """Return the per-token fields ``advantages`` and ``returns`` of this rank's samples, and ``response_mask`` if it gets smaller.

        Args:
            store: Rollouts; ``store.samples`` holds this rank's rewards, values and masks: ``response_mask``, the tokens that are trained
                on, and ``sampled_mask``, those that the policy sampled, if options may leave some of them out of the loss.
            token_rewards: ``[T]``: what each token adds to the reward (a KL penalty), or None.
        """
        samples, estimator = store.samples, self.advantage
        names = {"log_probs": "old_log_probs", "sum_pi_squared": "sum_pi_squared"} if estimator.needs_sum_pi_squared else {}
        names |= {"trained_mask": "response_mask"} if SAMPLED_MASK in samples else {}
        # Rewards stay in fp64 until they have been compared: near-equal ones far from 0 are not so in fp32.
        result = estimator(
            samples["reward"],
            store.group_ids.to(samples.device),
            samples[SAMPLED_MASK if SAMPLED_MASK in samples else "response_mask"],
            samples.cu_seqlens,
            token_rewards=token_rewards,
            values=samples["values"] if self.has_values else None,
            baseline_rewards=samples["baseline_reward"] if estimator.needs_baseline_rewards else None,
            component_rewards=samples["component_rewards"] if estimator.needs_component_rewards else None,
            peers=data_parallel_peers(self),
            **{name: samples[field] for name, field in names.items()},
        )
        dtype = samples["old_log_probs"].dtype
        fields = {"advantages": result.advantages.to(dtype), "returns": result.returns.to(dtype)}
        if not bool(result.valid.all()):  # nothing to compare with, such as a greedy answer without a reward
            fields["response_mask"] = drop_samples(samples["response_mask"], samples.cu_seqlens, result.valid)
        return fields
