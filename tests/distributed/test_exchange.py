import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.exchange import exchange_samples, plan_destinations
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.testing import run_distributed


def make_samples(num_samples, seed, max_length=12):
    """Return samples with fields of every dtype and shape, NaN bit patterns included; none gives an empty batch with the schema."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (max(num_samples, 1),), generator=generator).tolist()
    tokens, count = sum(lengths), len(lengths)
    mask = torch.rand(tokens, generator=generator) > 0.5
    mask[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False
    log_probs = torch.randn(tokens, generator=generator)
    log_probs[~mask] = torch.nan
    batch = PackedBatch(
        [0, *torch.tensor(lengths).cumsum(0).tolist()],
        {
            "input_ids": torch.randint(-(2**62), 2**62, (tokens,), generator=generator),
            "response_mask": mask,
            "old_log_probs": log_probs,
            "hidden": torch.randn(tokens, 3, generator=generator).to(torch.bfloat16),
            "half": torch.randn(tokens, 1, 2, generator=generator).to(torch.float16),
        },
        {
            "group_ids": torch.randint(0, 100, (count,), generator=generator),
            "truncated": torch.rand(count, generator=generator) > 0.5,
            "embedding": torch.randn(count, 2, 2, generator=generator).to(torch.bfloat16),
            "reward": torch.randn(count, generator=generator, dtype=torch.float64),
        },
    )
    return batch if num_samples else PackedBatch.empty(batch.schema)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def same_batches(left, right):
    names = [*right.per_token, *right.per_sample]
    return (
        left.schema == right.schema
        and left.seq_lens == right.seq_lens
        and left.cu_seqlens.equal(right.cu_seqlens)
        and all(as_bytes(left[name]) == as_bytes(right[name]) for name in names)
    )


def check_exchange(group, counts, destinations, order=None, seed=0):
    """Exchange, compare with a reference that holds everything, and return this rank's route.

    `destinations[source][position]` and `order[source][position]` describe the samples of all ranks.
    """
    rank = group.rank() if group is not None else 0
    batches = [make_samples(count, seed * 100 + source) for source, count in enumerate(counts)]
    everything = PackedBatch.concat(batches)
    received, route = exchange_samples(batches[rank], destinations[rank], group, order=None if order is None else order[rank])

    flat = [entry if isinstance(entry, list) else [entry] for of_rank in destinations for entry in of_rank]
    wanted = [index for index, ranks in enumerate(flat) if rank in ranks]
    if order is not None:
        keys = [key for of_rank in order for key in of_rank]
        wanted.sort(key=lambda index: keys[index])
    assert same_batches(received, everything.select(wanted))
    assert list(route.global_ids) == wanted

    # Results carry their rank, so that the test sees from which destination they come.
    ids = torch.tensor(wanted, dtype=torch.float64)
    results = route.back(
        {"mark": torch.full((received.num_tokens, 1), rank, dtype=torch.int16), "ids": received["input_ids"]},
        {"where": torch.stack([ids, ids * 0 + rank], dim=1)},
    )
    own = list(range(sum(counts[:rank]), sum(counts[: rank + 1])))
    assert results["ids"].equal(batches[rank]["input_ids"])
    assert results["where"].tolist() == [[index, flat[index][0]] for index in own]
    expected = [flat[index][0] for index, length in zip(own, batches[rank].seq_lens) for _ in range(length)]
    assert results["mark"].shape == (len(expected), 1)
    assert results["mark"].flatten().tolist() == expected
    assert route.back(received["old_log_probs"]).shape == batches[rank]["old_log_probs"].shape
    return route


def test_a_lone_process_keeps_its_samples_in_the_order_of_its_keys():
    check_exchange(None, [4], [[0, 0, [0], 0]])
    route = check_exchange(None, [4], [[0, 0, [0], 0]], order=[[5, -2, 9, 0]])
    assert route.global_ids == (1, 3, 0, 2)
    assert (route.bytes_sent, route.bytes_received, route.num_samples_moved) == (0, 0, 0)
    check_exchange(None, [0], [[]])


def test_destinations_and_order_may_be_tensors_or_arrays():
    batch = make_samples(4, 0)
    expected = batch.select([1, 3, 0, 2])
    for destinations in (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1, dtype=torch.int32), [torch.tensor(0)] * 4, np.zeros(4, int)):
        for order in (torch.tensor([5, -2, 9, 0]), np.array([5, -2, 9, 0])):
            assert same_batches(exchange_samples(batch, destinations, None, order=order)[0], expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_exchanges_equal_the_reference_that_holds_everything(world_size):
    def fuzz(rank, world_size):
        for seed in range(12):
            chance = random.Random(seed)
            counts = [chance.choice([0, 1, 2, 5]) for _ in range(world_size)]
            destinations = [[chance.sample(range(world_size), chance.randint(1, world_size)) for _ in range(count)] for count in counts]
            keys = chance.sample(range(-1000, 1000), sum(counts))
            order = [[keys.pop() for _ in range(count)] for count in counts] if seed % 2 else None
            check_exchange(dist.group.WORLD, counts, destinations, order, seed)

    run_distributed(fuzz, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_samples_can_go_to_one_rank_or_come_from_one_rank(world_size):
    def exchange(rank, world_size):
        counts = list(range(1, world_size + 1))
        check_exchange(dist.group.WORLD, counts, [[world_size - 1] * count for count in counts])
        alone = [0] * (world_size - 1) + [5]
        check_exchange(dist.group.WORLD, alone, [[]] * (world_size - 1) + [[index % world_size for index in range(5)]])
        check_exchange(dist.group.WORLD, [0] * world_size, [[]] * world_size)

    run_distributed(exchange, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_samples_that_stay_are_not_sent(world_size):
    def exchange(rank, world_size):
        route = check_exchange(dist.group.WORLD, [2] * world_size, [[source, [source]] for source in range(world_size)])
        assert (route.bytes_sent, route.bytes_received, route.num_samples_moved) == (0, 0, 0)
        # Rank 0 sends one of its two samples to rank 1; everything else stays.
        destinations = [[source, source] for source in range(world_size)]
        destinations[0][1] = 1
        route = check_exchange(dist.group.WORLD, [2] * world_size, destinations)
        assert route.num_samples_moved == 1
        return route.bytes_sent, route.bytes_received

    length = make_samples(2, 0).seq_lens[1]
    per_token = (8, 1, 4, 2 * 3, 2 * 2)  # bytes of input_ids, response_mask, old_log_probs, hidden, half
    per_sample = (8, 1, 2 * 4, 8)  # group_ids, truncated, embedding, reward
    expected = sum(-(-size * length // 16) * 16 for size in per_token) + sum(-(-size // 16) * 16 for size in per_sample)
    counted = run_distributed(exchange, world_size)
    assert counted == [(expected, 0), (0, expected), *[(0, 0)] * (world_size - 2)]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_counted_bytes_are_those_that_the_one_all_to_all_carries(world_size, monkeypatch):
    """Count at torch's own functions; what is gathered by all ranks is integers about samples, never fields."""
    calls = []

    def counted(name):
        original = getattr(dist, name)

        def wrapper(output, given, *arguments, **options):
            calls.append((name, given.numel() * given.element_size(), options.get("group")))
            return original(output, given, *arguments, **options)

        monkeypatch.setattr(dist, name, wrapper)

    def exchange(rank, world_size):
        for name in ("all_to_all_single", "all_gather", "all_reduce", "broadcast", "gather", "all_gather_object"):
            counted(name)
        batch = make_samples(3, rank, max_length=200)
        destinations = [rank, (rank + 1) % world_size, 0]
        _, route = exchange_samples(batch, destinations, dist.group.WORLD)
        assert [name for name, _, _ in calls] == ["all_gather", "all_gather", "all_to_all_single"]
        assert all(group is dist.group.WORLD for _, _, group in calls)
        assert calls[0][1] == 4 * 8
        assert calls[1][1] == 3 * 4 * 8
        assert calls[2][1] == route.bytes_sent
        moved = {destination: 0 for destination in destinations if destination != rank}
        for index, destination in enumerate(destinations):
            if destination != rank:
                moved[destination] += batch.seq_lens[index]
        # 23 bytes per token, 25 per sample; each of nine fields and destinations is padded by less than 16.
        exact = 23 * sum(moved.values()) + 25 * sum(destination != rank for destination in destinations)
        assert exact <= route.bytes_sent < exact + 9 * 16 * max(len(moved), 1)
        return route.bytes_sent, route.bytes_received, route.num_samples_moved

    results = run_distributed(exchange, world_size)
    assert sum(sent for sent, _, _ in results) == sum(received for _, received, _ in results)
    assert {moved for _, _, moved in results} == {world_size + world_size - 1}


