import lightning.pytorch as pl
import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples
from helpers import length_reward, make_trainer, tiny_llama, whole_parameters
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_rlbatch.callbacks.parity_check import ParityCheck
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.models import scored_positions
from lightning_rlbatch.models.scored_positions import shift_to_sources
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed


def run(world_size, callbacks, sp_size=1, seed=0, **options):
    strategy = RLBatchFSDPStrategy(sequence_parallel_size=sp_size)
    trainer = make_trainer(world_size, strategy, max_epochs=1, callbacks=callbacks)
    module = PPOModule(lambda: tiny_llama(seed), [length_reward], **options)
    data = HandMadeDataModule(make_samples([(2, 9), (1, 3), (2, 2)]), [Step(BatchingOptions(max_tokens_per_rank=16))])
    trainer.fit(module, datamodule=data)
    return whole_parameters(module)


def test_a_sound_policy_trains_as_if_nothing_had_been_checked():
    def fn(rank, world_size):
        plain, checked = (run(world_size, callbacks, sp_size=2) for callbacks in ([], [ParityCheck()]))
        # every rank makes other weights: those of rank 0 count
        run(world_size, [ParityCheck()], sp_size=2, seed=rank)
        return all(bool((plain[name] == checked[name]).all()) for name in plain)

    assert run_distributed(fn, 2, init_process_group=False) == [True, True]


def the_last_token_scored_with_its_neighbour(batch):
    targets, scored = shift_to_sources(batch)
    return targets, torch.ones_like(scored)


def test_a_layout_that_differs_ends_the_run_on_every_rank(monkeypatch):
    monkeypatch.setattr(scored_positions, "shift_to_sources", the_last_token_scored_with_its_neighbour)

    def fn(rank, world_size):
        with pytest.raises(RuntimeError, match=r"(?s)does not compute the same in every layout.*dp=2, sp=1 .*DIFFERS"):
            run(world_size, [ParityCheck()])
        return True

    assert run_distributed(fn, 2, init_process_group=False) == [True, True]


def test_a_policy_with_padding_is_compared_with_padding_only():
    def fn(rank, world_size):
        return len(run(world_size, [ParityCheck(lengths=(3, 5))], remove_padding=False)) > 0

    assert run_distributed(fn, 1, init_process_group=False) == [True]


def test_a_module_without_policy_and_lengths_without_tokens_are_refused():
    with pytest.raises(MisconfigurationException, match="LightningModule has none"):
        ParityCheck().setup(pl.Trainer(logger=False, accelerator="cpu"), pl.LightningModule(), "fit")
    with pytest.raises(ValueError, match=r"at least 1 token but got \[0\]"):
        ParityCheck(lengths=(0,))
