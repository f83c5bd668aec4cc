"""One optimizer step is one global step, one iteration is one epoch, and Lightning's options count in these units."""

import contextlib
import csv
import json
import sys
import types
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rlbatch.callbacks import BalanceMonitor, RLBatchModelCheckpoint, RolloutLogger, ThroughputMonitor
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed
from tests.helpers import RecordingLogger, length_reward, make_trainer, tiny_llama
from tests.strategies.runs import Journal, decay, ppo, prompt_rows, rollouts, sft, sft_data


def on_ranks(fn, world_size=2):
    """Run on forked ranks: the Trainer joins the process group itself."""
    return run_distributed(fn, world_size, init_process_group=False)


def fit(size, module=None, data=None, **options):
    trainer = make_trainer(size, **{"max_epochs": 3, "num_sanity_val_steps": 0, **options})
    trainer.fit(module or ppo(), datamodule=data or rollouts())
    return trainer


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_max_steps_ends_after_exactly_that_many_optimizer_steps():
    def main(rank, size):
        journal = Journal()
        trainer = fit(size, max_epochs=-1, max_steps=3, callbacks=[journal])
        return trainer.global_step, [step for step, _ in journal.steps], len(journal.collections)

    assert on_ranks(main) == [(3, [1, 2, 3], 2)] * 2  # two steps per iteration: the second iteration is cut


def test_checkpoints_by_steps_and_by_iterations_of_the_stock_callback(tmp_path):
    def main(rank, size):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
            by_steps = ModelCheckpoint(str(tmp_path / "steps"), "{step}", every_n_train_steps=3, save_top_k=-1)
            by_epochs = ModelCheckpoint(str(tmp_path / "epochs"), "{epoch}-{step}", every_n_epochs=2, save_top_k=-1)
            fit(size, max_epochs=4, callbacks=[by_steps, by_epochs], enable_checkpointing=True)

    on_ranks(main)
    assert names(tmp_path / "steps") == ["step=3.ckpt", "step=6.ckpt"]
    assert names(tmp_path / "epochs") == ["epoch=1-step=4.ckpt", "epoch=3-step=8.ckpt"]


def test_own_checkpoint_waits_for_the_end_of_the_iteration_and_saves_by_time(tmp_path):
    def main(rank, size):
        savers = [
            RLBatchModelCheckpoint(str(tmp_path / "after"), "{step}", every_n_train_steps=3, save_top_k=-1),
            RLBatchModelCheckpoint(str(tmp_path / "inside"), "{step}", every_n_train_steps=3, save_top_k=-1, inside_iteration=True),
            RLBatchModelCheckpoint(str(tmp_path / "time"), "{step}", train_time_interval=timedelta(0), save_top_k=-1),
            RLBatchModelCheckpoint(str(tmp_path / "rare"), "{step}", train_time_interval=timedelta(hours=1), save_top_k=-1),
            RLBatchModelCheckpoint(str(tmp_path / "link"), "{step}", every_n_epochs=1, save_last="link"),
            RLBatchModelCheckpoint(str(tmp_path / "never"), "{step}", monitor="val/lenght/mean", every_n_train_steps=3),
        ]
        told = pytest.warns(
            UserWarning, match=r"monitor='val/lenght/mean'\) did not save when it was due: there is no such metric\. Logged"
        )
        with told if rank == 0 else contextlib.nullcontext():
            fit(size, max_epochs=4, callbacks=savers, enable_checkpointing=True)

    on_ranks(main)
    assert names(tmp_path / "after") == ["step=4.ckpt", "step=6.ckpt"]  # due at 3 and 6
    assert names(tmp_path / "inside") == ["step=3.ckpt", "step=6.ckpt"]
    assert names(tmp_path / "time") == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert not (tmp_path / "rare").exists()
    assert not (tmp_path / "never").exists()
    assert names(tmp_path / "link") == ["last.ckpt", "step=8.ckpt"]
    assert torch.load(tmp_path / "link" / "last.ckpt", weights_only=True)["global_step"] == 8


def test_best_checkpoint_by_a_validation_metric_is_the_same_on_all_ranks(tmp_path):
    def main(rank, size):
        saver = RLBatchModelCheckpoint(str(tmp_path), "{step}", monitor="val/length/mean", mode="max", save_top_k=2, every_n_train_steps=2)
        fit(size, data=rollouts(val_prompts=prompt_rows), limit_val_batches=1.0, callbacks=[saver], enable_checkpointing=True)
        return saver.best_model_path, float(saver.best_model_score)

    first, second = on_ranks(main)
    assert first == second
    assert len(names(tmp_path)) == 2


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """What one run of three iterations shows: rank 0's facts, and the file of its CSV logger."""
    folder = tmp_path_factory.mktemp("ordinary")

    def main(rank, size):
        logger, journal, module, estimates = RecordingLogger(), Journal(), ppo(), []

        def scheduler(optimizer):
            estimates.append(module.trainer.estimated_stepping_batches)
            return decay(optimizer)

        module.lr_scheduler_factory = scheduler
        loggers = [logger, CSVLogger(folder, "csv", "")]
        trainer = fit(size, module, logger=loggers, callbacks=[journal, LearningRateMonitor("step")])
        key = "lr-AdamW/policy" if any("lr-AdamW/policy" in row for row in logger.rows) else "lr-AdamW"
        return trainer.global_step, [lr for _, lr in journal.steps], [row[key] for row in logger.rows if key in row], estimates

    return on_ranks(main)[0], folder / "csv" / "metrics.csv"


