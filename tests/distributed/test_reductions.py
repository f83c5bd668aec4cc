import math
import os
import random

import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.mesh import build_meshes, single_process_meshes
from lightning_rlbatch.distributed.reductions import (
    all_gather_ints,
    all_gather_lengths,
    all_gather_rows,
    all_reduce_max,
    all_reduce_min,
    all_reduce_sums,
    gradient_scale,
    stable_hash,
)
from lightning_rlbatch.testing import run_distributed

ROWS = {
    "bool": torch.tensor([True, False, True, True]),
    "int64": torch.tensor([-(2**62), 3, 2**62 + 1, 0]),
    "bf16": torch.tensor([[1.5, math.inf], [math.nan, -0.0], [2.0, 3.0], [4.0, 5.0]], dtype=torch.bfloat16),
    "fp16": torch.tensor([[[0.1]], [[0.2]], [[0.3]], [[0.4]]], dtype=torch.float16),
    "fp32": torch.tensor([0.1, math.nan, -math.inf, 0.4]),
    "fp64": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
    "uint8": torch.arange(12, dtype=torch.uint8).view(4, 3),
    "empty rows": torch.zeros(4, 0),
}
COUNTS = {1: [4], 2: [1, 3], 4: [0, 3, 0, 1]}


def same_bits(left, right):
    return (
        left.dtype == right.dtype and left.shape == right.shape and left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes()
        if left.dtype != torch.bfloat16
        else left.shape == right.shape and torch.equal(left.view(torch.int16), right.view(torch.int16))
    )


def test_a_lone_process_gets_its_own_data_back():
    assert all_gather_ints([1, 2], None) == [[1, 2]]
    assert all_gather_lengths([], None) == [[]]
    assert all_reduce_sums({"b": 2, "a": torch.tensor(1.5)}, None) == {"b": 2.0, "a": 1.5}
    rows, counts = all_gather_rows(ROWS["bf16"], None)
    assert same_bits(rows, ROWS["bf16"])
    assert counts == [4]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_lengths_of_all_ranks_are_gathered_whatever_their_numbers(world_size):
    def gather(rank, world_size):
        group = dist.group.WORLD
        uneven = list(range(rank * 10, rank * 10 + (3 * rank) % 4))
        as_tensor = all_gather_lengths(torch.tensor(uneven, dtype=torch.int32), group)
        assert as_tensor == all_gather_lengths(uneven, group)
        assert all_gather_lengths([], group) == [[]] * world_size
        assert all_gather_lengths([2**60 + 1] if rank == 0 else [], group)[0] == [2**60 + 1]
        assert all_gather_ints([], group) == [[]] * world_size
        return as_tensor

    expected = [list(range(rank * 10, rank * 10 + (3 * rank) % 4)) for rank in range(world_size)]
    assert run_distributed(gather, world_size) == [expected] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_of_every_dtype_and_number_arrive_bit_for_bit(world_size):
    def gather(rank, world_size):
        start = sum(COUNTS[world_size][:rank])
        for name, rows in ROWS.items():
            gathered, counts = all_gather_rows(rows[start : start + COUNTS[world_size][rank]], dist.group.WORLD)
            assert same_bits(gathered, rows), name
            assert counts == COUNTS[world_size]
        nothing, counts = all_gather_rows(torch.zeros(0, 5), dist.group.WORLD)
        assert nothing.shape == (0, 5)
        assert counts == [0] * world_size

    run_distributed(gather, world_size)


def test_rows_of_different_kinds_are_the_same_error_on_every_rank():
    def gather(rank, world_size):
        with pytest.raises(ValueError, match=r"rank 0: torch.float32.*\(2,\); rank 1: torch.float64.*\(2,\)") as caught:
            all_gather_rows(torch.zeros(rank, 2, dtype=torch.float64 if rank else torch.float32), dist.group.WORLD)
        return str(caught.value)

    first, second = run_distributed(gather, 2)
    assert first == second
    with pytest.raises(ValueError, match="at least one dimension"):
        all_gather_rows(torch.tensor(1.0), None)
    with pytest.raises(TypeError, match=r"integer tensor.*float32"):
        all_gather_lengths(torch.zeros(2), None)


@pytest.mark.parametrize("num_entries", [0, 1, 5, 124, 125, 300])
def test_sums_are_exact_in_one_reduction_however_many_entries(num_entries):
    def reduce(rank, world_size):
        values = {f"metric {index}": (rank + 1) * (2**40 + index) for index in range(num_entries)}
        shuffled = list(values.items())
        random.Random(rank).shuffle(shuffled)
        reduced = all_reduce_sums(dict(shuffled), dist.group.WORLD)
        assert list(reduced) == [name for name, _ in shuffled]
        return reduced

    for reduced in run_distributed(reduce, 4):
        assert reduced == {f"metric {index}": 10 * (2**40 + index) for index in range(num_entries)}


