"""Refuse contradictory options of the PPO module when it is made, before any model is loaded."""

import math
from typing import TYPE_CHECKING

from lightning_rlbatch.functional import AdvantageEstimator, FunctionLoss, KLController, PolicyLoss, PPOClip
from lightning_rlbatch.functional.aggregation import AGGREGATION_MODES
from lightning_rlbatch.functional.kl import KL_KINDS
from lightning_rlbatch.functional.trial import algorithm_errors
from lightning_rlbatch.models.scoring import check_head_memory
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.modules.ppo_problems import (
    OPTIONS,
    Estimator,
    group_size_problem,
    ppo_problems,
    reserved_name_problem,
    reward_weights,
)
from lightning_rlbatch.rollout.engine import SamplingParams
from lightning_rlbatch.rollout.engine_config import EngineConfig

if TYPE_CHECKING:
    from lightning_rlbatch.modules.ppo import PPOModule
    from lightning_rlbatch.modules.ppo_collection import PPOCollection

_PARTS: dict[str, tuple[type, str]] = {
    "advantage": (AdvantageEstimator, "GRPO()"),
    "kl_reward": (KLController, "FixedKL(0.001)"),
    "rollout_correction": (RolloutCorrection, "RolloutCorrection()"),
}


def check_ppo_options(module: "PPOModule") -> None:
    """Check options against each other.

    Args:
        module: A module whose attributes are set.

    Raises:
        ValueError: Names the options, their values and what to change.
        TypeError: A reward function that cannot be called, or a ``rollout_engine`` that is no configuration of one.
    """
    _check_rewards(module)
    _check_numbers(module)
    sources = {"critic": module.critic_source, "reward_model": module.reward_model_source}
    options = {name: getattr(module, name) for name in OPTIONS if name not in sources} | sources
    for _, problem in ppo_problems(options, _described(module.advantage)):
        raise ValueError(problem)
    _check_rollouts(module)
    check_head_memory(module.head_memory_mib)
    errors = algorithm_errors(
        policy_loss=module.policy_loss,
        advantage=module.advantage,
        rollout_correction=module.rollout_correction,
        num_rewards=len(reward_weights(options)),
    )
    for _, error in errors:
        raise error


def check_ppo_types(*, reward_functions: object, **parts: object) -> None:
    """Refuse a single function in place of a list, and names or numbers in place of what holds settings.

    Args:
        reward_functions: As given.
        **parts: Options that take an object of this package, by name.

    Raises:
        TypeError: Says what to pass.
    """
    if not isinstance(reward_functions, list | tuple):
        name = getattr(reward_functions, "__name__", "my_reward")
        raise TypeError(f"reward_functions must be a list of functions but is {reward_functions!r}. Pass reward_functions=[{name}].")
    for option, given in parts.items():
        kind, example = _PARTS[option]
        if not isinstance(given, kind) and not (given is None and option != "advantage"):
            raise TypeError(f"{option} must be an object such as {example} but is {given!r}.")


def _described(advantage: AdvantageEstimator) -> Estimator:
    weighs_rewards = getattr(advantage, "weights", 0) is None
    return Estimator(type(advantage).__name__, advantage.needs_values, advantage.needs_component_rewards, weighs_rewards)


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
    for weight in (*module.reward_weights, module.reward_model_weight):
        if not math.isfinite(weight):
            raise ValueError(f"Expected the weights of rewards to be finite numbers but got {weight}.")


def _check_numbers(module: "PPOModule") -> None:
    if module.loss_aggregation not in AGGREGATION_MODES:
        raise ValueError(f"Expected loss_aggregation to be one of {AGGREGATION_MODES} but got {module.loss_aggregation!r}.")
    for name in ("kl_kind", "kl_reward_kind"):
        if getattr(module, name) not in KL_KINDS:
            raise ValueError(f"Expected {name} to be one of {tuple(KL_KINDS)} but got {getattr(module, name)!r}.")
    for name in ("kl_coefficient", "value_coefficient", "overlong_factor"):
        if not 0 <= getattr(module, name) < math.inf:
            raise ValueError(f"Expected {name} to be a number, at least 0, but got {getattr(module, name)}.")
    if not math.isfinite(module.entropy_coefficient):
        raise ValueError(f"Expected entropy_coefficient to be a finite number but got {module.entropy_coefficient}.")
    for name in ("loss_norm_constant", "value_clip", "critic_lr", "overlong_buffer"):
        value = getattr(module, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"Expected {name} to be positive but got {value}. Pass None to leave it out.")


def _check_rollouts(module: "PPOModule") -> None:
    if not module.temperature > 0:
        raise ValueError(f"Expected temperature to be positive but got {module.temperature}: rollouts to learn from must be sampled.")
    SamplingParams(**module.sampling_options)  # refuses what no engine could sample with
    stops = () if module.stop_token_ids is None else module.stop_token_ids
    if not isinstance(stops, list | tuple) or not all(isinstance(token, int) and token >= 0 for token in stops):
        raise ValueError(f"Expected stop_token_ids to be a list of numbers of tokens, at least 0, but got {stops!r}.")
    if not 0 <= module.validation_temperature < math.inf:
        raise ValueError(f"Expected validation_temperature to be at least 0 (greedy) but got {module.validation_temperature}.")
    if not isinstance(module.rollout_engine_config, EngineConfig):
        raise TypeError(
            f"rollout_engine must be an EngineConfig such as TransformersEngineConfig() but is {module.rollout_engine_config!r}. To bring"
            " an engine that is made already, override build_engine."
        )
    if module.rollout_tensor_parallel_size < 1:
        raise ValueError(f"Expected rollout_tensor_parallel_size to be at least 1 but got {module.rollout_tensor_parallel_size}.")
    if module.max_turns is not None and module.max_turns < 1:
        raise ValueError(f"Expected at least one turn of the policy with an environment but got max_turns={module.max_turns}.")
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
    problem = group_size_problem(module.advantage, module.advantage.min_group_size, rollouts_per_prompt)
    if problem is not None:
        raise ValueError(problem)