def test_learning_rate_advances_once_per_step_and_the_monitor_logs_it(ordinary):
    (step, rates, monitored, _), _ = ordinary
    assert step == 6
    assert rates == pytest.approx([1e-2 * 0.9**count for count in range(1, 7)])
    assert monitored[:2] == pytest.approx([1e-2, 0.9e-2])


def test_number_of_steps_is_known_when_optimizers_are_made(ordinary):
    (step, _, _, estimates), _ = ordinary
    assert estimates == [step] == [6]


def test_csv_logger_gets_one_row_per_step(ordinary):
    with ordinary[1].open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["train/lr"] for row in rows)


def test_early_stopping_by_a_validation_metric_stops_all_ranks():
    def main(rank, size):
        stopper = EarlyStopping("val/length/mean", mode="max", patience=1, min_delta=1e9)
        trainer = fit(size, data=rollouts(val_prompts=prompt_rows), limit_val_batches=1.0, callbacks=[stopper], max_epochs=9)
        return trainer.global_step, trainer.current_epoch

    assert on_ranks(main) == [(4, 2)] * 2


class CountsValidations(Journal):
    def on_validation_end(self, trainer, pl_module):
        self.steps.append(("validation", trainer.global_step))


def test_validation_runs_when_lightning_says():
    cases = [
        ({"check_val_every_n_epoch": 2}, [4]),
        ({"val_check_interval": 0.5}, [1, 2, 3, 4, 5, 6]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4]),
    ]

    def main(rank, size):
        found = []
        for options, _ in cases:
            counter = CountsValidations()
            fit(size, data=rollouts(val_prompts=prompt_rows), limit_val_batches=1.0, callbacks=[counter], **options)
            found.append([step for what, step in counter.steps if what == "validation"])
        return found

    assert on_ranks(main) == [[expected for _, expected in cases]] * 2


def test_fast_dev_run_takes_one_step_and_validates_once():
    def main(rank, size):
        counter = CountsValidations()
        trainer = fit(size, data=rollouts(val_prompts=prompt_rows), fast_dev_run=True, callbacks=[counter])
        return trainer.global_step, [step for what, step in counter.steps if what == "validation"]

    assert on_ranks(main) == [(1, [1])] * 2


def test_limit_that_cuts_iterations_warns_and_rolls_out_only_what_is_trained_on():
    def main(rank, size):
        journal = Journal()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = fit(size, limit_train_batches=1, callbacks=[journal])
        said = [str(warning.message) for warning in caught if "limit_train_batches" in str(warning.message)]
        return trainer.global_step, [(iteration, len(prompts)) for iteration, prompts, _ in journal.collections], said

    results = on_ranks(main)
    for step, collections, _ in results:
        assert step == 3
        assert collections == [(0, 2), (1, 2), (2, 2)]  # one mini-batch of two prompts each
    assert len(results[0][2]) == 1
    assert "1 of the 2 mini-batches" in results[0][2][0]


def test_overfit_batches_gives_the_same_prompts_and_samples_every_epoch():
    def main(rank, size):
        journal = Journal()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*limit_train_batches or overfit_batches")
            fit(size, overfit_batches=1, limit_val_batches=0, callbacks=[journal])
            seen = []

            class Watch(Journal):
                def on_train_batch_start(self, trainer, module, batch, index):
                    seen.append(sorted(ids for micro in batch.micro_batches for ids in micro["input_ids"].tolist()))

            fit(size, sft(), sft_data(), overfit_batches=1, limit_val_batches=0, callbacks=[Watch()])
        return [prompts for _, prompts, _ in journal.collections], seen

    for prompts, samples in on_ranks(main):
        assert prompts[0] == prompts[1] == prompts[2]
        assert samples[0] == samples[1] == samples[2]


