"""Refuse contradictory options of the PPO module when it is made, before any model is loaded."""

import math
from typing import TYPE_CHECKING

from lightning_rlbatch.functional import FunctionLoss, PolicyLoss, PPOClip
from lightning_rlbatch.functional.aggregation import AGGREGATION_MODES
from lightning_rlbatch.functional.kl import KL_KINDS, needs_logits
from lightning_rlbatch.functional.trial import algorithm_errors
from lightning_rlbatch.models.scoring import check_head_memory
from lightning_rlbatch.modules.reward_name import reserved_name_problem
from lightning_rlbatch.rollout.engine import SamplingParams
from lightning_rlbatch.rollout.engine_config import EngineConfig

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo import PPOModule
    from lightning_rlbatch.modules.ppo_collection import PPOCollection


def check_ppo_options(module: "PPOModule") -> None:
    """Check options against each other.

    Args:
        module: A module whose attributes are set.

    Raises:
        ValueError: Names the options, their values and what to change.
        TypeError: A reward function that cannot be called, or a ``rollout_engine`` that is no configuration of one.
    """
    _check_rewards(module)
    _check_advantage(module)
    _check_loss(module)
    _check_critic(module)
    _check_rollouts(module)
    check_head_memory(module.head_memory_mib)
    _try_algorithms(module)


def _try_algorithms(module: "PPOModule") -> None:
    """Run our own algorithms on one token, so that a wrong setting is an error before rollouts are sampled."""
    errors = algorithm_errors(
        policy_loss=module.policy_loss,
        advantage=module.advantage,
        rollout_correction=module.rollout_correction,
        num_rewards=len(_all_weights(module)),
    )
    for _, error in errors:
        raise error


def chosen_policy_loss(module: "PPOModule", given: PolicyLoss) -> PolicyLoss:
    """Return the loss of the policy: the one given, or the method of a subclass.

    Args:
        module: The module that is made.
        given: Its argument ``policy_loss``.

    Raises:
        ValueError: Both.
        TypeError: A function in place of a :class:`PolicyLoss`.
    """
    if hasattr(type(module), "policy_loss"):
        if given != PPOClip():
            raise ValueError(f"{type(module).__name__} defines policy_loss itself, so that policy_loss={given} would have no effect.")
        own = module.policy_loss
        return own if isinstance(own, PolicyLoss) else FunctionLoss(own)
    if not isinstance(given, PolicyLoss):
        raise TypeError(f"policy_loss must be a PolicyLoss such as PPOClip() but is {given!r}. Wrap a function: FunctionLoss(my_loss).")
    return given


def _check_rewards(module: "PPOModule") -> None:
    for function in module.reward_functions:
        if not callable(function):
            raise TypeError(f"reward_functions must be functions but hold {function!r}. Import it and pass the function itself.")
    for name in module.reward_names:
        problem = reserved_name_problem(name)
        if problem is not None:
            raise ValueError(problem)
    if not module.reward_functions and module.reward_model_source is None:
        raise ValueError("Expected at least one reward function, or a reward_model. Pass reward_functions=[my_reward].")
    if module.reward_model_source is not None and module.max_sampling_rounds > 1:
        raise ValueError("max_sampling_rounds looks at reward functions only. Set it to 1 with a reward_model.")
    if module.reward_model_source is None and module.reward_model_weight != 1:
        raise ValueError(
            f"reward_model_weight={module.reward_model_weight} has no effect without a reward_model. Set that, or drop the weight."
        )
    for weight in (*module.reward_weights, module.reward_model_weight):
        if not math.isfinite(weight):
            raise ValueError(f"Expected the weights of rewards to be finite numbers but got {weight}.")
    if len(module.reward_weights) != len(module.reward_functions):
        raise ValueError(
            f"Got {len(module.reward_weights)} reward_weights for {len(module.reward_functions)} reward_functions. Pass one weight each."
        )


def _check_advantage(module: "PPOModule") -> None:
    if module.advantage.needs_values and module.critic_source is None:
        raise ValueError(
            f"The advantage {type(module.advantage).__name__} needs values. Set critic (for example to the same source as policy, or to"
            " 'shared'), or use an estimator without values such as GRPO."
        )
    if module.advantage.needs_component_rewards and module.kl_reward is not None:
        raise ValueError(
            f"The advantage {type(module.advantage).__name__} normalizes each reward on its own and has no place for a KL penalty in the"
            " reward. Remove kl_reward, and put the penalty into the loss (kl_coefficient)."
        )

    if module.advantage.needs_component_rewards and module.overlong_buffer is not None:
        raise ValueError(
            f"The advantage {type(module.advantage).__name__} compares each reward on its own, so that the overlong penalty, which is added"
            " to their sum, would have no effect. Remove overlong_buffer, and pass a reward function of the length instead."
        )
    if getattr(module.advantage, "weights", 0) is None and any(weight != 1 for weight in _all_weights(module)):
        raise ValueError(
            f"The advantage {type(module.advantage).__name__} adds the rewards by weights of its own, 1 each by default, so that"
            f" reward_weights={module.reward_weights} would have no effect on it. Set the advantage's weights to {_all_weights(module)}."
        )


