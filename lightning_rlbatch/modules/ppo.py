"""RL post-training of a language model: collect rollouts, then update on planned mini-batches."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_rlbatch.callbacks.recorder import RolloutRecorder
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.distributed.reductions import all_reduce_sums
from lightning_rlbatch.functional import GRPO, AdvantageEstimator, KLController, PolicyLoss, PPOClip
from lightning_rlbatch.functional.aggregation import AggregationMode
from lightning_rlbatch.functional.kl import KLKind
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.models.scoring import HEAD_MEMORY_MIB
from lightning_rlbatch.modules.base import LRSchedulerFactory, OptimizerFactory, default_optimizer
from lightning_rlbatch.modules.collection import VALIDATION_STREAM, let_engine_sleep, sync_weights
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.modules.model_sources import ModelSource, as_source
from lightning_rlbatch.modules.ppo_checks import check_ppo_options, check_ppo_types, chosen_policy_loss
from lightning_rlbatch.modules.ppo_collection import PPOCollection
from lightning_rlbatch.modules.prediction import generate_completions
from lightning_rlbatch.modules.rewards import AnswerFunction, RewardFunction, call_answers, reward_names
from lightning_rlbatch.modules.turns import Environment
from lightning_rlbatch.modules.validation import evaluate_prompts, validation_metrics
from lightning_rlbatch.rollout.engine_config import EngineConfig, TransformersEngineConfig

_STATE = "rlbatch_ppo"  # key in Lightning checkpoints


class PPOModule(PPOCollection):
    """Train a causal LM with PPO, GRPO and their kin.

    One Lightning epoch is one iteration: :meth:`collect_rollouts` (called by the data module's loader) samples, rewards,
    scores and exchanges rollouts; then each ``training_step`` is one optimizer step on one mini-batch. Every stage is a
    method to override: :meth:`compute_rewards`, :meth:`compute_advantages`, :meth:`policy_terms`, ...

    Args:
        policy: Model to train: a function that makes it, the folder or hub name of a pretrained one, or a model; see ``ModelSource``.
        reward_functions: Functions ``reward(prompts, completions, **columns) -> list[float | None]``.
        reward_weights: Weight of each function; 1 each by default.
        reward_model: Sequence classifier with one label that rewards prompt and completion too; same forms as ``policy``. With it
            ``reward_functions`` may be empty.
        reward_model_weight: Its weight.
        advantage: Estimator of advantages; :class:`GAE` needs a ``critic``.
        policy_loss: Per-token loss of the policy. A subclass may define a method of this name instead, see :class:`FunctionLoss`.
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
        stop_token_ids: Tokens that end a completion, beside the tokenizer's end token. None takes those that a pretrained policy's
            ``generation_config.json`` names: chat models often end their turns with another token than their texts.
        validation_temperature: Temperature of validation; 0 is greedy. None takes ``temperature``.
        answer_function: Finds the answers that validation's rollouts of a prompt vote for: called like a reward function, it returns the
            answer of each completion (or None). None takes the whole text.
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
        stop_token_ids: list[int] | None = None,
        validation_temperature: float | None = None,
        answer_function: AnswerFunction | None = None,
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
        check_ppo_types(reward_functions=reward_functions, advantage=advantage, kl_reward=kl_reward, rollout_correction=rollout_correction)
        self.policy_source = as_source(policy)
        self.reward_functions = reward_functions
        self.reward_weights = [1.0] * len(reward_functions) if reward_weights is None else reward_weights
        self.reward_names = reward_names(reward_functions)
        self.reward_model_source = None if reward_model is None else as_source(reward_model)
        self.reward_model_weight = reward_model_weight
        self.advantage = advantage
        self.policy_loss = chosen_policy_loss(self, policy_loss)
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
        self.critic_source = None if critic is None else as_source(critic)
        self.critic_lr = critic_lr
        self.value_coefficient = value_coefficient
        self.value_clip = value_clip
        self.sampling_options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.temperature = temperature
        self.stop_token_ids = stop_token_ids
        self.validation_temperature = temperature if validation_temperature is None else validation_temperature
        self.answer_function = answer_function
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

    @override
    def configure_callbacks(self) -> list[Callback]:
        recorder = [] if self.record_rollouts is None else [RolloutRecorder(self.record_rollouts)]
        return [*super().configure_callbacks(), *recorder]

    # -- update ------------------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: MiniBatch, batch_idx: int) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        if self._collection_metrics:
            self.log_dict(self._collection_metrics, batch_size=1)
            if "reward/mean" in self._collection_metrics:  # not of recorded rollouts
                self.log("reward", self._collection_metrics["reward/mean"], prog_bar=True, logger=False, batch_size=1)
            self._collection_metrics = {}
        return outputs

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

    def compute_answers(self, **told: Any) -> list[str | None]:
        """Return the answer in each completion, for the majority vote of validation; None where there is none.

        Args:
            told: What ``compute_rewards`` is told.
        """
        return call_answers(self.answer_function, **told)

    @override
    def on_validation_epoch_end(self) -> None:
        let_engine_sleep(self)
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
        let_engine_sleep(self)

    # -- checkpoints -------------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_STATE] = {"kl_reward_coefficient": self.kl_reward_coefficient}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_reward_coefficient = checkpoint.get(_STATE, {}).get("kl_reward_coefficient", self.kl_reward_coefficient)
