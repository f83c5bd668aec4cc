"""A StopIteration out of a user's hook is an error that names the hook, where Lightning would end the epoch without a word."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.data import BatchingOptions
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.testing import run_distributed
from tests.hand_made import ConstantLossModule, HandMadeDataModule, Step, constant_sample
from tests.helpers import make_trainer

HOOKS = {
    "on_train_epoch_start": "on_train_epoch_start",
    "on_train_batch_start": "on_train_batch_start of batch {}",
    "on_train_batch_end": "on_train_batch_end of batch {}",
    "on_train_epoch_end": "on_train_epoch_end",
    "on_validation_start": "on_validation_start or",
    "on_validation_batch_start": "on_validation_batch_start of batch {}",
    "on_validation_batch_end": "on_validation_batch_end of batch {}",
    "on_validation_epoch_end": "on_validation_start or",
    "on_validation_end": "on_validation_start or",
}


def exhausted(hook, call):
    """Return a callback whose hook is at the end of its iterator when it is called for the second or third time."""

    def read(self, *args):
        next(self.rows)

    callback = type("Reader", (Callback,), {hook: read})()
    callback.rows = iter(range(call - 1))
    return callback


class Data(HandMadeDataModule):
    def val_dataloader(self):
        return [0, 1]


def fit(callback, strategy="auto", module=None, **options):
    samples = PackedBatch.from_samples([constant_sample(2, 1.0)])
    options = {"max_epochs": 3, "limit_val_batches": 1.0, "num_sanity_val_steps": 0, **options}
    trainer = make_trainer(1, strategy, callbacks=[callback] if callback else [], **options)
    module = module or ConstantLossModule()
    trainer.fit(module, datamodule=Data(samples, [Step(BatchingOptions(micro_batch_size=1))] * 2))
    return trainer.global_step, trainer.current_epoch


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*val_dataloader.*is not a")
def test_stop_iteration_of_a_callback_is_an_error_that_names_the_hook():
    for hook, words in HOOKS.items():
        for call, batch in ((2, 2), (3, 1)) if "batch" in hook else ((2, 2),):  # two batches per epoch
            with pytest.raises(RuntimeError) as error:
                fit(exhausted(hook, call))
            text = f"StopIteration was raised in {words.format(batch)}"
            assert str(error.value).startswith(text), (hook, call)
            assert "of the module or of a callback (Reader), and Lightning" in str(error.value)


class ReadsAhead(ConstantLossModule):
    def __init__(self, hook):
        super().__init__()
        self.rows, self.hook = iter(range(3)), hook

    def validation_step(self, batch, batch_idx):
        if self.hook == "validation_step":
            next(self.rows)

    def predict_step(self, batch, batch_idx):
        return next(self.rows)

    def on_train_batch_start(self, batch, batch_idx):
        if self.hook == "on_train_batch_start":
            next(self.rows)
        return -1 if self.hook == "skips" and batch_idx == 1 else None


def test_stop_iteration_of_a_step_or_hook_of_the_module_is_an_error_under_any_strategy():
    def main(rank, size):
        found = []
        for strategy in ("auto", "rlbatch_fsdp"):
            for hook in ("validation_step", "on_train_batch_start"):
                with pytest.raises(RuntimeError) as error:
                    fit(None, strategy, ReadsAhead(hook))
                found.append(str(error.value))
        with pytest.raises(RuntimeError, match="predict_step of ReadsAhead raised StopIteration"):
            make_trainer(1).predict(ReadsAhead("predict_step"), torch.utils.data.DataLoader(range(5)))
        return found

    step, hook, own_step, own_hook = run_distributed(main, 1, init_process_group=False)[0]
    assert step.startswith("StopIteration was raised in validation_step of batch 2, of the module")
    assert own_step.startswith("validation_step of ReadsAhead raised StopIteration")
    assert hook.startswith("StopIteration was raised in on_train_batch_start of batch 2")
    assert own_hook == hook


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*val_dataloader.*is not a")
def test_epochs_that_end_early_on_purpose_are_no_error():
    assert fit(None) == (6, 3)
    assert fit(None, max_steps=3, max_epochs=-1) == (3, 2)
    assert fit(None, module=ReadsAhead("skips")) == (3, 3)
