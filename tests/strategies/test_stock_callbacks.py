"""Each callback that comes with Lightning works, or is refused before anything happens, with what to use in its place."""

import warnings
from datetime import timedelta

import lightning.pytorch.callbacks as stock
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rlbatch.testing import run_distributed
from tests.helpers import RecordingLogger, make_trainer
from tests.strategies.runs import sft, sft_data, sft_samples

ABSTRACT = {"Callback", "Checkpoint", "ProgressBar", "BasePredictionWriter", "RichProgressBar"}  # the last one in test_lightning_counters


class Thaws(stock.BaseFinetuning):
    def freeze_before_training(self, module):
        raise NotImplementedError


REFUSED = {
    "BackboneFinetuning": (lambda: stock.BackboneFinetuning(1), "build_models"),
    "BaseFinetuning": (Thaws, "build_models"),
    "BatchSizeFinder": (lambda: stock.BatchSizeFinder(batch_arg_name="mini_batch_size"), "MemoryRehearsal"),
    "GradientAccumulationScheduler": (lambda: stock.GradientAccumulationScheduler({1: 2}), "mini_batch_size"),
    "LearningRateFinder": (stock.LearningRateFinder, "short runs"),
    "ModelCheckpoint by time": (lambda: stock.ModelCheckpoint(train_time_interval=timedelta(0)), "RLBatchModelCheckpoint"),
    "ModelPruning": (lambda: stock.ModelPruning("l1_unstructured", amount=0.5), "build_models"),
    "StochasticWeightAveraging": (lambda: stock.StochasticWeightAveraging(1e-3), "EMAWeightAveraging"),
}

WHOLE_COPIES = {
    "EMAWeightAveraging": lambda: stock.EMAWeightAveraging(decay=0.5),
    "WeightAveraging": stock.WeightAveraging,
}


def working(folder, steps):
    return {
        "DeviceStatsMonitor": stock.DeviceStatsMonitor(),
        "EarlyStopping": stock.EarlyStopping("val/loss", patience=100, check_on_train_epoch_end=True),
        "LambdaCallback": stock.LambdaCallback(on_train_batch_end=lambda *args: steps.append(float(args[2]["loss"]))),
        "LearningRateMonitor": stock.LearningRateMonitor(),
        "ModelCheckpoint": stock.ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1),
        "ModelSummary": stock.ModelSummary(),
        "OnExceptionCheckpoint": stock.OnExceptionCheckpoint(folder),
        "RichModelSummary": stock.RichModelSummary(),
        "SpikeDetection": stock.SpikeDetection(window=1, warmup=1, atol=1e9),
        "ThroughputMonitor": stock.ThroughputMonitor(lambda batch: batch.plan.num_samples, window_size=2),
        "TQDMProgressBar": stock.TQDMProgressBar(),
        "Timer": stock.Timer(timedelta(hours=1)),
    }


def fit(size, callbacks, **options):
    strategy = "rlbatch_fsdp" if size > 1 else "auto"
    options = {"max_epochs": 2, "limit_val_batches": 1.0, "num_sanity_val_steps": 0, **options}
    trainer = make_trainer(size, strategy, callbacks=callbacks, **options)
    trainer.fit(sft(), sft_data(val_dataset=sft_samples(2)))
    return trainer


def test_every_stock_callback_is_in_one_of_the_tables(tmp_path):
    known = REFUSED.keys() | WHOLE_COPIES.keys() | working(tmp_path, []).keys() | ABSTRACT
    assert set(stock.__all__) - known == set()


def test_callbacks_that_would_do_nothing_or_something_else_are_refused():
    def main(rank, size):
        for make, advice in REFUSED.values():
            with pytest.raises(MisconfigurationException, match=advice):
                fit(1, [make()], enable_checkpointing=True)

    run_distributed(main, 1, init_process_group=False)


def test_callbacks_of_every_other_kind_work_together_under_sharding_and_whole_copies_are_refused(tmp_path):
    def main(rank, size):
        for make in WHOLE_COPIES.values():
            with pytest.raises(MisconfigurationException, match="strategy='ddp'"):
                fit(size, [make()])
        losses, logger = [], RecordingLogger()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message=".*(flops_per_batch|does not have many workers|LeafSpec|was called without a model|there is no last checkpoint)",
            )
            trainer = fit(
                size, [*working(str(tmp_path), losses).values()], logger=logger, enable_checkpointing=True, enable_progress_bar=True
            )
        logged = {name.split("/")[0].split(".")[0] for row in logger.rows for name in row}
        return trainer.global_step, losses, [row["train/loss"] for row in logger.rows if "train/loss" in row], logged

    results = run_distributed(main, 2, init_process_group=False)
    for step, losses, logged_losses, _ in results:
        assert step == 6
        assert losses == results[0][1]
        assert losses == pytest.approx(results[0][2])
        assert len(logged_losses) in (0, 6)
    assert {"DeviceStatsMonitor", "lr-AdamW", "train"} <= results[0][3]
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == ["epoch=0.ckpt", "epoch=1.ckpt"]


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides:UserWarning")
def test_averaged_weights_are_those_of_the_steps():
    def main(rank, size):
        seen = []

        def keep(trainer, module, *args):
            seen.append([parameter.detach().clone() for parameter in module.parameters()])

        average = stock.WeightAveraging()
        trainer = fit(size, [stock.LambdaCallback(on_train_batch_end=keep), average], max_epochs=1)
        return seen, [parameter.detach() for parameter in trainer.lightning_module.parameters()]

    ((seen, final),) = run_distributed(main, 1, init_process_group=False)
    for number, parameter in enumerate(final):
        torch.testing.assert_close(parameter, torch.stack([step[number] for step in seen]).mean(0))
