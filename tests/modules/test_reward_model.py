"""Rewards of a sequence classifier, scored in packed micro-batches over ranks."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.modules.reward_model import build_reward_scorer, score_sequences
from lightning_rlbatch.testing import run_distributed

SEQUENCES = [[5, 7, 9], [3], [4, 4, 4, 8, 1, 2, 30, 11], [6, 2], [9] * 13]


def reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=49,
    )
    return LlamaForSequenceClassification(config)


def one_by_one() -> list[float]:
    model = reward_model().eval()
    with torch.no_grad():
        return [float(model(torch.tensor([sequence])).logits) for sequence in SEQUENCES]


def scores_on_ranks(rank: int, world_size: int, sp_size: int, remove_padding: bool) -> list[float]:
    meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
    scorer = build_reward_scorer(reward_model, remove_padding=remove_padding, sp_group=meshes.sp_group)
    own = SEQUENCES if world_size == 1 else (SEQUENCES if rank == world_size - 1 else [])  # all on the last rank, none on the others
    options = BatchingOptions(max_tokens_per_rank=16, log_prob_max_tokens_per_rank=20, padded=not remove_padding)
    with torch.no_grad():
        return score_sequences(own, scorer, options, meshes, torch.device("cpu"))


@pytest.mark.parametrize(
    ("world_size", "sp_size", "remove_padding"), [(1, 1, True), (2, 1, True), (2, 1, False), (2, 2, True), (4, 2, True)]
)
def test_scores_equal_those_of_the_classifier_and_return_to_the_rank_that_asked(
    world_size: int, sp_size: int, remove_padding: bool
) -> None:
    results = run_distributed(scores_on_ranks, world_size, sp_size, remove_padding)
    assert results[-1] == pytest.approx(one_by_one(), rel=1e-4, abs=1e-6)
    assert all(result == [] for result in results[:-1])


def test_a_classifier_with_two_labels_is_refused() -> None:
    def two_labels() -> LlamaForSequenceClassification:
        model = reward_model()
        model.score = torch.nn.Linear(32, 2, bias=False)
        return model

    with pytest.raises(ValueError, match="one output"):
        build_reward_scorer(two_labels, remove_padding=True, sp_group=None)
