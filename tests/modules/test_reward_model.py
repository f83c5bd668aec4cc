"""Rewards of a sequence classifier, scored in packed micro-batches over ranks."""

import itertools
from typing import Any

import pytest
import torch
from hand_made import ScriptedPPO, prompts, varied_reward
from helpers import ToyTokenizer, make_trainer, tiny_llama
from transformers import LlamaConfig, LlamaForSequenceClassification

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.modules.reward_model import build_reward_scorer, score_sequences
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

SEQUENCES = [[5, 7, 9], [3], [4, 4, 4, 8, 1, 2, 30, 11], [6, 2], [9] * 13]


def reward_model() -> LlamaForSequenceClassification:
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
    with torch.random.fork_rng(devices=[]):  # torch's seed is that of the runs' data
        torch.manual_seed(3)
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


VALIDATED = "gac"  # answered by 7, 1 and 3 tokens


class Watched(ScriptedPPO):
    """Keeps the tokens that it rewarded last: those of validation."""

    def compute_rewards(self, **arguments: Any) -> Any:
        self.seen = [ToyTokenizer().encode(prompt) + list(ids) for prompt, ids in zip(arguments["prompts"], arguments["completion_ids"])]
        return super().compute_rewards(**arguments)


def validated(rank: int, world_size: int, functions: list[Any], sp_size: int = 1) -> tuple[dict[str, float], list[list[int]]]:
    module = Watched(tiny_llama, functions, reward_model=reward_model, reward_model_weight=2.0)
    data = RolloutDataModule(
        lambda: prompts("ab"),
        ToyTokenizer(),
        val_prompts=lambda: prompts(VALIDATED),
        val_rollouts_per_prompt=4,
        train_batch_size=2,
        mini_batch_size=2,
        rollouts_per_prompt=2,
        max_prompt_length=1,
        max_response_length=7,
        max_tokens_per_rank=12,
    )
    trainer = make_trainer(world_size, RLBatchFSDPStrategy(sp_size), limit_val_batches=1.0)
    trainer.validate(module, datamodule=data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.seen


def test_validation_has_the_reward_models_scores_and_the_best_of_k_tries_on_any_number_of_ranks() -> None:
    def fn(rank: int, world_size: int, sp_size: int = 1) -> Any:
        return validated(rank, world_size, [varied_reward], sp_size), validated(rank, world_size, [], sp_size)

    ((found, sequences), (alone, _)) = run_distributed(fn, 1, init_process_group=False)[0]
    assert len(sequences) == 12
    model = reward_model().eval()
    with torch.no_grad():
        scores = [float(model(torch.tensor([sequence])).logits) for sequence in sequences]
    rewards = [2.0 * score + 1.0 + sum(sequence[1:]) % 7 for score, sequence in zip(scores, sequences)]
    assert found["val/reward/reward_model"] == pytest.approx(sum(scores) / 12, rel=1e-4)
    assert found["val/reward/mean"] == pytest.approx(sum(rewards) / 12, rel=1e-4)
    assert alone["val/reward/mean"] == pytest.approx(2.0 * sum(scores) / 12, rel=1e-4)  # a NaN if only functions counted
    groups = [rewards[start : start + 4] for start in (0, 4, 8)]
    for k in (2, 4):
        best = [max(tries) for group in groups for tries in itertools.combinations(group, k)]
        assert found[f"val/reward/best_of_{k}"] == pytest.approx(sum(best) / len(best), rel=1e-4)
    # No two texts are alike, so that all share the win.
    assert found["val/reward/majority_of_4"] == pytest.approx(sum(rewards) / 12, rel=1e-4)
    for world_size, sp_size in ((2, 1), (2, 2)):
        for (other, _), (other_alone, _) in run_distributed(fn, world_size, sp_size, init_process_group=False):
            assert other == pytest.approx(found, rel=1e-4)
            assert other_alone == pytest.approx(alone, rel=1e-4)
