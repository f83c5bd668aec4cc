"""Learning-rate schedulers advance when Lightning's configuration of them says, or are refused."""

import functools
import warnings

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import ReduceLROnPlateau as NamedPlateau
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lightning_rlbatch.modules import SFTModule
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer, sgd, tiny_llama
from tests.strategies.runs import Journal, sft_data, sft_samples

STEPS = 3  # per epoch

halve = functools.partial(ExponentialLR, gamma=0.5)
third = functools.partial(ExponentialLR, gamma=1 / 3)
impatient = functools.partial(ReduceLROnPlateau, factor=0.5, patience=0)


class Configured(SFTModule):
    """Returns what a test says."""

    def __init__(self, make):
        super().__init__(tiny_llama, optimizer=sgd)
        self.make = make

    def configure_optimizers(self):
        return self.make(self.optimizer_factory(self.optimizer_groups()))


class LogsConstants(Callback):
    """Logs a metric that never gets better, another one on each rank: in training and in validation."""

    def on_train_batch_end(self, trainer, module, *args):
        module.log("constant", float(trainer.global_rank), on_step=True, batch_size=1)

    def on_validation_epoch_end(self, trainer, module):
        module.log("val/constant", 1.0, batch_size=1, sync_dist=True)


class RisesOnOneRank(Callback):
    def on_train_batch_end(self, trainer, module, *args):
        value = float(trainer.global_step if trainer.global_rank else -trainer.global_step)
        module.log("apart", value, on_step=True, batch_size=1)


def rates(module, size=1, max_epochs=3, **options):
    """Return the learning rate behind each optimizer step, and after the last epoch."""
    journal = Journal()
    options.setdefault("callbacks", []).append(journal)
    trainer = make_trainer(size, "auto" if size == 1 else "rlbatch_fsdp", max_epochs=max_epochs, **options)
    trainer.fit(module, datamodule=sft_data())
    return [rate for _, rate in journal.steps] + [trainer.optimizers[0].param_groups[0]["lr"]]


CASES = {
    "a list": (lambda o: ([o], [halve(o)]), [0.5**n for n in range(1, 10)] + [0.5**9]),
    "every second step": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "frequency": 2}},
        [0.5 ** (n // 2) for n in range(1, 10)] + [0.5**4],
    ),
    "epoch": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "interval": "epoch"}},
        [0.5 ** (n // 3) for n in range(1, 10)] + [0.5**3],
    ),
    "every second epoch": (
        lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "interval": "epoch", "frequency": 2}}],
        [1.0] * 5 + [0.5] * 5,
    ),
    "two schedulers": (
        lambda o: ([o], [{"scheduler": halve(o), "interval": "step"}, {"scheduler": third(o), "interval": "epoch"}]),
        [0.5**n / 3 ** (n // 3) for n in range(1, 10)] + [0.5**9 / 27],
    ),
    "plateau": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": impatient(o), "monitor": "constant"}},
        [1.0] * 6 + [0.5] * 3 + [0.25],
    ),
    "plateau, metric beside": (
        lambda o: {"optimizer": o, "lr_scheduler": impatient(o), "monitor": "constant"},
        [1.0] * 6 + [0.5] * 3 + [0.25],
    ),
    "plateau of LightningCLI": (
        lambda o: ([o], [NamedPlateau(o, "constant", factor=0.5, patience=0)]),
        [1.0] * 6 + [0.5] * 3 + [0.25],
    ),
    "plateau, every second epoch": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": impatient(o), "monitor": "constant", "frequency": 2}},
        [1.0] * 10,
    ),
    "plateau by steps": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": impatient(o), "monitor": "constant", "interval": "step"}},
        [1.0, *(0.5**n for n in range(9))],  # the journal is written before
    ),
    "a metric that may be missing": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": impatient(o), "monitor": "nothing", "strict": False}},
        [1.0] * 10,
    ),
}


@pytest.mark.filterwarnings("ignore:.*was not logged:UserWarning")
def test_schedulers_advance_by_steps_by_epochs_and_by_a_metric_as_configured():
    def main(rank, size):
        return {name: rates(Configured(make), callbacks=[LogsConstants()]) for name, (make, _) in CASES.items()}

    found = run_distributed(main, 1, init_process_group=False)[0]
    for name, (_, expected) in CASES.items():
        assert found[name] == pytest.approx(expected), name


def test_ranks_keep_one_learning_rate_although_they_log_different_metrics():
    def main(rank, size):
        module = Configured(lambda o: {"optimizer": o, "lr_scheduler": impatient(o), "monitor": "apart"})
        return rates(module, size, callbacks=[RisesOnOneRank()])

    assert run_distributed(main, 2, init_process_group=False) == [[1.0] * 10] * 2  # rank 0's gets better all the time


@pytest.mark.parametrize("interval", ["metric", "epoch"])
def test_schedulers_of_epochs_go_on_where_checkpoints_before_and_after_validation_left_them(interval, tmp_path):
    def make(optimizer):
        if interval == "epoch":
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halve(optimizer), "interval": "epoch"}}
        return {"optimizer": optimizer, "lr_scheduler": impatient(optimizer), "monitor": "val/constant"}

    def fit(callbacks, ckpt_path=None, **options):
        data = sft_data(val_dataset=sft_samples(2))
        journal = Journal()
        callbacks = [*callbacks, LogsConstants(), journal]
        trainer = make_trainer(1, "auto", max_epochs=5, limit_val_batches=1.0, num_sanity_val_steps=0, callbacks=callbacks, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(does not have many workers|Be aware that when using `ckpt_path`)")
            trainer.fit(Configured(make), data, ckpt_path=ckpt_path)
        return journal.steps

    def main(rank, size):
        savers = [
            ModelCheckpoint(str(tmp_path / "validation"), "{epoch}", monitor="val/constant", save_top_k=-1),
            ModelCheckpoint(str(tmp_path / "epoch"), "{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ]
        whole = fit(savers, enable_checkpointing=True)
        rest = {folder: fit([], ckpt_path=str(tmp_path / folder / "epoch=2.ckpt")) for folder in ("validation", "epoch")}
        return whole, rest

    whole, rest = run_distributed(main, 1, init_process_group=False)[0]
    assert len({rate for _, rate in whole}) >= 4
    assert rest == dict.fromkeys(rest, whole[3 * STEPS :])


REFUSED = {
    "no metric": (lambda o: ([o], [impatient(o)]), "needs the name of a metric to watch"),
    "unknown interval": (lambda o: ([o], [{"scheduler": halve(o), "interval": "batch"}]), "'step' or 'epoch' but is 'batch'"),
    "no frequency": (lambda o: ([o], [{"scheduler": halve(o), "frequency": 0}]), "at least 1 but is 0"),
    "no scheduler": (lambda o: {"optimizer": o, "lr_scheduler": {"interval": "step"}}, "has the key 'scheduler'"),
    "unknown key": (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halve(o), "every": 3}}, "'every'"),
    "two optimizers": (lambda o: [o, sgd(o.param_groups)], "must return one optimizer but returned 2"),
    "no optimizer": (lambda o: None, "must return one optimizer but returned 0"),
    "a metric that is not logged": (lambda o: {"optimizer": o, "lr_scheduler": impatient(o), "monitor": "nothing"}, "watches 'nothing'"),
}


def test_what_cannot_run_is_refused_before_the_first_step():
    def main(rank, size):
        for make, message in REFUSED.values():
            with pytest.raises(MisconfigurationException, match=message):
                rates(Configured(make))

    run_distributed(main, 1, init_process_group=False)
