"""The flat form of the sampler under a plain Trainer, which knows nothing of plans."""

import contextlib
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_rlbatch.data.indices import MicroBatchDataset
from lightning_rlbatch.data.loader import TokenBudgetLoader
from lightning_rlbatch.data.sampler import TokenBudgetSampler
from lightning_rlbatch.testing import run_distributed

LENGTHS = [5, 9, 2, 8, 3, 7, 1]


class Scalars(Dataset):
    """Seven samples, each with as many tokens as its length, all of one value."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"tokens": torch.full((LENGTHS[index],), float(index + 1)), "index": index}


def collate(samples):
    return {"tokens": torch.cat([s["tokens"] for s in samples]), "index": [s["index"] for s in samples]}


class Mean(pl.LightningModule):
    """One weight whose gradient is the mean token value of the mini-batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []
        self.gradients = []

    def training_step(self, batch, batch_idx):
        if batch["loss_scale"] > 0:
            self.seen += batch["index"]
        return (self.weight * batch["tokens"]).sum() * batch["loss_scale"]

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain_trainer(world_size, num_micro_steps, **options):
    """A Trainer that knows nothing of this package."""
    strategy = "ddp" if world_size > 1 else "auto"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, accumulate_grad_batches=num_micro_steps, **{**quiet, **options}
    )


def _fit(rank, world_size, epochs):
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=3, max_tokens_per_rank=10, flat=True, dp_size=world_size, dp_rank=rank)
    loader = DataLoader(MicroBatchDataset(Scalars(), collate), sampler=sampler, batch_size=None)
    orders = []
    module = Mean()

    class Orders(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            orders.append(list(pl_module.seen))
            pl_module.seen.clear()

    trainer = plain_trainer(world_size, sampler.num_micro_steps, max_epochs=epochs, callbacks=[Orders()])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*lower than the logging interval.*|.*GPU available.*|.*barrier.*")
        trainer.fit(module, loader)
    return orders, module.gradients, trainer.global_step, type(trainer.train_dataloader.sampler).__name__


def test_a_plain_trainer_neither_replaces_nor_pads_the_sampler():
    """Seven samples in mini-batches of three, two ranks, three epochs in three orders."""
    results = run_distributed(_fit, 2, 3, init_process_group=False)
    orders = [first + second for first, second in zip(results[0][0], results[1][0])]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({str(order) for order in orders}) == 3
    for _, _, global_step, name in results:
        assert name == "TokenBudgetSampler"
        assert global_step == 9


def test_gradients_under_a_plain_trainer_are_token_means_for_one_and_two_ranks():
    one, two = run_distributed(_fit, 1, 2, init_process_group=False)[0], run_distributed(_fit, 2, 2, init_process_group=False)
    sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=3, max_tokens_per_rank=10)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for item in sampler:
            expected.append(np.repeat([i + 1 for i in item.mini_batch], [LENGTHS[i] for i in item.mini_batch]).mean())
    assert one[1] == pytest.approx(expected, rel=1e-6)
    for rank in two:
        assert rank[1] == pytest.approx(expected, rel=1e-6)


class StopError(Exception):
    pass


class StopAfter(pl.Callback):
    """Saves a checkpoint after so many batches and ends the run as a crash would."""

    def __init__(self, num_batches, path):
        self.num_batches = num_batches
        self.path = path

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.num_batches:
            trainer.save_checkpoint(self.path)
            raise StopError


def _fit_and_resume(rank, world_size, stops, num_workers, path):
    """Train three epochs, stopped after each of the given numbers of batches; return all that was seen, and the weight."""
    seen, before = [], None
    for stop in (*stops, None):
        sampler = TokenBudgetSampler(LENGTHS, mini_batch_size=3, max_tokens_per_rank=10, flat=True, dp_size=world_size, dp_rank=rank)
        loader = TokenBudgetLoader(MicroBatchDataset(Scalars(), collate), sampler=sampler, batch_size=None, num_workers=num_workers)
        module = Mean()
        callbacks = [] if stop is None else [StopAfter(stop, f"{path}/{stop}.ckpt")]
        trainer = plain_trainer(world_size, sampler.num_micro_steps, max_epochs=3, callbacks=callbacks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*barrier.*|.*Checkpoint directory.*|.*rank_zero.*")
            with contextlib.suppress(StopError):
                trainer.fit(module, loader, ckpt_path=before, weights_only=False)
        before = f"{path}/{stop}.ckpt"
        seen += module.seen
    return seen, module.weight.item()


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (1, 2)])
def test_a_plain_trainer_resumes_inside_an_epoch_as_if_it_had_never_stopped(world_size, num_workers, tmp_path):
    steps = TokenBudgetSampler(LENGTHS, mini_batch_size=3, max_tokens_per_rank=10, flat=True, dp_size=world_size, dp_rank=0).num_micro_steps
    runs = [[], [steps, 5 * steps]]  # after one of three optimizer steps of the first epoch, after two of the second
    whole, cut = (
        run_distributed(_fit_and_resume, world_size, stops, num_workers, str(tmp_path), init_process_group=False) for stops in runs
    )
    assert cut == whole


def test_a_loader_of_another_sampler_is_refused():
    with pytest.raises(TypeError, match="needs a TokenBudgetSampler but got SequentialSampler"):
        next(iter(TokenBudgetLoader([1, 2])))
