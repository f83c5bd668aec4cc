"""The models of PPO and its kin: policy, critic, reference, reward model and the engine that samples."""

from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rlbatch.functional import AdvantageEstimator, KLController
from lightning_rlbatch.models.full_kl import FullKLScorer
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.modules.adapters import adapter_layers
from lightning_rlbatch.modules.base import trained
from lightning_rlbatch.modules.model_sources import ModelSource, disable_dropout, frozen_copy, load_model, pretrained_name
from lightning_rlbatch.modules.ppo_update import PPOUpdate
from lightning_rlbatch.modules.reward_model import build_reward_scorer
from lightning_rlbatch.rollout.dispatch import tensor_parallel_group
from lightning_rlbatch.rollout.engine import RolloutEngine
from lightning_rlbatch.rollout.engine_config import EngineConfig
from lightning_rlbatch.rollout.engine_problems import EngineContext


class PPORoles(PPOUpdate):
    """Builds the models; :class:`PPOModule` sets the attributes.

    Attributes:
        rollout_engine: Samples rollouts, with a whole copy of the policy.
        rollout_group: Ranks that share an engine; None if it serves this rank alone.
    """

    policy_source: ModelSource
    reward_model_source: ModelSource | None
    reward_names: list[str]
    advantage: AdvantageEstimator
    kl_reward: KLController | None
    critic_lr: float | None
    sampling_options: dict[str, Any]
    validation_temperature: float
    rollout_engine_config: EngineConfig
    rollout_tensor_parallel_size: int
    remove_padding: bool
    head_memory_mib: float
    rollout_engine: RolloutEngine
    rollout_group: dist.ProcessGroup | None

    @override
    def build_models(self) -> None:
        self.rollout_group = tensor_parallel_group(self.meshes, self.rollout_tensor_parallel_size)
        if type(self).build_engine is PPORoles.build_engine:  # an engine from elsewhere has its own limits
            self.rollout_engine_config.check(self.engine_context())
        # Rank 0 reads pretrained models, and the strategy hands every rank its shards.
        brought = self.gets_weights_from_rank_zero
        model = load_model(self.policy_source, without_weights=brought)
        changed = disable_dropout(model)
        if changed:
            rank_zero_warn(f"Dropout of the policy was set to 0 in {len(changed)} modules: with it the first probability ratio is not 1.")
        self.rollout_engine = self.build_engine(model)
        if self.reward_model_source is not None:
            self._frozen["reward_model"] = build_reward_scorer(
                self.reward_model_source,
                remove_padding=self.remove_padding,
                sp_group=self.meshes.sp_group,
                without_weights=brought,
            )
        if self.needs_reference and not adapter_layers(model):
            # A copy, since a source that draws weights at random would make another model the second time.
            self._frozen["reference"] = self._scorer(frozen_copy(model, share=self.is_sharded_later)).eval()
        self.policy = self._scorer(model, value_head=self.critic_source == "shared")
        if self.critic_source is not None and self.critic_source != "shared":
            # Values need no LM head, and an unused one would have no gradient.
            critic = load_model(self.critic_source, without_weights=brought, option="critic")
            disable_dropout(critic)
            self.critic = self._scorer(cast(PreTrainedModel, critic.base_model), value_head=True)

    def _scorer(self, model: PreTrainedModel, *, value_head: bool = False) -> TokenScorer:
        scorer = FullKLScorer if self.has_full_kl or self.advantage.needs_sum_pi_squared else TokenScorer
        return scorer(
            model,
            value_head=value_head,
            remove_padding=self.remove_padding,
            sp_group=self.meshes.sp_group,
            head_memory_mib=self.head_memory_mib,
        )

    def build_engine(self, model: PreTrainedModel) -> RolloutEngine:
        """Return the engine that samples rollouts; it keeps a whole copy of the policy of its own.

        Override this for an engine that ``rollout_engine`` cannot describe. Ranks that share an engine (:attr:`rollout_group`) call
        ``generate`` together, with the same requests in the same order.

        Args:
            model: The policy before it is sharded; see :meth:`EngineConfig.build`.

        Raises:
            ValueError: The configured engine cannot serve this run.
        """
        context = self.engine_context(model)
        self.rollout_engine_config.check(context)
        return self.rollout_engine_config.build(model, context)

    def engine_context(self, model: PreTrainedModel | None = None) -> EngineContext:
        """Return what this run asks of its rollout engine.

        Args:
            model: The policy; None before it is loaded.
        """
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        prompt, response = (getattr(data, name, None) for name in ("max_prompt_length", "max_response_length"))
        return EngineContext(
            policy=pretrained_name(self.policy_source),
            longest_sample=prompt + response if isinstance(prompt, int) and isinstance(response, int) else None,
            temperatures=(self.sampling_options["temperature"], self.validation_temperature),
            top_k=self.sampling_options["top_k"],
            top_p=self.sampling_options["top_p"],
            tensor_parallel_size=self.rollout_tensor_parallel_size,
            group=self.rollout_group,
            has_adapters=model is not None and bool(adapter_layers(model)),
        )

    def unregistered_modules(self) -> Sequence[nn.Module]:
        """Return the frozen models, for the strategy to shard."""
        return list(self._frozen.values())

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty asks for the log-probs of a reference policy."""
        return self.kl_coefficient > 0 or self.kl_reward is not None

    @property
    def reference(self) -> TokenScorer | None:
        """The frozen reference policy; None if nothing needs one, or if it is the policy with its adapters off."""
        return self._frozen.get("reference")

    @property
    def reward_scorer(self) -> TokenScorer | None:
        """The frozen reward model, or None."""
        return self._frozen.get("reward_model")

    @property
    def component_names(self) -> list[str]:
        """Names of the rewards that are added up, in the order of ``component_rewards``."""
        return self.reward_names + (["reward_model"] if self.reward_model_source is not None else [])

    @override
    def optimizer_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [{"name": "policy", "params": trained(self.policy)}]
        if self.critic is not None:
            groups.append({"name": "critic", "params": trained(self.critic)})
            if self.critic_lr is not None:
                groups[-1]["lr"] = self.critic_lr
        return groups
