"""Checkpoints written in the background are the ones of the moment of saving, and complete when they have their name."""

import os
import threading
import time
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rlbatch.callbacks import RLBatchModelCheckpoint
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.strategies.background import BackgroundSave, snapshot
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer
from tests.strategies.killed_runs import steps_after_resuming, train_until_killed
from tests.strategies.runs import adamw, assert_same_state, run, sft, sft_data


def on_ranks(fn, world_size=2, **kwargs):
    return run_distributed(fn, world_size, init_process_group=False, **kwargs)


def strategy(sharded, **options):
    return RLBatchFSDPStrategy(save_distributed_checkpoint=sharded, async_save=True, **options)


def linked(folder):
    return RLBatchModelCheckpoint(str(folder), "{step}", every_n_train_steps=1, inside_iteration=True, save_last="link")


def test_what_depends_on_a_checkpoint_happens_after_it_and_not_if_it_failed():
    ready, done = threading.Event(), []
    save = BackgroundSave("a.ckpt", lambda: (ready.wait(10), done.append("written")))
    save.afterwards(lambda: done.append("linked"))
    save.afterwards(lambda: done.append("removed"))
    assert done == []
    ready.set()
    save.wait()
    save.afterwards(lambda: done.append("late"))
    assert done == ["written", "linked", "removed", "late"]

    failing = BackgroundSave("b.ckpt", lambda: os.remove("/no/such/file"))
    failing.join(10)
    failing.afterwards(lambda: done.append("removed too"))
    with pytest.raises(RuntimeError, match=r"background save of b\.ckpt failed: \[Errno 2\]"):
        failing.wait()
    assert done[-1] == "late"


def test_a_snapshot_shares_tensors_of_models_and_nothing_else():
    weight, moment, counter = torch.ones(2), torch.ones(2), torch.zeros(1)
    state = {"state": {0: {"exp_avg": moment}}, "param_groups": [{"lr": 1.0}]}
    checkpoint = {"state_dict": {"w": weight}, "optimizer_states": [state], "loops": {"step": 1, "counter": counter}}
    kept = snapshot(checkpoint)
    state["param_groups"][0]["lr"] = 2.0
    counter += 1
    assert kept["state_dict"]["w"] is weight
    assert kept["optimizer_states"][0]["state"][0]["exp_avg"] is moment
    assert kept["optimizer_states"][0]["param_groups"] == [{"lr": 1.0}]
    assert kept["loops"]["counter"].item() == 0


