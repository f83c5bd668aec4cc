"""RL post-training of a language model: collect rollouts, then update on planned mini-batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_rlbatch.callbacks.recorder import RolloutRecorder
from lightning_rlbatch.callbacks.rollout_hooks import Rollouts, call_on_rollout_end
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.chat import Conversation
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import RolloutStore
from lightning_rlbatch.distributed.reductions import all_reduce_sums
from lightning_rlbatch.functional import GRPO, AdvantageEstimator, KLController, PolicyLoss, PPOClip
from lightning_rlbatch.functional.aggregation import AggregationMode
from lightning_rlbatch.functional.kl import KLKind
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.models.scoring import HEAD_MEMORY_MIB
from lightning_rlbatch.modules.adapters import adapters_off
from lightning_rlbatch.modules.base import LRSchedulerFactory, OptimizerFactory, default_optimizer
from lightning_rlbatch.modules.collection import VALIDATION_STREAM, RolloutCollector, score_rollouts, sync_weights
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.modules.model_sources import ModelSource
from lightning_rlbatch.modules.ppo_checks import check_ppo_options
from lightning_rlbatch.modules.ppo_roles import PPORoles
from lightning_rlbatch.modules.prediction import generate_completions
from lightning_rlbatch.modules.preparation import RolloutPreparation, data_parallel_peers
from lightning_rlbatch.modules.rewards import RewardFunction, call_rewards, reward_names
from lightning_rlbatch.modules.scoring_context import scoring_context
from lightning_rlbatch.modules.turns import Environment
from lightning_rlbatch.modules.validation import evaluate_prompts, validation_metrics
from lightning_rlbatch.rollout.engine import SamplingParams
from lightning_rlbatch.rollout.engine_config import EngineConfig, TransformersEngineConfig

_STATE = "rlbatch_ppo"  # key in Lightning checkpoints


class PPOModule(PPORoles):
    """Train a causal LM with PPO, GRPO and their kin.

    One Lightning epoch is one iteration: :meth:`collect_rollouts` (called by the data module's loader) samples, rewards,
    scores and exchanges rollouts; then each ``training_step`` is one optimizer step on one mini-batch. Every stage is a
    method to override: :meth:`compute_rewards`, :meth:`compute_advantages`, :meth:`policy_terms`, ...

    Args:
        policy: Model to train: a function that makes it, or the folder or hub name of a pretrained one.
        reward_functions: Functions ``reward(prompts, completions, **columns) -> list[float | None]``.
        reward_weights: Weight of each function; 1 each by default.
        reward_model: Sequence classifier with one label that rewards prompt and completion too; same forms as ``policy``. With it
            ``reward_functions`` may be empty.
        reward_model_weight: Its weight.
        advantage: Estimator of advantages; :class:`GAE` needs a ``critic``.
        policy_loss: Per-token loss of the policy.
        loss_aggregation: How token terms become a loss; see ``aggregate``.
        loss_norm_constant: Divisor of ``seq-mean-token-sum-norm``, for example the largest response length.
        entropy_coefficient: Weight of the entropy bonus.
        kl_coefficient: Weight of the KL penalty to the reference model in the loss; above 0 a frozen copy of the policy is kept, or,
            for a policy with adapters (LoRA), the reference is the policy with its adapters off.
        kl_kind: Estimator of the penalty in the loss; see ``kl_penalty``. ``full`` sums over the vocabulary: the reference then runs in
            every micro-step.
        kl_reward: KL penalty in the reward: a fixed or adaptive coefficient; keeps the reference model too.
        kl_reward_kind: Estimator of the penalty in the reward; not ``full``, since no logits are stored.
        rollout_correction: Importance correction where the engine's log-probs differ from the trainer's; None trusts the engine.
        drop_truncated: True leaves responses that hit ``max_response_length`` out of the loss (their reward still counts).
        overlong_buffer: Tokens before ``max_response_length`` over which the reward falls by up to ``overlong_factor``; None: off.
        overlong_factor: Largest overlong penalty.
        max_sampling_rounds: Rounds in which prompts whose rollouts all got the same reward are sampled again; 1 keeps what came.
        critic: Model of the value function, same forms as ``policy``; a value head is added to it. ``"shared"`` puts the value head
            on the policy's own trunk.
        critic_lr: Learning rate of the critic's parameter group; None takes the optimizer's.
        value_coefficient: Weight of the value loss.
        value_clip: Clip of values around the old ones; None does not clip.
        temperature: Sampling temperature; log-probs are computed at it too.
        top_k: Sample among the ``top_k`` likeliest tokens; 0 switches it off.
        top_p: Sample among the likeliest tokens of this total probability; 1 switches it off.
        validation_temperature: Temperature of validation; 0 is greedy. None takes ``temperature``.
        rollout_engine: Engine that samples, with its options: :class:`TransformersEngineConfig` or :class:`VLLMEngineConfig`, or yours.
        record_rollouts: Folder to which every iteration's rollouts are written, for :class:`ReplayDataModule`.
        rollout_tensor_parallel_size: Neighbouring ranks that share a rollout engine and generate their rollouts together; needs an
            engine that spans them, such as :class:`VLLMEngineConfig`.
        environment: Answers the policy's turns, for rollouts of several turns; its tokens are in the samples but not in the loss.
        max_turns: Most turns of the policy in a rollout; None for as many as fit into ``max_response_length``.
        remove_padding: False pads each micro-batch to its longest sample instead of packing it; the numbers are the same.
        head_memory_mib: Most memory, in MiB, in which the LM head keeps its products for the backward pass; see :class:`TokenScorer`.
        optimizer: See :class:`RLBatchModule`.
        lr_scheduler: See :class:`RLBatchModule`.
        max_grad_norm: See :class:`RLBatchModule`.

    Raises:
        ValueError: Options that contradict each other.
    """

    def __init__(
        self,
        policy: ModelSource,
        reward_functions: list[RewardFunction],
        *,
        reward_weights: list[float] | None = None,
        reward_model: ModelSource | None = None,
        reward_model_weight: float = 1.0,
        advantage: AdvantageEstimator = GRPO(),
        policy_loss: PolicyLoss = PPOClip(),
        loss_aggregation: AggregationMode = "token-mean",
        loss_norm_constant: float | None = None,
        entropy_coefficient: float = 0.0,
        kl_coefficient: float = 0.0,
        kl_kind: KLKind = "k3",
        kl_reward: KLController | None = None,
        kl_reward_kind: KLKind = "k1",
        rollout_correction: RolloutCorrection | None = None,
        drop_truncated: bool = False,
        overlong_buffer: int | None = None,
        overlong_factor: float = 1.0,
        max_sampling_rounds: int = 1,
        critic: ModelSource | None = None,
        critic_lr: float | None = None,
        value_coefficient: float = 0.5,
        value_clip: float | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        validation_temperature: float | None = None,
        rollout_engine: EngineConfig = TransformersEngineConfig(),
        record_rollouts: str | None = None,
        rollout_tensor_parallel_size: int = 1,
        environment: Environment | None = None,
        max_turns: int | None = None,
        remove_padding: bool = True,
        head_memory_mib: float = HEAD_MEMORY_MIB,
        optimizer: OptimizerFactory = default_optimizer,
        lr_scheduler: LRSchedulerFactory | None = None,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler, max_grad_norm=max_grad_norm)
        self.policy_source = policy
        self.reward_functions = reward_functions
        self.reward_weights = [1.0] * len(reward_functions) if reward_weights is None else reward_weights
        self.reward_names = reward_names(reward_functions)
        self.reward_model_source = reward_model
        self.reward_model_weight = reward_model_weight
        self.advantage = advantage
        self.policy_loss = policy_loss
        self.loss_aggregation = loss_aggregation
        self.loss_norm_constant = loss_norm_constant
        self.entropy_coefficient = entropy_coefficient
        self.kl_coefficient = kl_coefficient
        self.kl_kind = kl_kind
        self.kl_reward = kl_reward
        self.kl_reward_kind = kl_reward_kind
        self.kl_reward_coefficient = 0.0 if kl_reward is None else kl_reward.coefficient
        self.rollout_correction = rollout_correction
        self.drop_truncated = drop_truncated
        self.overlong_buffer = overlong_buffer
        self.overlong_factor = overlong_factor
        self.max_sampling_rounds = max_sampling_rounds
        self.critic_source = critic
        self.critic_lr = critic_lr
        self.value_coefficient = value_coefficient
        self.value_clip = value_clip
        self.sampling_options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.temperature = temperature
        self.validation_temperature = temperature if validation_temperature is None else validation_temperature
        self.rollout_engine_config = rollout_engine
        self.record_rollouts = record_rollouts
        self.rollout_tensor_parallel_size = rollout_tensor_parallel_size
        self.environment = environment
        self.max_turns = max_turns
        self.remove_padding = remove_padding
        self.head_memory_mib = head_memory_mib
        self._collection_metrics: dict[str, float] = {}
        self._validation_sums: dict[str, float] = {}
        # Outside the module tree, else the frozen copy would be half of every checkpoint.
        self._frozen: dict[str, TokenScorer] = {}
        self.critic: TokenScorer | None = None
        self.rollout_group: dist.ProcessGroup | None = None
        check_ppo_options(self)

    # -- collection --------------------------------------------------------------------------------------------------------------

    def collect_rollouts(
        self, prompts: PromptBatch, iteration: int, mini_batches: Sequence[Sequence[int]], options: BatchingOptions
    ) -> RolloutStore:
        """Sample, reward, exchange and score the rollouts of one iteration; collective over all ranks.

        Args:
            prompts: Prompts of the iteration, the same on every rank.
            iteration: Number of the iteration, for the random numbers.
            mini_batches: Prompt indices of each mini-batch of the first epoch.
            options: How samples are cut.

        Returns:
            This rank's rollouts with old log-probs and advantages.
        """
        coefficient = self.kl_reward_coefficient

        def collect() -> RolloutStore:
            self.kl_reward_coefficient = coefficient  # of the first try; a stop throws away what was collected
            collector = RolloutCollector(self, prompts, iteration)
            store, self._collection_metrics = collector.run(mini_batches, options)
            if self.kl_reward is not None:
                self._steer_kl(self.kl_reward, num_samples=len(store.table))
            call_on_rollout_end(self.trainer, self, Rollouts(store, collector.prompts, iteration))
            return store

        try:
            return self.stoppable(collect)
        except BaseException:
            self.kl_reward_coefficient = coefficient
            raise

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
        with scoring_context(self):
            score_rollouts(self, store)
            self._collection_metrics = RolloutPreparation(self, store).run()

    @override
    def configure_callbacks(self) -> list[Callback]:
        recorder = [] if self.record_rollouts is None else [RolloutRecorder(self.record_rollouts)]
        return [*super().configure_callbacks(), *recorder]

    def scoring_passes(self) -> dict[str, Callable[[PackedBatch], Tensor]]:
        """Return the forward-only passes over fresh rollouts: name of the per-token field and what computes it."""
        policy, reference, temperature = self.policy, self.reference, self.temperature
        critic = self.critic if self.critic is not None else policy
        passes = {"old_log_probs": lambda micro_batch: policy(micro_batch, temperature=temperature).log_probs}
        if reference is not None:
            passes["ref_log_probs"] = lambda micro_batch: reference(micro_batch, temperature=temperature).log_probs
        elif self.needs_reference:
            passes["ref_log_probs"] = self._base_log_probs
        if self.advantage.needs_sum_pi_squared:
            passes["sum_pi_squared"] = lambda micro_batch: policy(micro_batch, temperature=temperature, only_squares=True)
        if self.has_values:
            passes["values"] = lambda micro_batch: critic(micro_batch, with_log_probs=False, with_values=True).values
        return passes

    def _base_log_probs(self, micro_batch: PackedBatch) -> Tensor:
        with adapters_off(self.policy):
            log_probs: Tensor = self.policy(micro_batch, temperature=self.temperature).log_probs
            return log_probs

    def sampling(self, prompts: PromptBatch, *, temperature: float | None = None) -> SamplingParams:
        """Return how completions of these prompts are drawn."""
        eos = prompts.tokenizer.eos_token_id
        options = self.sampling_options | ({} if temperature is None else {"temperature": temperature})
        return SamplingParams(max_new_tokens=prompts.max_response_length, stop_token_ids=() if eos is None else (eos,), **options)

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
        """Return the per-token fields ``advantages`` and ``returns`` of this rank's samples.

        Args:
            store: Rollouts; ``store.samples`` holds this rank's rewards, values and masks.
            token_rewards: ``[T]``: what each token adds to the reward (a KL penalty), or None.
        """
        samples, estimator = store.samples, self.advantage
        names = {"log_probs": "old_log_probs", "sum_pi_squared": "sum_pi_squared"} if estimator.needs_sum_pi_squared else {}
        # Rewards stay in fp64 until they have been compared: near-equal ones far from 0 are not so in fp32.
        result = estimator(
            samples["reward"],
            store.group_ids.to(samples.device),
            samples["response_mask"],
            samples.cu_seqlens,
            token_rewards=token_rewards,
            values=samples["values"] if self.has_values else None,
            baseline_rewards=samples["baseline_reward"] if estimator.needs_baseline_rewards else None,
            component_rewards=samples["component_rewards"] if estimator.needs_component_rewards else None,
            peers=data_parallel_peers(self),
            **{name: samples[field] for name, field in names.items()},
        )
        dtype = samples["old_log_probs"].dtype
        return {"advantages": result.advantages.to(dtype), "returns": result.returns.to(dtype)}

    # -- update ------------------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self._collection_metrics:
            self.log_dict(self._collection_metrics, batch_size=1)
            if "reward/mean" in self._collection_metrics:  # not of recorded rollouts
                self.log("reward", self._collection_metrics["reward/mean"], prog_bar=True, logger=False, batch_size=1)
            self._collection_metrics = {}

    # -- validation --------------------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        self._validation_sums = {}
        sync_weights(self)

    @override
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        sums = self.stoppable(lambda: evaluate_prompts(self, batch, batch_idx), only_signals=True)
        for name, value in sums.items():
            self._validation_sums[name] = self._validation_sums.get(name, 0.0) + value

    @override
    def on_validation_epoch_end(self) -> None:
        self.rollout_engine.sleep()
        metrics = validation_metrics(all_reduce_sums(self._validation_sums, self.meshes.world_group))
        # sync_dist only keeps Lightning from warning: the values are global already, equal on every rank.
        self.log_dict(metrics, batch_size=1, sync_dist=True)

    # -- prediction --------------------------------------------------------------------------------------------------------------

    @override
    def on_predict_epoch_start(self) -> None:
        sync_weights(self)

    @override
    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Return the completions of a prompt batch, the ones that validation would reward; see :func:`generate_completions`."""
        return generate_completions(self, batch, VALIDATION_STREAM + batch_idx)

    @override
    def on_predict_epoch_end(self) -> None:
        self.rollout_engine.sleep()

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_STATE] = {"kl_reward_coefficient": self.kl_reward_coefficient}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kl_reward_coefficient = checkpoint[_STATE]["kl_reward_coefficient"]
