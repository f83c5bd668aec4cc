"""The reference is the policy at the start of the run: their exact divergence is 0 until the first update, in every precision."""

import functools

import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples, with_policy_log_probs
from helpers import StepRecorder, length_reward, make_trainer, tiny_llama

from lightning_rlbatch.data import BatchingOptions
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

RUNS = [("rlbatch_fsdp", "32-true"), ("rlbatch_fsdp", "bf16-mixed"), ("rlbatch_fsdp", "bf16-true"), ("ddp", "bf16-mixed")]


def divergences(strategy, precision):
    samples = with_policy_log_probs(make_samples([(2, 5), (1, 9), (3, 1)]), tiny_llama(dtype=torch.float64))
    recorder = StepRecorder()
    module = PPOModule(
        tiny_llama, [length_reward], kl_coefficient=0.1, kl_kind="full", optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    trainer = make_trainer(2, strategy, max_epochs=1, callbacks=[recorder], precision=precision)
    trainer.fit(module, datamodule=HandMadeDataModule(samples, [Step(BatchingOptions(max_tokens_per_rank=10))] * 3))
    return [row["kl/reference"] for row in recorder.metrics]


@pytest.fixture(scope="module")
def results():
    return run_distributed(lambda rank, world_size: {run: divergences(*run) for run in RUNS}, 2, init_process_group=False)


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_the_full_divergence_is_zero_before_the_first_update_and_positive_after_it(run, results):
    for rank in results:
        first, second, third = rank[run]
        assert first == 0
        assert 0 < second < third
        assert third == results[0][run][2]