def _all_weights(module: "PPOModule") -> list[float]:
    """Return the weight of each component of the reward."""
    return [*module.reward_weights, *([module.reward_model_weight] if module.reward_model_source is not None else [])]


def _check_loss(module: "PPOModule") -> None:
    if module.loss_aggregation not in AGGREGATION_MODES:
        raise ValueError(f"Expected loss_aggregation to be one of {AGGREGATION_MODES} but got {module.loss_aggregation!r}.")
    if (module.loss_aggregation == "seq-mean-token-sum-norm") != (module.loss_norm_constant is not None):
        raise ValueError(
            "loss_norm_constant belongs to loss_aggregation='seq-mean-token-sum-norm' and to no other: got"
            f" {module.loss_aggregation!r} with loss_norm_constant={module.loss_norm_constant}."
        )
    for name in ("kl_kind", "kl_reward_kind"):
        if getattr(module, name) not in KL_KINDS:
            raise ValueError(f"Expected {name} to be one of {tuple(KL_KINDS)} but got {getattr(module, name)!r}.")
    if needs_logits(module.kl_reward_kind):
        raise ValueError(
            f"kl_reward_kind={module.kl_reward_kind!r} needs the logits of both models, but rewards are made of the stored log-probs of"
            " sampled tokens. Use k1, k2, k3 or abs in the reward, or the full divergence in the loss (kl_kind, kl_coefficient)."
        )
    for name in ("kl_coefficient", "value_coefficient", "overlong_factor"):
        if not 0 <= getattr(module, name) < math.inf:
            raise ValueError(f"Expected {name} to be a number, at least 0, but got {getattr(module, name)}.")
    if not math.isfinite(module.entropy_coefficient):
        raise ValueError(f"Expected entropy_coefficient to be a finite number but got {module.entropy_coefficient}.")
    for name in ("loss_norm_constant", "value_clip", "critic_lr", "overlong_buffer"):
        value = getattr(module, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"Expected {name} to be positive but got {value}. Pass None to leave it out.")


def _check_critic(module: "PPOModule") -> None:
    if module.critic_source is None and (module.critic_lr is not None or module.value_clip is not None):
        raise ValueError("critic_lr and value_clip have no effect without a critic. Set critic, or remove them.")
    if module.critic_source == "shared" and module.critic_lr is not None:
        raise ValueError("critic_lr has no effect with critic='shared': the value head is trained with the policy. Remove critic_lr.")


def _check_rollouts(module: "PPOModule") -> None:
    if not module.temperature > 0:
        raise ValueError(f"Expected temperature to be positive but got {module.temperature}: rollouts to learn from must be sampled.")
    SamplingParams(**module.sampling_options)  # refuses what no engine could sample with
    for token in module.stop_token_ids or ():
        if not isinstance(token, int) or token < 0:
            raise ValueError(f"Expected stop_token_ids to be numbers of tokens, at least 0, but got {token!r}.")
    if not 0 <= module.validation_temperature < math.inf:
        raise ValueError(f"Expected validation_temperature to be at least 0 (greedy) but got {module.validation_temperature}.")
    if not isinstance(module.rollout_engine_config, EngineConfig):
        raise TypeError(
            f"rollout_engine must be an EngineConfig such as TransformersEngineConfig() but is {module.rollout_engine_config!r}. To bring"
            " an engine that is made already, override build_engine."
        )
    if module.rollout_tensor_parallel_size < 1:
        raise ValueError(f"Expected rollout_tensor_parallel_size to be at least 1 but got {module.rollout_tensor_parallel_size}.")
    if module.max_turns is not None and (module.environment is None or module.max_turns < 1):
        raise ValueError(
            f"max_turns={module.max_turns} bounds the turns between the policy and an environment, here {module.environment!r}. Expected"
            " at least 1, and an environment. Set environment, or remove max_turns."
        )
    if module.max_sampling_rounds < 1:
        raise ValueError(f"Expected max_sampling_rounds to be at least 1 but got {module.max_sampling_rounds}.")


def check_group_size(module: "PPOCollection", rollouts_per_prompt: int) -> None:
    """Refuse groups too small for the estimator to learn from, before anything is sampled.

    Args:
        module: The module that samples.
        rollouts_per_prompt: Of the data module.

    Raises:
        ValueError: Every advantage would be 0.
    """
    needed = module.advantage.min_group_size
    if rollouts_per_prompt < needed:
        raise ValueError(
            f"The advantage {module.advantage} needs at least {needed} rollouts of a prompt but rollouts_per_prompt is"
            f" {rollouts_per_prompt}: every advantage would be 0. Raise rollouts_per_prompt, or choose another estimator."
        )
