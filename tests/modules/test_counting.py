"""The unit of every counter is the optimizer step (R15), and an untouched Trainer leaves our sharding alone (R18)."""

import functools
from pathlib import Path

import pytest
import torch
from hand_made import ConstantLossModule, ScriptedPPO, constant_sample, prompts, varied_reward
from helpers import StepRecorder, ToyTokenizer, make_trainer, tiny_llama
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint

from lightning_rlbatch.data import RolloutDataModule, SFTDataModule
from lightning_rlbatch.modules import SFTModule
from lightning_rlbatch.testing import run_distributed

NUM_SAMPLES = 7


class Events(Callback):
    """Keeps when epochs and validations happened."""

    def __init__(self):
        self.events = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append(("epoch", trainer.current_epoch, trainer.global_step))

    def on_validation_start(self, trainer, pl_module):
        self.events.append(("validation", trainer.current_epoch, trainer.global_step))


def ppo_data(**options):
    rows = {"train_prompts": lambda: prompts("abcdefg"), "val_prompts": lambda: prompts("ab")}
    sizes = {"train_batch_size": 6, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_tokens_per_rank": 8}
    return RolloutDataModule(tokenizer=ToyTokenizer(), max_prompt_length=1, max_response_length=7, **rows, **sizes, **options)


def ppo_module():
    schedule = functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=10)
    return ScriptedPPO(
        tiny_llama, [varied_reward], optimizer=functools.partial(torch.optim.SGD, lr=1.0), lr_scheduler=schedule, max_grad_norm=1e-3
    )


# Lightning's own checkpoint explains how to save the state before the step; ours is meant to be the one after it.
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
def test_global_step_checkpoints_validation_and_schedule_count_optimizer_steps(tmp_path):
    def fn(rank, world_size):
        events, recorder = Events(), StepRecorder()
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_weights_only=True)
        trainer = make_trainer(
            world_size,
            max_steps=4,
            callbacks=[events, recorder, checkpoint, LearningRateMonitor("step")],
            enable_checkpointing=True,
            limit_val_batches=1.0,
            num_sanity_val_steps=0,
        )
        trainer.fit(ppo_module(), datamodule=ppo_data())
        rates = [row["lr-SGD/policy"] for row in trainer.logger.rows if "lr-SGD/policy" in row]
        return recorder.global_steps, events.events, rates, trainer.estimated_stepping_batches

    for rank, (steps, events, rates, estimated) in enumerate(run_distributed(fn, 2, init_process_group=False)):
        assert steps == [1, 2, 3, 4]
        assert ("epoch", 0, 3) in events  # three mini-batches are an iteration, which is an epoch
        assert ("validation", 0, 3) in events
        assert estimated == 4
        if rank == 0:
            assert rates == pytest.approx([0.1 + 0.09 * step for step in range(4)])
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize("ppo_epochs", [1, 2])
def test_epoch_is_an_iteration_of_ppo_epochs_times_mini_batches_steps(ppo_epochs):
    def fn(rank, world_size):
        events = Events()
        trainer = make_trainer(world_size, max_epochs=2, callbacks=[events], check_val_every_n_epoch=2, limit_val_batches=1.0)
        trainer.fit(ppo_module(), datamodule=ppo_data(ppo_epochs=ppo_epochs))
        return [event for event in events.events if event[2]], trainer.estimated_stepping_batches

    for events, estimated in run_distributed(fn, 2, init_process_group=False):
        steps = 3 * ppo_epochs
        assert events == [("epoch", 0, steps), ("validation", 1, 2 * steps), ("epoch", 1, 2 * steps)]
        assert estimated == 2 * steps


class SeesValidation(ConstantLossModule):
    """Keeps the ids of validation samples, too."""

    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        for micro in batch.micro_batches:
            masks = micro.split_per_sample("response_mask")
            self.validated += [index for index, mask in zip(micro["sample_id"].tolist(), masks) if mask.any()]


@pytest.mark.parametrize("strategy", ["rlbatch_fsdp", "ddp"])
def test_untouched_trainer_neither_pads_repeats_nor_drops_samples(strategy):
    rows = [constant_sample(1 + index % 4, float(index), index) for index in range(NUM_SAMPLES)]

    def fn(rank, world_size):
        module = SeesValidation()
        data = SFTDataModule(rows, val_dataset=rows, mini_batch_size=2, max_tokens_per_rank=8)
        make_trainer(world_size, strategy, max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=0).fit(module, datamodule=data)
        return module.seen, module.validated

    (first, first_validated), (second, second_validated) = run_distributed(fn, 2, init_process_group=False)
    steps = [sorted(left + right) for left, right in zip(first, second, strict=True)]
    assert [len(step) for step in steps] == [2, 2, 2, 1] * 2
    for epoch in (steps[:4], steps[4:]):
        assert sorted(index for step in epoch for index in step) == list(range(NUM_SAMPLES))
    assert steps[:4] != steps[4:]  # the second epoch is shuffled anew
    assert sorted(first_validated + second_validated) == sorted(2 * list(range(NUM_SAMPLES)))


def test_supervised_validation_loss_is_that_of_one_process():
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(3, 50, (length,), generator=generator), "response_mask": [False] + [True] * (length - 1)}
        for length in (9, 2, 5, 3, 12, 4, 2)
    ]

    def fn(rank, world_size, strategy):
        losses = []
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            data = SFTDataModule(rows, val_dataset=rows, mini_batch_size=3, max_tokens_per_rank=12)
            trainer = make_trainer(world_size, strategy, limit_val_batches=1.0)
            losses += [trainer.validate(SFTModule(tiny_llama, loss_aggregation=aggregation), data, verbose=False)[0]["val/loss"]]
        return losses

    (expected,) = run_distributed(fn, 1, "auto", init_process_group=False)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    assert run_distributed(fn, 4, "rlbatch_fsdp", init_process_group=False) == [pytest.approx(expected, rel=1e-5)] * 4
