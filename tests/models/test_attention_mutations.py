"""Seven bugs that were found in other systems, planted on purpose: the parity harness must see each of them."""

import pytest
import torch
from parity_step import Case, Step, make_batch, sp_groups

from lightning_rlbatch.distributed.ulysses import shard_sequence
from lightning_rlbatch.models.packed_inputs import PackedLengths, packed_model_kwargs
from lightning_rlbatch.testing import run_distributed

TOLERANCE = 1e-5


class LossFactorDpOnly(Step):
    """Each rank's own tokens times dp, where dp * sp is right."""

    def loss(self, local_terms, batch, group, dp_size, total_tokens):
        return dp_size * local_terms[: real_tokens(batch, group)].sum() / total_tokens


class LossFactorOne(Step):
    def loss(self, local_terms, batch, group, dp_size, total_tokens):
        return local_terms[: real_tokens(batch, group)].sum() / total_tokens


class MeanPerRank(Step):
    """The mean over each rank's own tokens, in place of the sum over the count of the whole mini-batch."""

    def loss(self, local_terms, batch, group, dp_size, total_tokens):
        count = real_tokens(batch, group)
        return local_terms[:count].sum() / max(count, 1)


class LabelsSlicedBeforeShifting(Step):
    def labels(self, batch, group):
        labels = shard_sequence(batch["input_ids"], group, pad_value=-1).roll(-1)
        labels[-1] = -1
        ends = torch.zeros(batch.num_tokens, dtype=torch.bool)
        ends[batch.cu_seqlens[1:].long() - 1] = True
        return torch.where(shard_sequence(ends, group, pad_value=1), -1, labels)


class NoDocumentMask(Step):
    def model_kwargs(self, batch, group):
        kwargs = packed_model_kwargs(batch, sp_group=group)
        return kwargs | {"packed_lengths": PackedLengths([kwargs["packed_lengths"].num_tokens])}


class PositionsRestartPerShard(Step):
    def model_kwargs(self, batch, group):
        kwargs = packed_model_kwargs(batch, sp_group=group)
        positions = kwargs["position_ids"][0].clone()
        starts = (positions == 0).nonzero()
        first = int(starts[0]) if len(starts) else len(positions)
        positions[:first] = torch.arange(first)
        return kwargs | {"position_ids": positions.unsqueeze(0)}


class SampleEndScoredWithNeighbour(Step):
    def labels(self, batch, group):
        labels = batch["input_ids"].roll(-1)
        labels[-1] = -1
        return shard_sequence(labels, group, pad_value=-1)


def real_tokens(batch, group):
    """Tokens of this rank that are not padding."""
    return int(shard_sequence(torch.ones(batch.num_tokens, dtype=torch.int64), group).sum())


MUTATIONS = [
    LossFactorDpOnly,
    LossFactorOne,
    MeanPerRank,
    LabelsSlicedBeforeShifting,
    NoDocumentMask,
    PositionsRestartPerShard,
    SampleEndScoredWithNeighbour,
]


@pytest.fixture(scope="module")
def case():
    return Case("llama", [make_batch([5, 1, 7]), make_batch([9, 2], seed=1)])


def worst_error(case, step_class):
    results = run_distributed(lambda rank, size: case.errors(sp_groups(2), step_class()), 4)
    return max(max(errors.values()) for errors in results)


def test_the_right_step_passes(case):
    assert worst_error(case, Step) < TOLERANCE


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_planted_bug_fails_the_parity_harness_by_a_wide_margin(case, mutation):
    error = worst_error(case, mutation)
    print(f"{mutation.__name__}: {error:.1e}")  # shown by pytest -s
    assert error > 30 * TOLERANCE
