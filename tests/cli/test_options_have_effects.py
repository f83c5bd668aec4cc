"""Every option of cutting, set to another value, changes a plan or is refused."""

import dataclasses
import random

import pytest

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.distributed.mesh import single_process_meshes

BASE = {"max_tokens_per_rank": 4096}
# How each option is set, and what it needs beside it.
CHANGES = {
    "max_tokens_per_rank": {"max_tokens_per_rank": 2048},
    "micro_batch_size": {"max_tokens_per_rank": None, "micro_batch_size": 2},
    "log_prob_max_tokens_per_rank": {"log_prob_max_tokens_per_rank": 9000},
    "log_prob_micro_batch_size": {"max_tokens_per_rank": None, "micro_batch_size": 2, "log_prob_micro_batch_size": 8},
    "critic_max_tokens_per_rank": {"critic_max_tokens_per_rank": 9000},
    "critic_micro_batch_size": {"max_tokens_per_rank": None, "micro_batch_size": 2, "critic_micro_batch_size": 8},
    "balance": {"balance": False},
    "equal_size": {"equal_size": True},
    "planner": {"planner": "per_rank"},
    "oversize": {"max_tokens_per_rank": 1024, "oversize": "isolate"},
    "coefficient": {"coefficient": 0},
    "padded": {"padded": True},
}


def plans(options):
    """Return what the update, the log-prob passes and the critic run, or what is refused."""
    lengths = [min(2000, int(random.Random(seed).lognormvariate(6, 1)) + 2) for seed in range(64)]
    meshes = dataclasses.replace(single_process_meshes(), dp_size=4)
    try:
        made = BatchingOptions(**options)
        plan = made.plan(lengths, meshes)
        others = [made.recut(lengths, plan.samples_per_rank, meshes, role=role).assignment for role in ("log_prob", "critic")]
        return plan.assignment, *others
    except ValueError as error:
        return str(error)


def test_every_option_is_tried():
    assert {field.name for field in dataclasses.fields(BatchingOptions)} == set(CHANGES)


@pytest.mark.parametrize("option", CHANGES)
@pytest.mark.filterwarnings("ignore:.*oversize micro-batch")
def test_an_option_set_to_another_value_changes_what_runs(option):
    changed = BASE | CHANGES[option]
    without = {name: value for name, value in changed.items() if name != option} if len(CHANGES[option]) > 1 else BASE
    if option == "micro_batch_size":
        without = BASE
    assert plans(changed) != plans(without)
    assert not isinstance(plans(changed), str)