def test_sums_and_extrema_take_numbers_and_tensors_of_any_dtype():
    def reduce(rank, world_size):
        values = {
            "float": 0.1 + rank,
            "bool": torch.tensor(rank == 1),
            "bf16": torch.tensor([float(rank)], dtype=torch.bfloat16, requires_grad=True),
            "int64": torch.tensor(2**50 + rank),
            "nan": math.nan if rank else 1.0,
        }
        sums = all_reduce_sums(values, dist.group.WORLD)
        assert math.isnan(sums.pop("nan"))
        del values["nan"]
        return sums, all_reduce_max(values, dist.group.WORLD), all_reduce_min(values, dist.group.WORLD)

    for sums, largest, smallest in run_distributed(reduce, 2):
        assert sums == {"float": 0.1 + 1.1, "bool": 1.0, "bf16": 1.0, "int64": 2.0**51 + 1}
        assert largest == {"float": 1.1, "bool": 1.0, "bf16": 1.0, "int64": 2.0**50 + 1}
        assert smallest == {"float": 0.1, "bool": 0.0, "bf16": 0.0, "int64": 2.0**50}
    with pytest.raises(ValueError, match=r"`loss` must be .* got shape \(3,\)"):
        all_reduce_sums({"loss": torch.zeros(3)}, None)


@pytest.mark.parametrize("reduce_named", [all_reduce_sums, all_reduce_max, all_reduce_min])
def test_names_that_differ_are_an_error_on_every_rank_even_if_their_numbers_differ_widely(reduce_named):
    def reduce(rank, world_size):
        messages = []
        for names in (["a", "b"] if rank else ["a", "c"], ["a"] * (rank != 2), [str(number) for number in range(300 if rank == 3 else 2)]):
            with pytest.raises(RuntimeError, match="same names") as caught:
                reduce_named(dict.fromkeys(names, 1.0), dist.group.WORLD)
            messages.append(str(caught.value))
        return messages

    first, *others = run_distributed(reduce, 4)
    assert all(messages == first for messages in others)
    assert "rank 0: a, c; rank 1: a, b" in first[0]


def test_a_reduction_over_the_data_parallel_group_counts_sequence_parallel_peers_once():
    def reduce(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=2)
        local = {"tokens": [3, 5][meshes.dp_rank]}
        return all_reduce_sums(local, meshes.dp_group)["tokens"]

    assert run_distributed(reduce, 4) == [8.0] * 4


def test_ranks_agree_with_any_hash_seed():
    def agree(rank, world_size):
        os.environ["PYTHONHASHSEED"] = str(rank)
        return all_reduce_max({"num_micro_steps": [1, 4, 2, 0][rank]}, dist.group.WORLD)["num_micro_steps"], stable_hash("policy")

    assert run_distributed(agree, 4) == [(4, stable_hash("policy"))] * 4


@pytest.mark.parametrize(("world_size", "sp_size"), [(1, 1), (2, 1), (4, 2)])
def test_the_scaled_loss_has_the_gradient_of_the_whole_mini_batch(world_size, sp_size):
    """Samples differ by powers of ten, so that a lost or doubled one shows at a glance."""

    def gradient(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
        mine = [10.0**index for index in range(4) if index % meshes.dp_size == meshes.dp_rank]
        weight = torch.ones((), requires_grad=True)
        # Every peer computes the whole gathered loss; the gather hands each its slice of the gradient times sp_size.
        slices = mine[meshes.sp_rank :: sp_size]
        loss = gradient_scale(meshes, "fsdp") * sum(weight * value for value in slices) * sp_size
        loss.backward()
        dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM, group=meshes.world_group)
        return weight.grad.item() / world_size

    assert run_distributed(gradient, world_size) == [1111.0] * world_size


def test_the_gradient_scale_refuses_what_would_let_ranks_drift_apart():
    assert gradient_scale(single_process_meshes(), "none") == 1.0
    with pytest.raises(ValueError, match="'fsdp', 'ddp' or 'none', got 'sum'"):
        gradient_scale(single_process_meshes(), "sum")

    def refused(rank, world_size):
        with pytest.raises(ValueError, match="2 ranks must be averaged"):
            gradient_scale(build_meshes("cpu"), "none")

    run_distributed(refused, 2)
