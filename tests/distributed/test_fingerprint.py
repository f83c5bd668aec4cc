import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.fingerprint import CollectiveCheck
from lightning_rlbatch.testing import run_distributed

AGREED = {
    "step": 3,
    "plan": [[[0, 2], [1]], [[3], []]],
    "loss": math.nan,
    "nested": {"b": (1.5, None), "a": {"seed": 7}},
    "workloads": np.arange(2000),
    "lengths": torch.tensor([4, 5, 6]),
    "names": {"x", "y"},
}


def test_a_lone_process_and_a_disabled_check_do_nothing():
    CollectiveCheck(None)("update", **AGREED)

    def disagree(rank, world_size):
        CollectiveCheck(dist.group.WORLD, enabled=False)("update" if rank else "rollout", step=rank)

    run_distributed(disagree, 2)


def test_ranks_that_agree_pass():
    def agree(rank, world_size):
        check = CollectiveCheck(dist.group.WORLD)
        for step in range(3):
            check("rollout", step=step)
            check("update", **AGREED)

    run_distributed(agree, 4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("step", 4, "`step` is 3 on rank 0 and 4 on rank 2"),
        ("plan", [[[0, 2], [3]], [[1], []]], "`plan[0][1][0]` is 1 on rank 0 and 3 on rank 2"),
        ("plan", [[[0, 2], [1]], [[3]]], "the length of `plan[1]` is 2 on rank 0 and 1 on rank 2"),
        ("nested", {"a": {"seed": 8}, "b": (1.5, None)}, "`nested.a.seed` is 7 on rank 0 and 8 on rank 2"),
        ("nested", {"b": (1.5, None)}, "`nested.a` is present on rank 0 and absent on rank 2"),
        ("lengths", torch.tensor([4, 6, 6]), "`lengths[1]` is 5 on rank 0 and 6 on rank 2"),
        ("workloads", np.arange(2000) - (np.arange(2000) == 1000), "`workloads[1000]` is 1000 on rank 0 and 999 on rank 2"),
        ("extra", 1, "`extra` is absent on rank 0 and present on rank 2"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(name, value, message):
    def disagree(rank, world_size):
        check = CollectiveCheck(dist.group.WORLD)
        check("rewards")
        with pytest.raises(RuntimeError, match="about to do different things") as caught:
            check("update", **{**AGREED, **({name: value} if rank == 2 else {})})
        return str(caught.value)

    messages = run_distributed(disagree, 3)
    assert len(set(messages)) == 1
    assert message in messages[0]
    assert "phase 'update' and 'update'; checked before: rewards and rewards" in messages[0]


def test_a_fact_of_a_kind_that_cannot_be_compared_is_refused():
    def refuse(rank, world_size):
        with pytest.raises(TypeError, match="got object"):
            CollectiveCheck(dist.group.WORLD)("update", plan=object())

    run_distributed(refuse, 2)


def test_a_skipped_phase_is_named_with_what_came_before():
    def skip(rank, world_size):
        check = CollectiveCheck(dist.group.WORLD)
        for phase in ["rollout", "reference", "update"] if rank == 0 else ["rollout", "update"]:
            check(phase, step=1)

    with pytest.raises(AssertionError) as caught:
        run_distributed(skip, 2)
    assert '`phase` is "reference" on rank 0 and "update" on rank 1' in str(caught.value)
    assert "checked before: rollout and rollout" in str(caught.value)