class Watch(Callback):
    """Notes at each step which checkpoints have their names, and whether the last one can be read."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def on_train_batch_end(self, trainer, *args):
        if trainer.is_global_zero:
            names = sorted(path.name for path in self.folder.glob("*.ckpt"))
            self.seen.append((trainer.global_step, names, not names or (self.folder / "last.ckpt").exists()))

    def on_fit_end(self, trainer, *args):
        path = self.folder.parent / "after_the_end.ckpt"
        trainer.save_checkpoint(path)  # nothing waits for a checkpoint any more: it is complete now
        assert path.exists()


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_checkpoint_of_the_background_resumes_like_one_that_was_waited_for(sharded, tmp_path):
    def main(rank, size):
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        folder, watch = tmp_path / "run", Watch(tmp_path / "run")
        whole = run(
            sft(), sft_data(), size, strategy=strategy(sharded), max_epochs=2, callbacks=(linked(folder), watch), enable_checkpointing=True
        )
        names = sorted(path.name for path in folder.iterdir())
        keep = RLBatchModelCheckpoint(str(tmp_path / "all"), "{step}", every_n_train_steps=2, inside_iteration=True, save_top_k=-1)
        again = run(sft(), sft_data(), size, strategy=strategy(sharded), max_epochs=2, callbacks=(keep,), enable_checkpointing=True)
        rest = run(sft(), sft_data(), size, max_epochs=2, ckpt_path=str(tmp_path / "all" / "step=2.ckpt"))
        end = run(sft(), sft_data(), size, max_epochs=2, ckpt_path=str(folder / "last.ckpt"))
        return whole, again, rest, end, names, watch.seen

    for rank, (whole, again, rest, end, names, seen) in enumerate(on_ranks(main)):
        for state in (again, rest, end):
            assert_same_state(state, whole)
        assert rest["steps"] == whole["steps"][2:]
        assert names == ["last.ckpt", "step=6.ckpt"]
        if rank == 0:
            assert all(readable for _, _, readable in seen)
            assert all(len(names) <= 3 for _, names, _ in seen)  # the link, the old one, and the new one


def test_a_write_that_fails_in_the_background_ends_all_ranks_and_keeps_the_older_checkpoint(tmp_path):
    def main(rank, size):
        class NoRoom(Callback):
            def on_train_batch_start(self, trainer, module, batch, index):
                if trainer.global_step == 2 and rank == 0:

                    def fail(checkpoint, path, storage_options=None):
                        raise OSError(28, "No space left on device")

                    trainer.strategy.checkpoint_io.save_checkpoint = fail

        start = time.monotonic()
        trainer = make_trainer(size, strategy(False), max_epochs=3, callbacks=[NoRoom(), linked(tmp_path)], enable_checkpointing=True)
        try:
            trainer.fit(sft(), datamodule=sft_data())
        except RuntimeError as error:
            return str(error), trainer.global_step, time.monotonic() - start
        return None

    for text, step, seconds in on_ranks(main):
        assert "step=3.ckpt failed: [Errno 28] No space left on device" in text
        assert step == 4  # one step later, when the next checkpoint waits for it
        assert seconds < 30
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_a_checkpoint_that_rank_zero_cannot_write_is_an_error_of_all_ranks_in_step(tmp_path):
    (tmp_path / "no folder").touch()

    def main(rank, size):
        errors = []
        for sharded in (False, True):
            plan = RLBatchFSDPStrategy(save_distributed_checkpoint=sharded)
            trainer = make_trainer(size, plan, max_epochs=1, callbacks=[linked(tmp_path / "no folder" / "run")], enable_checkpointing=True)
            try:
                trainer.fit(sft(), datamodule=sft_data())
            except RuntimeError as error:
                errors.append((str(error), plan.collectives_are_lost))
        return errors

    for errors in on_ranks(main):
        assert len(errors) == 2
        assert all("step=1.ckpt could not be written (NotADirectoryError" in text and not lost for text, lost in errors)


def test_a_state_that_cannot_be_stored_is_an_error_of_all_ranks_in_step_that_says_so(tmp_path):
    class Locked(Callback):
        def state_dict(self):
            return {"lock": threading.Lock()}

    def main(rank, size):
        errors = []
        for sharded in (False, True):
            plan = RLBatchFSDPStrategy(save_distributed_checkpoint=sharded)
            trainer = make_trainer(size, plan, max_epochs=1, callbacks=[Locked(), linked(tmp_path)], enable_checkpointing=True)
            try:
                trainer.fit(sft(), datamodule=sft_data())
            except RuntimeError as error:
                errors.append((str(error), plan.collectives_are_lost))
        return errors

    for errors in on_ranks(main):
        assert len(errors) == 2
        assert all("must be of tensors and plain values" in text and not lost for text, lost in errors)
    assert list(tmp_path.glob("*.ckpt")) == []


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_an_error_while_a_checkpoint_is_being_written_lets_it_become_complete(sharded, tmp_path):
    def main(rank, size):
        class Fails(Callback):
            def on_train_batch_start(self, trainer, module, batch, index):
                if trainer.global_step == 3 and rank == 1:
                    raise KeyError("boom")

        trainer = make_trainer(size, strategy(sharded), max_epochs=3, callbacks=[Fails(), linked(tmp_path)], enable_checkpointing=True)
        start = time.monotonic()
        try:
            trainer.fit(sft(), datamodule=sft_data())
        except Exception as error:
            return str(error), time.monotonic() - start
        return None

    for text, seconds in on_ranks(main):
        assert "boom" in text
        assert seconds < 30
    assert os.readlink(tmp_path / "last.ckpt") == "step=3.ckpt"
    assert (tmp_path / "last.ckpt").exists()


def test_links_that_would_move_too_early_are_refused(tmp_path):
    def main(rank, size):
        saver = ModelCheckpoint(str(tmp_path), save_last="link", every_n_epochs=1)
        with pytest.raises(MisconfigurationException, match=r"Use RLBatchModelCheckpoint\(save_last='link'\)"):
            make_trainer(size, strategy(False), max_epochs=1, callbacks=[saver], enable_checkpointing=True).fit(sft(), sft_data())

    on_ranks(main, 1)


def test_killed_while_writing_in_the_background_the_last_checkpoint_loads(tmp_path):
    cases = {tmp_path / "sharded": (True, 0.05), tmp_path / "sharded, later": (True, 0.2), tmp_path / "one file": (False, 0.1)}
    for folder, (sharded, delay) in cases.items():

        def fit(size, folder=folder, sharded=sharded):
            trainer = make_trainer(size, strategy(sharded), max_epochs=10_000, callbacks=[linked(folder)], enable_checkpointing=True)
            trainer.fit(sft(optimizer=adamw), datamodule=sft_data())

        train_until_killed(fit, folder, delay)
    assert min(steps_after_resuming([(folder, {"max_steps": 1}) for folder in cases])) >= 1
