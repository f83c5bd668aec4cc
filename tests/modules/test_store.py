"""Rollouts of an iteration across ranks: who holds what, in which order results come back, and what a micro-batch may hold (R05, R07)."""

import dataclasses

import pytest
import torch
from hand_made import deal, make_samples

from lightning_rlbatch.data import BatchingOptions, MiniBatch
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.testing import run_distributed

LENGTHS = [5, 3, 9, 2, 7, 7, 4, 8, 3, 6]
SHAPES = [(1, length - 1) for length in LENGTHS]
BUDGETS = [
    BatchingOptions(max_tokens_per_rank=9),
    BatchingOptions(max_tokens_per_rank=16, log_prob_max_tokens_per_rank=30),
    BatchingOptions(micro_batch_size=3),
    BatchingOptions(max_tokens_per_rank=9, balance=False),
]


def named_samples():
    """Every token carries a number of its own: ten times its sample's id plus its position."""
    samples = make_samples(SHAPES)
    return samples.with_fields(per_token={"name": 10 * samples.sample_ids_per_token + samples.position_ids})


def ids_of(batch):
    return [index for micro in batch.micro_batches if micro["response_mask"].any() for index in micro[SAMPLE_ID].tolist()]


@pytest.mark.parametrize(("world_size", "sp_size"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_scores_come_back_to_the_tokens_they_belong_to(world_size, sp_size):
    def fn(rank, size):
        meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
        outcome = []
        for options in BUDGETS:
            store, calls = deal(named_samples(), options, meshes), []

            def forward(micro, calls=calls):
                calls.append(micro.num_tokens)
                return {"score": micro["name"].double() + 0.5}

            score = store.score(forward)["score"]
            right = torch.equal(score, store.samples["name"].double() + 0.5)
            outcome.append((right, store.samples[SAMPLE_ID].tolist() == store.sample_ids, len(calls), max(calls), store.sample_ids))
        return outcome

    ranks = run_distributed(fn, world_size)
    for number, options in enumerate(BUDGETS):
        results = [rank[number] for rank in ranks]
        assert all(right and ordered for right, ordered, *_ in results)
        assert len({num_calls for _, _, num_calls, _, _ in results}) == 1
        budget = options.log_prob_max_tokens_per_rank or options.max_tokens_per_rank
        assert budget is None or all(most <= budget * sp_size for _, _, _, most, _ in results)
        held = [index for rank in range(0, world_size, sp_size) for index in results[rank][4]]
        assert sorted(held) == list(range(10))


def test_samples_move_whole_when_later_mini_batches_have_other_members():
    epochs = [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[9, 2, 5, 0, 7], [1, 3, 8, 6, 4]], [[3, 1, 4, 5, 9], [2, 6, 8, 7, 0]]]

    def fn(rank, size):
        store = deal(named_samples(), BUDGETS[0], build_meshes("cpu"))
        seen = []
        for mini_batches in epochs:
            for ids in mini_batches:
                batch = store.mini_batch(ids)
                for micro in batch.micro_batches:
                    if micro["response_mask"].any():
                        expected = 10 * micro[SAMPLE_ID][micro.sample_ids_per_token] + micro.position_ids
                        assert torch.equal(micro["name"], expected)
                seen.append((ids_of(batch), len(batch.micro_batches)))
        return seen

    ranks = run_distributed(fn, 4)
    for number, ids in enumerate(ids for mini_batches in epochs for ids in mini_batches):
        assert sorted(index for rank in ranks for index in rank[number][0]) == sorted(ids)
        assert len({rank[number][1] for rank in ranks}) == 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("world_size", "sp_size"), [(1, 1), (2, 1), (2, 2)])
def test_no_micro_batch_is_above_the_budget(world_size, sp_size, padded):
    if padded and sp_size > 1:
        return  # refused elsewhere

    def fn(rank, size):
        meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
        options = dataclasses.replace(BUDGETS[0], padded=padded)
        batch = deal(named_samples(), options, meshes).mini_batch(list(range(10)))
        return [micro.num_samples * micro.max_seqlen if padded else micro.num_tokens for micro in batch.micro_batches]

    for tokens in run_distributed(fn, world_size):
        assert max(tokens) <= 9 * sp_size


def test_two_sequence_parallel_ranks_hold_twice_the_budget_of_one():
    def fn(rank, size):
        store = deal(make_samples([(1, 9), (1, 5)]), BatchingOptions(max_tokens_per_rank=8), build_meshes("cpu", sequence_parallel_size=2))
        return [micro.num_tokens for micro in store.mini_batch([0, 1]).micro_batches]

    assert run_distributed(fn, 2) == [[16], [16]]


def test_sequence_parallel_peers_get_the_same_batches_and_data_parallel_ranks_get_others():
    def fn(rank, size):
        batch = deal(named_samples(), BUDGETS[0], build_meshes("cpu", sequence_parallel_size=2)).mini_batch(list(range(10)))
        return [micro["name"].tolist() for micro in batch.micro_batches], ids_of(batch)

    (first, ids), (peer, _), (other, other_ids), (other_peer, _) = run_distributed(fn, 4)
    assert first == peer
    assert other == other_peer
    assert not set(ids) & set(other_ids)


def test_filler_lies_on_the_device_of_the_samples():
    batch = MiniBatch.cut(make_samples(SHAPES).to("meta"), [[0], []])
    assert [micro.device.type for micro in batch.micro_batches] == ["meta", "meta"]


def test_filler_has_a_token_for_every_sequence_parallel_rank_and_no_response():
    for sp_size, expected in ((1, 2), (2, 2), (4, 4)):
        (filler,) = MiniBatch.cut(make_samples(SHAPES), [[]], sp_size=sp_size).micro_batches
        assert filler.num_tokens == expected
        assert not filler["response_mask"].any()
