import itertools

import pytest
import torch.distributed as dist

from lightning_rlbatch.data.streaming import stream_mini_batches
from lightning_rlbatch.testing import run_distributed

LOCAL = {0: ["aaaaaaaa", "bbbbbbbb", "cc", "dddd", "e"], 1: ["f"], 2: []}


def _stream(rank, world_size):
    batches = stream_mini_batches(LOCAL[rank], len, samples_per_rank=2, group=dist.group.WORLD, max_tokens_per_rank=8)
    return list(batches)


def test_ranks_with_streams_of_different_length_end_together():
    results = run_distributed(_stream, 3)
    assert [[len(batch) for batch in rank] for rank in results] == [[2, 1, 1]] * 3
    for rank, batches in enumerate(results):
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(batches))
        assert sorted(flat) == sorted(LOCAL[rank])
        assert all(sum(map(len, bucket)) <= 8 for batch in batches for bucket in batch)


def test_a_bad_share_is_named():
    with pytest.raises(ValueError, match="`samples_per_rank` must be at least 1 but got 0"):
        next(stream_mini_batches(["a"], len, samples_per_rank=0, group=None, max_tokens_per_rank=8))


def _oversize(rank, world_size):
    batches = stream_mini_batches(LOCAL[rank], len, samples_per_rank=2, group=dist.group.WORLD, max_tokens_per_rank=4)
    with pytest.raises(ValueError, match=r"Sample \d has|Another rank") as caught:
        next(batches)
    return str(caught.value)


def test_an_oversize_sample_on_one_rank_is_an_error_on_all():
    texts = run_distributed(_oversize, 2)
    assert "Sample 0 has 8 tokens but a micro-batch may hold 4" in texts[0]
    assert "Another rank of the data-parallel group" in texts[1]


def _unreadable(rank, world_size):
    def samples():
        yield "a"
        if rank == 1:
            raise OSError("the file of this rank is damaged")
        yield "b"

    batches = stream_mini_batches(samples(), len, samples_per_rank=2, group=dist.group.WORLD, max_tokens_per_rank=4)
    with pytest.raises((OSError, ValueError)) as caught:
        next(batches)
    return type(caught.value), str(caught.value)


def test_a_stream_that_breaks_on_one_rank_is_an_error_on_all():
    (peer, peer_text), (own, own_text) = run_distributed(_unreadable, 2)
    assert own is OSError
    assert "file of this rank is damaged" in own_text
    assert peer is ValueError
    assert "Another rank of the data-parallel group could not read" in peer_text
