"""Call reward functions that follow TRL's convention, and check what they return."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_rlbatch.data.chat import Conversation
from lightning_rlbatch.functional.rewards import combine_rewards
from lightning_rlbatch.modules.calls import accepted, call_together, one_for_each
from lightning_rlbatch.modules.reward_log import current_log

RewardFunction = Callable[..., Sequence[float | None]]
AnswerFunction = Callable[..., Sequence[Any]]
"""Called like a reward function; returns the answer in each completion, anything with a text, or None where there is none."""


def call_rewards(
    functions: Sequence[RewardFunction],
    weights: Sequence[float],
    *,
    prompts: Sequence[str | Conversation],
    completions: Sequence[str | Conversation],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[list[float], dict[str, list[float]]]:
    """Score completions with every function and add the weighted rewards.

    A function is called as ``reward(prompts=..., completions=..., completion_ids=..., **columns)``; arguments it does not
    take are left out, so functions written for TRL and plain ``f(prompts, completions)`` both work. ``None`` means no verdict. Functions
    that are ``async``, or return something to be awaited, wait side by side, always in the same event loop. A function that names
    ``log_metric``, ``log_extra`` or ``trainer_state`` among its arguments gets these too, see :class:`RewardLog`.

    Args:
        functions: Reward functions.
        weights: Weight of each function.
        prompts: Text per completion; a list of messages where the prompt was given as one.
        completions: Text each; a list of messages where the prompt was one.
        completion_ids: Tokens of each completion, turns of an environment included.
        columns: Other columns of the prompts' rows, one value per completion.

    Returns:
        Weighted sum per completion (NaN where no function had a verdict), and each function's own rewards by name (NaN for
        None).

    Raises:
        TypeError: A function takes what is no column, or returned something else than numbers and None.
        ValueError: A function returned too few or too many rewards, or one that is not finite; names function and sample.
    """
    arguments: dict[str, Any] = {"prompts": prompts, "completions": completions, **columns, "completion_ids": completion_ids}
    tools = current_log().arguments(len(completions))
    calls = {
        name: functools.partial(function, **accepted(f"Reward function {name!r}", function, _own_copy(arguments), tools))
        for name, function in zip(reward_names(functions), functions)
    }
    # A rank may have no completion at all; functions need not be written for that.
    returned = call_together(calls, what="Reward function", items=prompts) if completions else dict.fromkeys(calls, ())
    by_name = {name: _checked(name, rewards, prompts, completions) for name, rewards in returned.items()}
    if not completions or not functions:
        return [math.nan] * len(completions), by_name
    components = torch.tensor(list(by_name.values()), dtype=torch.float64).T
    totals: list[float] = combine_rewards(components, list(weights)).tolist()
    return totals, by_name


def call_answers(
    function: AnswerFunction | None,
    *,
    prompts: Sequence[str | Conversation],
    completions: Sequence[str | Conversation],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> list[str | None]:
    """Return the answer in each completion, for a majority vote.

    Args:
        function: Finds the answers; it is given what reward functions are given. None takes whole completions for answers, and the last
            message of conversations.
        prompts: Text per completion; a list of messages where the prompt was given as one.
        completions: Text each; a list of messages where the prompt was one.
        completion_ids: Tokens of each completion, turns of an environment included.
        columns: Other columns of the prompts' rows, one value per completion.

    Raises:
        TypeError: The function takes what is no column, or returned no list.
        ValueError: It returned too few or too many answers.
    """
    if function is None:
        texts = [completion if isinstance(completion, str) else completion[-1].get("content") for completion in completions]
        return [str(text).strip() for text in texts]
    arguments = {"prompts": prompts, "completions": completions, **columns, "completion_ids": completion_ids}
    if not completions:
        return []
    call = functools.partial(function, **accepted("answer_function", function, _own_copy(arguments)))
    returned = call_together({"answer_function": call})["answer_function"]
    answers = one_for_each("answer_function", returned, completions, "one answer (or None) per completion", "answers")
    return [None if answer is None else str(answer) for answer in answers]


def check_rewards(totals: Sequence[float], by_name: Mapping[str, Sequence[float]], names: Sequence[str], num_completions: int) -> None:
    """Check what a ``compute_rewards`` of a user's own returned; communicates with nobody.

    Args:
        totals: Reward of each completion.
        by_name: Each function's own rewards.
        names: Names that ``by_name`` must have, in this order: metrics are made of them on every rank.
        num_completions: Of this rank.

    Raises:
        ValueError: Too few or too many rewards, other names, or a reward that is infinite.
    """
    if num_completions and list(by_name) != list(names):
        raise ValueError(
            f"compute_rewards must return the rewards of each function by name, {list(names)} in this order, but returned"
            f" {list(by_name)}. Names of your own go into the attribute reward_names."
        )
    for name, rewards in (("in all", totals), *by_name.items()):
        if len(rewards) != num_completions:
            counts = f"{len(rewards)} rewards ({name}) for {num_completions} completions"
            raise ValueError(f"compute_rewards returned {counts}. Return one each.")
        if any(math.isinf(reward) for reward in rewards):
            raise ValueError(f"compute_rewards returned an infinite reward ({name}). Return finite numbers, or NaN for no verdict.")


def reward_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return a name for each function, different ones for different functions."""
    names = [_name(function) for function in functions]
    return [name if names.count(name) == 1 else f"{name}_{position}" for position, name in enumerate(names)]


def _name(function: RewardFunction) -> str:
    named = function.func if isinstance(function, functools.partial) else function
    return getattr(named, "__name__", type(named).__name__)


def _own_copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments whose lists, token ids and messages a function may change without another one seeing it."""
    copied = {name: list(values) for name, values in arguments.items()}
    copied["completion_ids"] = [list(ids) for ids in arguments["completion_ids"]]
    for name in ("prompts", "completions"):
        copied[name] = [value if isinstance(value, str) else copy.deepcopy(value) for value in arguments[name]]
    return copied


def _checked(name: str, rewards: Any, prompts: Sequence[str | Conversation], completions: Sequence[str | Conversation]) -> list[float]:
    listed = one_for_each(f"Reward function {name!r}", rewards, completions, "one number (or None) per completion", "rewards")
    checked = []
    for index, reward in enumerate(listed):
        if reward is None:
            checked.append(math.nan)
            continue
        try:
            value = float(reward)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(
                f"Reward function {name!r} returned {repr(reward)[:80]} for completion {index} ({str(completions[index])[:80]!r} of the"
                f" prompt {str(prompts[index])[:80]!r}); expected a number or None. Return one number per completion."
            ) from None
        if not math.isfinite(value):
            raise ValueError(
                f"Reward function {name!r} returned {value} for completion {index} ({str(completions[index])[:80]!r} of the prompt"
                f" {str(prompts[index])[:80]!r}). Return a finite number, or None to leave the completion out of its group and of training."
            )
        checked.append(value)
    return checked
