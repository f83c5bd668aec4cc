"""Call reward functions that follow TRL's convention, and check what they return."""

import asyncio
import atexit
import copy
import functools
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lightning_rlbatch.data.chat import Conversation
from lightning_rlbatch.functional.rewards import combine_rewards

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
    that are ``async``, or return something to be awaited, wait side by side, always in the same event loop.

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
    calls = {
        name: functools.partial(function, **_accepted(f"Reward function {name!r}", function, _own_copy(arguments)))
        for name, function in zip(reward_names(functions), functions)
    }
    # A rank may have no completion at all; functions need not be written for that.
    returned = _call_all(calls) if completions else dict.fromkeys(calls, ())
    by_name = {name: _checked(name, rewards, completions) for name, rewards in returned.items()}
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
        TypeError: The function takes what is no column.
        ValueError: It returned too few or too many answers.
    """
    if function is None:
        texts = [completion if isinstance(completion, str) else completion[-1].get("content") for completion in completions]
        return [str(text).strip() for text in texts]
    arguments = {"prompts": prompts, "completions": completions, **columns, "completion_ids": completion_ids}
    answers = list(function(**_accepted("answer_function", function, arguments))) if completions else []
    if len(answers) != len(completions):
        raise ValueError(
            f"answer_function returned {len(answers)} answers for {len(completions)} completions. Return one (or None) each, in order."
        )
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


def _accepted(what: str, function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    required = [parameter for parameter in parameters.values() if parameter.default is parameter.empty]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [parameter.name for parameter in required if parameter.kind in by_keyword and parameter.name not in arguments]
    if missing:
        raise TypeError(
            f"{what} takes {', '.join(missing)}, but the prompts' rows have no such column. It may take:"
            f" {', '.join(sorted(arguments))}. Add the column to the rows, or give the argument a default."
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _call_all(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what the calls return, in their order; what is to be awaited waits together, behind the others."""
    returned: dict[str, Any] = {}
    try:
        for name, call in calls.items():
            returned[name] = call()
    except BaseException:
        for value in returned.values():
            if inspect.iscoroutine(value):
                value.close()  # it would complain that it was never awaited
        raise
    later = {name: value for name, value in returned.items() if inspect.isawaitable(value)}
    if not later:
        return returned
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        results = _wait_for(later.values())
    else:  # a notebook runs a loop in this thread already
        with ThreadPoolExecutor(1) as executor:
            results = executor.submit(_wait_for, later.values()).result()
    return returned | dict(zip(later, results))


def _wait_for(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*awaitables)

    loop = _event_loop(os.getpid())
    try:
        return loop.run_until_complete(together())
    except BaseException:  # an error of one of them, or a stop of the run: the others must not go on in the next call
        loop.run_until_complete(_cancel_the_others())
        raise


async def _cancel_the_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process: semaphores and client sessions of reward functions belong to the loop that they were first used in."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _own_copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments whose lists, token ids and messages a function may change without another one seeing it."""
    copied = {name: list(values) for name, values in arguments.items()}
    copied["completion_ids"] = [list(ids) for ids in arguments["completion_ids"]]
    for name in ("prompts", "completions"):
        copied[name] = [value if isinstance(value, str) else copy.deepcopy(value) for value in arguments[name]]
    return copied


def _checked(name: str, rewards: Any, completions: Sequence[str | Conversation]) -> list[float]:
    if isinstance(rewards, (Mapping, Set, str)) or not isinstance(rewards, Iterable):
        raise TypeError(f"Reward function {name!r} must return one number (or None) per completion, in order, but returned {rewards!r}.")
    listed = list(rewards)
    if len(listed) != len(completions):
        raise ValueError(
            f"Reward function {name!r} returned {len(listed)} rewards for {len(completions)} completions."
            " Return exactly one number (or None for no verdict) per completion, in order."
        )
    checked = []
    for index, reward in enumerate(listed):
        if reward is None:
            checked.append(math.nan)
            continue
        try:
            value = float(reward)
        except (TypeError, ValueError, OverflowError):
            given = repr(reward)[:80]
            raise TypeError(f"Reward function {name!r} returned {given} for completion {index}; expected a number or None.") from None
        if not math.isfinite(value):
            raise ValueError(
                f"Reward function {name!r} returned {value} for completion {index} ({str(completions[index])[:80]!r})."
                " Return a finite number, or None to leave the completion out of its group and of training."
            )
        checked.append(value)
    return checked
