import pytest
import torch.distributed as dist

from lightning_rlbatch.distributed.micro_steps import max_num_micro_steps
from lightning_rlbatch.functional.per_rank import count_micro_steps, plan_rank
from lightning_rlbatch.testing import run_distributed

LOCAL = {0: [8, 8, 8, 8], 1: [2, 2], 2: []}


def _plan(rank, world_size):
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(kwargs["op"]), original(*args, **kwargs))[1]
    steps = max_num_micro_steps(count_micro_steps(LOCAL[rank], max_tokens_per_rank=8), dist.group.WORLD)
    return steps, plan_rank(LOCAL[rank], num_micro_steps=steps, max_tokens_per_rank=8), len(calls)


def test_ranks_that_know_only_their_own_lengths_agree_on_the_number_of_micro_steps():
    results = run_distributed(_plan, 3)
    assert [steps for steps, _, _ in results] == [4, 4, 4]
    assert [len(plan) for _, plan, _ in results] == [4, 4, 4]
    assert [sum(not bucket for bucket in plan) for _, plan, _ in results] == [0, 2, 4]
    assert [calls for *_, calls in results] == [1, 1, 1]


def _per_group(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return max_num_micro_steps(rank + 1, groups[rank // 2])


def test_the_maximum_is_taken_over_the_group_only():
    assert run_distributed(_per_group, 4) == [2, 2, 4, 4]


def test_one_process_without_a_group_keeps_its_count():
    assert max_num_micro_steps(3, None) == 3


def _refused(rank, world_size):
    with pytest.raises(ValueError, match="`local` must not be negative but is -1 on some rank") as refused:
        max_num_micro_steps(-1 if rank == 1 else 3, dist.group.WORLD)
    return str(refused.value)


def test_a_negative_count_is_refused_on_every_rank():
    with pytest.raises(ValueError, match="`local` must not be negative but is -1"):
        max_num_micro_steps(-1, None)
    assert [message[-3:] for message in run_distributed(_refused, 2)] == [" 3.", "-1."]
