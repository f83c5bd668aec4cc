"""Say which options of a PPO module contradict each other, or would have no effect.

The standard library only: ``rlbatch explain`` asks the same questions without loading torch.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

OPTIONS = (
    "critic",
    "critic_lr",
    "environment",
    "kl_reward",
    "kl_reward_kind",
    "loss_aggregation",
    "loss_norm_constant",
    "max_sampling_rounds",
    "max_turns",
    "overlong_buffer",
    "reward_functions",
    "reward_model",
    "reward_model_weight",
    "reward_weights",
    "value_clip",
)
"""Those that are looked at."""
# The metric reward/<name> is that of something else.
_RESERVED = re.compile(r"mean|std|reward_model|zero_variance_all_(right|wrong)|resampled_groups|best_of_\d+|majority_of_\d+")


class Estimator(NamedTuple):
    """What an advantage estimator needs of the other options.

    Attributes:
        name: Of its class.
        needs_values: See ``AdvantageEstimator``.
        needs_component_rewards: See ``AdvantageEstimator``.
        weighs_rewards: Whether it weighs the components of the reward itself, 1 each.
    """

    name: str
    needs_values: bool = False
    needs_component_rewards: bool = False
    weighs_rewards: bool = False


def ppo_problems(options: Mapping[str, Any], estimator: Estimator) -> Iterator[tuple[str, str]]:
    """Find options that exclude each other or need one that is missing.

    Args:
        options: Values of ``OPTIONS``, as objects or as configured; those that are None may be left out.
        estimator: The advantage estimator.

    Yields:
        Name of the option that is to blame; what is needed, what there is, and what to do.

    Example:
        >>> [option for option, _ in ppo_problems({"reward_functions": [len], "critic_lr": 0.1}, Estimator("GRPO"))]
        ['critic_lr']
    """
    yield from _reward_problems(options)
    yield from _estimator_problems(options, estimator)
    yield from _loss_problems(options)
    yield from _critic_problems(options)
    if options.get("max_turns") is not None and options.get("environment") is None:
        yield (
            "max_turns",
            f"max_turns={options['max_turns']} bounds the turns between the policy and an environment, and there is none. Set environment,"
            " or remove max_turns.",
        )


def group_size_problem(estimator: Any, needed: int, rollouts_per_prompt: int) -> str | None:
    """Return why groups are too small for an estimator to learn from; None if they are not.

    Args:
        estimator: Named in the sentence.
        needed: Its ``min_group_size``.
        rollouts_per_prompt: Of the data module.
    """
    if rollouts_per_prompt >= needed:
        return None
    return (
        f"The advantage {estimator} needs at least {needed} rollouts of a prompt but rollouts_per_prompt is {rollouts_per_prompt}: every"
        " advantage would be 0. Raise rollouts_per_prompt, or choose another estimator."
    )


def reserved_name_problem(name: str) -> str | None:
    """Return why a reward function may not have a name; None if it may.

    Args:
        name: Of the function.

    Example:
        >>> reserved_name_problem("exact_match") is None, reserved_name_problem("mean")[:40]
        (True, "A reward function is named 'mean', but r")
    """
    if not _RESERVED.fullmatch(name):
        return None
    return (
        f"A reward function is named {name!r}, but reward/{name} is a metric of all rewards: one of the two would be lost. Rename the"
        " function, or wrap it in one of another name."
    )


def _reward_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    functions, weights, has_model = options.get("reward_functions"), options.get("reward_weights"), options.get("reward_model") is not None
    if isinstance(functions, list) and not functions and not has_model:
        yield "reward_functions", "Expected at least one reward function, or a reward_model. Pass reward_functions=[my_reward]."
    if isinstance(functions, list) and isinstance(weights, list) and len(weights) != len(functions):
        yield "reward_weights", f"Got {len(weights)} reward_weights for {len(functions)} reward_functions. Pass one weight each."
    rounds, weight = options.get("max_sampling_rounds"), options.get("reward_model_weight", 1)
    if has_model and isinstance(rounds, int) and rounds > 1:
        yield "max_sampling_rounds", "max_sampling_rounds looks at reward functions only. Set it to 1 with a reward_model."
    if not has_model and weight != 1:
        yield "reward_model_weight", f"reward_model_weight={weight} has no effect without a reward_model. Set that, or drop the weight."


def _estimator_problems(options: Mapping[str, Any], estimator: Estimator) -> Iterator[tuple[str, str]]:
    if estimator.needs_values and options.get("critic") is None:
        yield (
            "critic",
            f"The advantage {estimator.name} needs values. Set critic (for example to the same source as policy, or to 'shared'), or use an"
            " estimator without values such as GRPO.",
        )
    if estimator.needs_component_rewards and options.get("kl_reward") is not None:
        yield (
            "kl_reward",
            f"The advantage {estimator.name} normalizes each reward on its own and has no place for a KL penalty in the reward. Remove"
            " kl_reward, and put the penalty into the loss (kl_coefficient).",
        )
    if estimator.needs_component_rewards and options.get("overlong_buffer") is not None:
        yield (
            "overlong_buffer",
            f"The advantage {estimator.name} compares each reward on its own, so that the overlong penalty, which is added to their sum,"
            " would have no effect. Remove overlong_buffer, and pass a reward function of the length instead.",
        )
    weights = reward_weights(options)
    if estimator.weighs_rewards and any(weight != 1 for weight in weights):
        yield (
            "reward_weights",
            f"The advantage {estimator.name} adds the rewards by weights of its own, 1 each by default, so that"
            f" reward_weights={options.get('reward_weights')} would have no effect on it. Set the advantage's weights to {weights}.",
        )


def reward_weights(options: Mapping[str, Any]) -> list[Any]:
    """Return the weight of each component of the reward.

    Args:
        options: As above.
    """
    functions, weights = options.get("reward_functions"), options.get("reward_weights")
    if not isinstance(weights, list):
        weights = [1.0] * (len(functions) if isinstance(functions, list) else 1)
    return [*weights, *([options.get("reward_model_weight", 1.0)] if options.get("reward_model") is not None else [])]


def _loss_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    aggregation, constant, kind = (options.get(name) for name in ("loss_aggregation", "loss_norm_constant", "kl_reward_kind"))
    if (aggregation == "seq-mean-token-sum-norm") != (constant is not None):
        yield (
            "loss_norm_constant",
            f"loss_norm_constant belongs to loss_aggregation='seq-mean-token-sum-norm' and to no other: got {aggregation!r} with"
            f" loss_norm_constant={constant}.",
        )
    if isinstance(kind, str) and kind.startswith("full"):
        yield (
            "kl_reward_kind",
            f"kl_reward_kind={kind!r} needs the logits of both models, but rewards are made of the stored log-probs of sampled tokens. Use"
            " k1, k2, k3 or abs in the reward, or the full divergence in the loss (kl_kind, kl_coefficient).",
        )


def _critic_problems(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if options.get("critic") is None:
        for name in ("critic_lr", "value_clip"):
            if options.get(name) is not None:
                yield name, f"{name}={options[name]} has no effect without a critic. Set critic, or remove {name}."
    elif options["critic"] == "shared" and options.get("critic_lr") is not None:
        yield "critic_lr", "critic_lr has no effect with critic='shared': the value head is trained with the policy. Remove critic_lr."