@pytest.mark.parametrize(("world_size", "sp_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_a_plan_lays_samples_out_in_micro_steps_and_gives_peers_the_same(world_size, sp_size):
    lengths = [make_samples(count, source).seq_lens for source, count in enumerate([3, 0, 4, 2][:world_size])]
    flat = [length for of_rank in lengths for length in of_rank]
    plan = plan_mini_batch(flat, dp_size=world_size // sp_size, max_tokens_per_rank=12, sp_size=sp_size)

    def exchange(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
        samples_per_rank = [len(of_rank) for of_rank in lengths]
        everything = PackedBatch.concat([make_samples(count, source) for source, count in enumerate(samples_per_rank)])
        destinations, order = plan_destinations(plan.assignment, samples_per_rank, rank, sp_size=sp_size)
        received, route = exchange_samples(make_samples(samples_per_rank[rank], rank), destinations, meshes.world_group, order=order)
        in_plan_order = [index for step in plan.assignment[meshes.dp_rank] for index in step]
        assert same_batches(received, everything.select(in_plan_order))
        assert route.back(received["input_ids"]).equal(make_samples(samples_per_rank[rank], rank)["input_ids"])

        # Now SP peers hold the same samples: each column of the mesh moves its own copy, here back to contiguous blocks.
        held = [sum(map(len, steps)) for steps in plan.assignment]
        block = -(-sum(held) // meshes.dp_size)
        contiguous = [min(index // block, meshes.dp_size - 1) for index in range(sum(held))]
        moved, _ = exchange_samples(received, [contiguous[index] for index in in_plan_order], meshes.dp_group, order=in_plan_order)
        assert same_batches(moved, everything.select([index for index, to in enumerate(contiguous) if to == meshes.dp_rank]))

    run_distributed(exchange, world_size)


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 data-parallel ranks of 2 ranks each needs 4 ranks, but the exchange has 2"):
        plan_destinations([[[0]], [[1]]], [1, 1], 0, sp_size=2)
    with pytest.raises(ValueError, match=r"each of the 3 samples exactly once, got \[0, 1, 1\]"):
        plan_destinations([[[0, 1]], [[1]]], [2, 1], 0)


def refusal(batch, destinations, group, **arguments):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers compare the whole message
        exchange_samples(batch, destinations, group, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("destinations", "order", "message"),
    [
        ([0, 2], None, "sample 1 must go to ranks 0 to 1 of the group, got [2]"),
        ([0, []], None, "sample 1 must go to at least one rank and to none twice, got []"),
        ([[1, 1], 0], None, "sample 0 must go to at least one rank and to none twice, got [1, 1]"),
        ([0], None, "`destinations` must have one entry per sample, 2, got 1"),
        ([0, 0], [1], "`order` must have one key per sample, 2, got 1"),
        ([0, 0], [1, 2**63], "the key of sample 1 must fit into 64 bits"),
        ([0, None], None, "must hold integers"),
        ([0, "x"], None, "must hold integers"),
        ([0, 0.5], None, "must hold integers"),
    ],
)
def test_wrong_arguments_on_one_rank_are_the_same_error_on_every_rank(destinations, order, message):
    def exchange(rank, world_size):
        batch = make_samples(2, rank)
        arguments = (destinations, order) if rank == 1 else ([0, 1], None if order is None else [10, 11])
        return refusal(batch, arguments[0], dist.group.WORLD, order=arguments[1])

    first, second = run_distributed(exchange, 2)
    assert first == second
    assert first.startswith("On rank 1 ")
    assert message in first


def test_keys_that_repeat_or_are_missing_on_a_rank_are_the_same_error_on_every_rank():
    def exchange(rank, world_size):
        group, batch = dist.group.WORLD, make_samples(2 if rank < 2 else 0, rank)
        own = [0] * batch.num_samples
        return (
            refusal(batch, own, group, order=[[3, 4], [5, 4], []][rank]),
            refusal(batch, own, group, order=[[3, 4], None, None][rank]),
        )

    messages = run_distributed(exchange, 3)
    assert len(set(messages)) == 1
    repeated, missing = messages[0]
    assert "sample 1 of rank 0 and sample 1 of rank 1 both have 4" in repeated
    assert "it was passed on ranks [0] of 3" in missing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.without_fields(["reward"]), "field 'reward' is [N] float64 on rank 0 and missing on rank 1"),
        (
            lambda batch: batch.with_fields(per_token={"hidden": batch["hidden"].float()}),
            "field 'hidden' is [T, 3] bfloat16 on rank 0 and [T, 3] float32 on rank 1",
        ),
        (
            lambda batch: batch.with_fields(per_sample={"embedding": batch["embedding"][:, :1]}),
            "field 'embedding' is [N, 2, 2] bfloat16 on rank 0 and [N, 1, 2] bfloat16 on rank 1",
        ),
        (
            lambda batch: batch.with_fields(per_token={"advantages": batch["old_log_probs"]}),
            "field 'advantages' is missing on rank 0 and [T] float32 on rank 1",
        ),
    ],
)
@pytest.mark.parametrize("num_samples", [0, 2])
def test_fields_that_differ_are_the_same_error_on_every_rank_naming_the_field(change, message, num_samples):
    def exchange(rank, world_size):
        batch = make_samples(num_samples, rank)
        return refusal(change(batch) if rank == 1 else batch, [0] * num_samples, dist.group.WORLD)

    first, second = run_distributed(exchange, 2)
    assert first == second
    assert message in first


def test_results_of_the_wrong_size_or_kind_are_the_same_error_on_every_rank():
    def exchange(rank, world_size):
        received, route = exchange_samples(make_samples(2, rank), [0, 1], dist.group.WORLD)
        good = received["old_log_probs"]
        messages = []
        for bad in (good[1:], {"values": good}, good.double(), torch.tensor(1.0), {"result": None}):
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
                route.back(bad if rank == 1 else good)
            messages.append(str(caught.value))
        with pytest.raises(ValueError, match="both per token and per sample"):
            route.back({"x": good}, {"x": good})
        assert route.back() == {}
        assert route.back(good).shape == make_samples(2, rank)["old_log_probs"].shape
        return messages

    first, second = run_distributed(exchange, 2)
    assert first == second
    assert "On rank 1 result 'result' must have one row for each of the" in first[0]
    assert "field 'result' is [T] float32 on rank 0 and missing on rank 1" in first[1]
    assert "field 'result' is [T] float32 on rank 0 and [T] float64 on rank 1" in first[2]
    assert "got shape []" in first[3]
    assert "must be a tensor, got NoneType" in first[4]


def test_no_gradient_flows_through_an_exchange():
    def exchange(rank, world_size):
        batch = make_samples(2, rank)
        batch = batch.with_fields(per_token={"old_log_probs": batch["old_log_probs"].clone().requires_grad_()})
        received, route = exchange_samples(batch, [rank, 0], dist.group.WORLD)
        assert not received["old_log_probs"].requires_grad
        assert not route.back(received["old_log_probs"].clone().requires_grad_()).requires_grad

    run_distributed(exchange, 2)
    received, _ = exchange_samples(make_samples(1, 0).with_fields(per_sample={"w": torch.ones(1, requires_grad=True)}), [0], None)
    assert not received["w"].requires_grad


@pytest.mark.cuda
def test_a_gpu_batch_stays_on_the_gpu():
    batch = make_samples(4, 0).to("cuda")
    received, route = exchange_samples(batch, [0] * 4, None, order=[3, 1, 2, 0])
    assert received.device.type == "cuda"
    assert same_batches(received.to("cpu"), make_samples(4, 0).select([3, 1, 2, 0]))
    assert route.back(received["input_ids"]).equal(batch["input_ids"])
