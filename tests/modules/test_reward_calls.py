"""Reward functions are called like TRL's: ordinary ones, objects, partials, and async ones together."""

import asyncio
import functools

import pytest

from lightning_rlbatch.modules.rewards import call_rewards, reward_names

TOLD = {"prompts": ["a", "b"], "completions": ["1", "2"], "completion_ids": [[1], [2]], "columns": {"answer": [5, 6]}}


def right(completions, answer, bonus=0.0):
    return [float(answer) + bonus for answer in answer]


class Judge:
    async def __call__(self, completions, **columns):
        return [0.5, None]


def called(functions, **told):
    return call_rewards(functions, [1.0] * len(functions), **{**TOLD, **told})


def test_async_functions_wait_together_and_keep_their_places():
    arrived = []

    async def meets(number, completions):
        arrived.append(number)
        while len(arrived) < 2:  # for ever, if one ran after the other
            await asyncio.sleep(0)
        return [float(number)] * len(completions)

    first, second = (functools.partial(meets, number) for number in (1, 2))
    totals, by_name = called([first, right, Judge(), second])
    assert list(by_name) == ["meets_0", "right", "Judge", "meets_3"]
    assert (by_name["meets_0"], by_name["meets_3"]) == ([1.0, 1.0], [2.0, 2.0])
    assert totals == [1 + 5 + 0.5 + 2, 1 + 6 + 2]


def test_async_functions_run_inside_a_running_loop_as_in_a_notebook():
    async def cell():
        return called([Judge(), right])

    totals, _ = asyncio.run(cell())
    assert totals == [5.5, 6.0]


def test_an_error_of_an_async_function_is_raised_and_nothing_is_left_waiting():
    async def fails(completions):
        raise OSError("no answer from the judge")

    with pytest.raises(OSError, match="no answer from the judge"):
        called([Judge(), fails])


def test_no_function_is_called_without_completions():
    def fails(**told):
        raise AssertionError

    empty = {"prompts": [], "completions": [], "completion_ids": [], "columns": {"answer": []}}
    assert called([fails, Judge()], **empty) == ([], {"fails": [], "Judge": []})


def test_partials_have_the_names_of_their_functions():
    assert reward_names([functools.partial(right, bonus=1.0), right, Judge()]) == ["right_0", "right_1", "Judge"]
    assert called([functools.partial(right, bonus=1.0)])[0] == [6.0, 7.0]
