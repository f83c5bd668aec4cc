import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples
from helpers import StepRecorder, length_reward, make_trainer, tiny_llama, whole_parameters

from lightning_rlbatch.callbacks import MemoryRehearsal
from lightning_rlbatch.callbacks.memory_rehearsal import heaviest_micro_batch, rehearsal_batch
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import GAE, plan_mini_batch
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

SHAPES = [(1, 9), (2, 8), (3, 5), (1, 3)]


class SizesSeen(PPOModule):
    """Keeps the tokens of every micro-batch that runs."""

    def policy_step(self, micro_batch, denominators):
        self.seen = [*getattr(self, "seen", []), micro_batch.num_tokens]
        return super().policy_step(micro_batch, denominators)


def run(world_size, callbacks, module=None, **options):
    recorder = StepRecorder()
    trainer = make_trainer(world_size, max_epochs=1, callbacks=[*callbacks, recorder])
    if module is None:
        module = SizesSeen(lambda: tiny_llama(), [length_reward], critic=lambda: tiny_llama(1), advantage=GAE(), kl_coefficient=0.1)
    cut = BatchingOptions(**{"max_tokens_per_rank": 24, **options})
    trainer.fit(module, datamodule=HandMadeDataModule(make_samples(SHAPES, dtype=torch.float32), [Step(cut)] * 2))
    return module, recorder


def test_a_run_with_a_rehearsal_is_the_same_run():
    cuts = [{}, {"critic_max_tokens_per_rank": 12}, {"max_tokens_per_rank": None, "micro_batch_size": 2}]

    def fn(rank, world_size):
        results = []
        for options in cuts:
            for callbacks in ([], [MemoryRehearsal(max_sample_length=20)]):
                module, recorder = run(world_size, callbacks, **options)
                results.append((whole_parameters(module), recorder.metrics, torch.get_rng_state(), module.seen))
        return results

    for results in run_distributed(fn, 2, init_process_group=False):
        for options, plain, rehearsed in zip(cuts, results[::2], results[1::2]):
            assert all(torch.equal(plain[0][name], rehearsed[0][name]) for name in plain[0])
            numbers = [[{n: v for n, v in row.items() if v == v} for row in run[1]] for run in (plain, rehearsed)]
            assert numbers[0] == numbers[1]
            assert torch.equal(plain[2], rehearsed[2])
            heaviest = 40 if "micro_batch_size" in options else 24
            assert rehearsed[3] == [heaviest, *plain[3]]  # before everything else, once


def test_the_heaviest_micro_batch_fills_the_budget_and_never_exceeds_it():
    plan = plan_mini_batch([3], dp_size=1, max_tokens_per_rank=10, sp_size=2)
    assert heaviest_micro_batch(plan, 6) == [6, 6, 6, 2]
    assert heaviest_micro_batch(plan, 19) == [19]  # a sample has two tokens at least
    assert heaviest_micro_batch(plan, 30) == [30]  # an oversize sample runs alone
    padded = plan_mini_batch([3], dp_size=1, max_tokens_per_rank=20, padded=True)
    assert heaviest_micro_batch(padded, 6) == [6, 6, 6]


def test_every_token_but_the_first_of_a_sample_is_scored():
    batch = rehearsal_batch(make_samples(SHAPES), [3, 2])
    assert batch["response_mask"].tolist() == [False, True, True, False, True]
    assert batch.schema == make_samples(SHAPES).schema


def test_out_of_memory_names_the_option_to_lower():
    class Full(PPOModule):
        def policy_step(self, micro_batch, denominators):
            raise torch.OutOfMemoryError("CUDA out of memory")

    def fn(rank, world_size):
        with pytest.raises(RuntimeError, match=r"24 in all \(max_tokens_per_rank=24, .*Lower max_tokens_per_rank"):
            run(world_size, [MemoryRehearsal(max_sample_length=20)], Full(lambda: tiny_llama(), [length_reward]))

    run_distributed(fn, 1, init_process_group=False)


def test_a_sample_length_below_2_is_refused():
    with pytest.raises(ValueError, match="at least 2 but got 1"):
        MemoryRehearsal(max_sample_length=1)
