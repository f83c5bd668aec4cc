"""Reward functions are called like TRL's: ordinary ones, objects, partials, and async ones together."""

import asyncio
import functools
from types import SimpleNamespace

import pytest

from lightning_rlbatch.modules.reward_log import RewardLog, logged_means, logging_rewards
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


def test_what_an_async_function_keeps_between_calls_stays_usable_and_what_an_error_leaves_does_not_go_on():
    at_once, ended = asyncio.Semaphore(1), []

    async def limited(completions):
        async with at_once:
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def endless(completions):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fails(completions):
        await asyncio.sleep(0)
        raise OSError("gone")

    for _ in range(2):
        assert called([limited, functools.partial(limited)])[0] == [2.0, 2.0]  # the semaphore waits in one loop
        with pytest.raises(OSError, match="gone"):
            called([endless, fails])
    assert ended == [True, True]


def test_an_ordinary_function_may_return_something_to_be_awaited():
    judge = Judge()
    assert called([right, lambda completions: judge(completions)])[0] == [5.5, 6.0]

    def fails(completions):
        raise OSError("after an async one was called")

    with pytest.raises(OSError, match="after an async one"):
        called([judge, fails])  # and no warning that the judge was never awaited


def test_functions_do_not_see_what_others_did_to_their_arguments():
    chat = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]

    def spoils(prompts, completions, completion_ids, answer):
        for ids, messages in zip(completion_ids, completions):
            ids.clear()
            messages[0]["content"] = "spoilt"
        for listed in (prompts, completions, completion_ids, answer):
            listed.clear()
        return [0.0, 0.0]

    def counts(prompts, completions, completion_ids, answer):
        assert (prompts, answer) == (["a", "b"], [5, 6])
        return [len(messages[0]["content"]) + 10.0 * len(ids) for messages, ids in zip(completions, completion_ids)]

    assert called([spoils, counts], completions=chat)[0] == [11.0, 11.0]
    assert chat[0][0]["content"] == "a"


@pytest.mark.parametrize("returned", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, "12", 3.0, None])
def test_what_has_no_order_or_is_no_list_of_numbers_is_refused(returned):
    def strange(completions):
        return returned

    with pytest.raises(TypeError, match="'strange' must return one number"):
        called([strange])


def test_a_number_beyond_all_floats_is_an_error_that_names_the_function():
    def huge(completions):
        return [10**400, 1]

    with pytest.raises(TypeError, match=r"'huge' returned 1000.* for completion 0"):
        called([huge])


def test_no_function_is_called_without_completions():
    def fails(**told):
        raise AssertionError

    empty = {"prompts": [], "completions": [], "completion_ids": [], "columns": {"answer": []}}
    assert called([fails, Judge()], **empty) == ([], {"fails": [], "Judge": []})


def test_functions_that_name_them_get_what_trl_gives_to_log_with():
    def tells(completions, log_metric, log_extra, trainer_state):
        log_metric("right", sum(map(float, completions)) / len(completions))
        log_metric("unknown", float("nan"))
        log_extra("said", completions)
        return [float(trainer_state.global_step)] * len(completions)

    def keeps(completions, log_extra=None, **columns):
        assert sorted(columns) == ["answer", "completion_ids", "prompts"]  # no functions among the columns
        log_extra("half", [0.5] * len(completions))
        return [0.0] * len(completions)

    log = RewardLog(trainer_state=SimpleNamespace(global_step=7))
    with logging_rewards(log):
        assert called([tells, keeps])[0] == [7.0, 7.0]
        assert log.extra(2) == [{"said": "1", "half": 0.5}, {"said": "2", "half": 0.5}]
        more = {"prompts": ["a"] * 3, "completions": ["4"] * 3, "completion_ids": [[1]] * 3, "columns": {"answer": [1] * 3}}
        called([tells], **more)
    assert logged_means(log.all_sums(None), "val/") == {"val/reward/log/right": (2 * 1.5 + 3 * 4) / 5}  # of completions, not of calls
    called([keeps])  # nobody listens
    assert log.extra(3)[0] == {"said": "4"}


def test_what_cannot_be_logged_is_refused():
    with pytest.raises(TypeError, match=r"log_metric\('a', ...\) takes a number but got 'x'"):
        called([lambda completions, log_metric: log_metric("a", "x")])
    with pytest.raises(ValueError, match=r"log_extra\('a', ...\) takes a value per completion: got 1 for 2"):
        called([lambda completions, log_extra: log_extra("a", ["x"])])
    with pytest.raises(TypeError, match=r"takes wanted, but .* It may take: answer, completion_ids, completions, prompts\."):
        called([lambda completions, wanted: None])


def test_partials_have_the_names_of_their_functions():
    assert reward_names([functools.partial(right, bonus=1.0), right, Judge()]) == ["right_0", "right_1", "Judge"]
    assert called([functools.partial(right, bonus=1.0)])[0] == [6.0, 7.0]