class LogsRanks(Callback):
    """Logs what Lightning reduces at the end of the epoch: when the bar of rank zero asks, on the other ranks later."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("rank", float(trainer.global_rank), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)


def test_progress_bars_run_and_metrics_of_an_epoch_that_they_show_are_reduced_over_all_ranks(capfd):
    def main(rank, size):
        bars = (TQDMProgressBar, RichProgressBar)
        trainers = [fit(size, max_epochs=2, callbacks=[LogsRanks(), bar()], enable_progress_bar=True) for bar in bars]
        return [(trainer.global_step, float(trainer.callback_metrics["rank"])) for trainer in trainers]

    assert on_ranks(main) == [[(4, 0.5), (4, 0.5)]] * 2


class StrictLogger(RecordingLogger):
    """Takes what a service like Weights & Biases takes: JSON, rising steps, tables of plain values, pictures that are there."""

    def __init__(self):
        super().__init__()
        self.hyperparameters, self.steps, self.tables, self.pictures = {}, [0], [], []

    def log_hyperparams(self, params, *args, **kwargs):
        self.hyperparameters.update(json.loads(json.dumps(params)))

    def log_metrics(self, metrics, step=None):
        assert step >= self.steps[-1]
        self.steps.append(step)
        assert all(type(value) in (int, float) for value in metrics.values()), metrics
        super().log_metrics(metrics, step)

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        assert all(len(row) == len(columns) for row in data)
        self.tables.append((key, step, json.loads(json.dumps(data))))

    def log_image(self, key, images, step=None, **kwargs):
        self.pictures.append((key, step, [Path(image).read_bytes()[1:4] for image in images]))


def test_a_logger_that_uploads_gets_plain_values_tables_pictures_and_hyperparameters(tmp_path):
    def main(rank, size):
        logger = StrictLogger()
        watchers = [BalanceMonitor(str(tmp_path), every_n_steps=3), RolloutLogger(), ThroughputMonitor(), LearningRateMonitor()]
        fit(size, logger=logger, callbacks=watchers, max_epochs=2, data=rollouts(val_prompts=prompt_rows), limit_val_batches=1.0)
        return logger.hyperparameters, logger.tables, logger.pictures, logger.rows

    hyperparameters, tables, pictures, rows = on_ranks(main)[0]
    assert hyperparameters["advantage"]["class_path"].endswith("GRPO")
    assert [(key, step) for key, step, _ in tables] == [("rollouts", 0), ("rollouts", 2)]
    assert pictures == [("balance/plan", 0, [b"PNG"]), ("balance/plan", 3, [b"PNG"])]
    assert {"train/loss", "reward/mean", "balance/speedup", "throughput/update/tokens_per_second"} <= set().union(*rows)


def test_options_that_manual_optimization_lacks_are_refused_with_ours():
    def main(rank, size):
        for option, advice in (("gradient_clip_val", "max_grad_norm"), ("accumulate_grad_batches", "mini_batch_size")):
            with pytest.raises(MisconfigurationException, match=advice):
                fit(size, **{option: 2})

    on_ranks(main, 1)


def test_mixing_the_two_lightning_packages_is_explained():
    strategy = RLBatchFSDPStrategy()
    assert "pytorch_lightning" not in repr(strategy)
    other = types.ModuleType("pytorch_lightning")
    with mock.patch.dict(sys.modules, {"pytorch_lightning": other}):
        assert "import Trainer, callbacks and modules from lightning.pytorch" in repr(strategy)
        with pytest.raises(MisconfigurationException, match="Import everything from"):
            strategy.connect(torch.nn.Linear(1, 1))
    assert LightningModule.__module__.startswith("lightning.")
    assert Trainer.__module__.startswith("lightning.")


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices:UserWarning")
def test_predict_generates_what_validation_rewards_on_any_number_of_ranks():
    seen = []

    class Watching(PPOModule):
        def compute_rewards(self, **arguments):
            seen.extend(arguments["completion_ids"])
            return super().compute_rewards(**arguments)

    def main(rank, size):
        warnings.filterwarnings("ignore", message=".*predict_dataloader.*does not have many workers")
        module = Watching(tiny_llama, [length_reward])
        data = rollouts(val_prompts=prompt_rows, val_rollouts_per_prompt=2, val_batch_size=4)
        strategy = "rlbatch_fsdp" if size > 1 else "auto"
        batches = make_trainer(size, strategy).predict(module, data)
        limited = make_trainer(size, strategy, limit_predict_batches=1).predict(module, data)
        make_trainer(size, strategy, limit_val_batches=1.0).validate(module, data, verbose=False)
        from_train = make_trainer(size, strategy).predict(module, rollouts())
        return batches, limited, seen, from_train

    ((batches, limited, rewarded, from_train),) = on_ranks(main, 1)
    rows = [row for batch in batches for row in batch]
    assert [len(batch) for batch in batches] == [4, 3]
    assert limited == batches[:1]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in prompt_rows()]
    assert [ids for row in rows for ids in row["completion_ids"]] == [list(ids) for ids in rewarded]
    assert all(len(row["completions"]) == len(row["finish_reasons"]) == 2 for row in rows)
    assert [len(batch) for batch in from_train] == [7]
    for others in on_ranks(main, 2):
        assert others[0] == batches
        assert others[3] == from_train
