"""A wish to stop takes effect on all ranks within seconds, also while rollouts are being collected."""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
import warnings

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed import distributed_c10d

from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback
from lightning_rlbatch.strategies.interrupting import StopWatch
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer
from tests.strategies.runs import assert_same_state, ppo, prompt_rows, rollouts, run

LONG = 60.0  # seconds that a reward function takes unless somebody interrupts it


def sigterm(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def ctrl_c(trainer):
    os.kill(os.getpid(), signal.SIGINT)


def should_stop(trainer):
    trainer.should_stop = True


# (rank whose reward function runs while the other one waits in a collective, rank that is told, how, how the run ends, in what)
CASES = [
    (1, 0, sigterm, "SIGTERMException", "collection"),
    (0, 1, sigterm, "SIGTERMException", "collection"),
    (0, 0, sigterm, "SIGTERMException", "collection"),
    (1, 0, should_stop, None, "collection"),
    (0, 0, should_stop, None, "collection"),
    (0, 1, sigterm, "SIGTERMException", "validation"),
    (1, 0, ctrl_c, "SystemExit", "collection"),
]


VALIDATION = {"collection": {}, "validation": {"limit_val_batches": 1.0, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 1}}


class SlowReward:
    """Takes very long in the second iteration, and swallows ordinary exceptions, as reward functions do."""

    __name__ = "slow_reward"

    def __init__(self, is_slow, begun):
        self.is_slow, self.begun, self.calls = is_slow, begun, 0

    def __call__(self, prompts, completions):
        self.calls += 1
        if self.is_slow and self.calls == 2:
            self.begun.set()
            with contextlib.suppress(Exception):
                time.sleep(LONG)
        return [float(len(completion)) for completion in completions]


def stopped_run(size, reward, tell, folder, what):
    """Fit until the stop; return how it ended, the counters, and when."""
    saver = ModelCheckpoint(str(folder), "at_stop", save_on_exception=True, every_n_epochs=100, enable_version_counter=False)
    trainer = make_trainer(size, max_epochs=3, callbacks=[saver], enable_checkpointing=True, **VALIDATION[what])
    threading.Thread(target=tell, args=(trainer,), daemon=True).start()
    ended = None
    try:
        trainer.fit(ppo(reward_functions=[reward]), datamodule=rollouts(val_prompts=prompt_rows))
    except BaseException as error:
        ended = type(error).__name__
    return ended, trainer.global_step, time.monotonic()


def test_a_stop_in_a_collection_ends_all_ranks_within_seconds_and_the_run_resumes_exactly(tmp_path):
    begun = [multiprocessing.Event() for _ in CASES]
    told_at = [multiprocessing.Value("d", 0.0) for _ in CASES]

    def main(rank, size):
        endings = []
        for number, (slow, told, how, _, what) in enumerate(CASES):

            def tell(trainer, number=number, told=told, how=how):
                if rank == told and begun[number].wait(30):
                    time.sleep(0.2)
                    told_at[number].value = time.monotonic()
                    how(trainer)

            endings.append(stopped_run(size, SlowReward(rank == slow, begun[number]), tell, tmp_path / str(number), what))
        warnings.filterwarnings("ignore", message=".*val_dataloader.*does not have many workers")
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        whole = run(ppo(), rollouts(), size, max_epochs=3)
        paths = [tmp_path / number / "at_stop.ckpt" for number in ("1", "5")]
        data = functools.partial(rollouts, val_prompts=prompt_rows)
        resumed = [run(ppo(), data(), size, max_epochs=3, ckpt_path=str(path), **VALIDATION[what]) for path, what in zip(paths, VALIDATION)]
        return endings, resumed, whole

    for endings, resumed, whole in run_distributed(main, 2, init_process_group=False):
        for (name, step, ended_at), (_, _, _, expected, _), begin in zip(endings, CASES, told_at):
            assert (name, step) == (expected, 2)
            assert 0 < ended_at - begin.value < 10
        for rest in resumed:
            assert_same_state(rest, whole)
            assert rest["collections"] == whole["collections"][1:]


def test_should_stop_of_a_rollout_callback_ends_before_a_step_on_these_rollouts():
    class Enough(RolloutCallback):
        def __init__(self, is_told):
            self.is_told = is_told

        def on_rollout_end(self, trainer, module, rollouts):
            if rollouts.iteration == 1 and self.is_told:
                trainer.should_stop = True

    def main(rank, size):
        trainer = make_trainer(size, max_epochs=3, callbacks=[Enough(rank == 1)])
        trainer.fit(ppo(), datamodule=rollouts())
        unheeded = make_trainer(size, max_epochs=3, min_epochs=3, callbacks=[Enough(rank == 0)])
        unheeded.fit(ppo(), datamodule=rollouts())
        return trainer.global_step, unheeded.global_step

    assert run_distributed(main, 2, init_process_group=False) == [(2, 6)] * 2


class CtrlC(Callback):
    """Sends Ctrl-C to one rank before a step, in which the other one needs it."""

    def __init__(self, rank, times=1):
        self.rank, self.times = rank, times

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == self.rank:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_on_one_rank_stops_all_after_the_step_with_a_checkpoint_that_resumes_exactly(tmp_path):
    def main(rank, size):
        before = signal.getsignal(signal.SIGINT)
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        whole = run(ppo(), rollouts(), size, max_epochs=3)
        given_back = signal.getsignal(signal.SIGINT) is before
        saver = ModelCheckpoint(str(tmp_path), "at_stop", save_on_exception=True, every_n_epochs=100, enable_version_counter=False)
        trainer = make_trainer(size, max_epochs=3, callbacks=[CtrlC(1), saver], enable_checkpointing=True)
        with pytest.raises(SystemExit):  # Lightning's ending of a KeyboardInterrupt
            trainer.fit(ppo(), datamodule=rollouts())
        signal.signal(signal.SIGINT, before)
        rest = run(ppo(), rollouts(), size, max_epochs=3, ckpt_path=str(tmp_path / "at_stop.ckpt"))
        return given_back, trainer.global_step, whole, rest

    for given_back, step, whole, rest in run_distributed(main, 2, init_process_group=False):
        assert given_back
        assert step == 4
        assert_same_state(rest, whole)


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_step():
    def main(rank, size):
        trainer = make_trainer(size, "auto", max_epochs=3, callbacks=[CtrlC(0, times=2)])
        with pytest.raises(SystemExit):
            trainer.fit(ppo(), datamodule=rollouts())
        return trainer.global_step

    assert run_distributed(main, 1, init_process_group=False) == [3]


class LostStore:
    """Of a rank 0 that was killed: connecting to it takes as long as its timeout."""

    def clone(self):
        time.sleep(LONG)


def test_a_collection_ends_although_the_store_has_gone_with_rank_zero():
    def main(rank, size):
        distributed_c10d._get_default_store = LostStore  # in this process, which is a copy
        start = time.monotonic()
        with StopWatch(set(), lambda: False, "collection", requested=False):
            pass
        return time.monotonic() - start

    assert run_distributed(main, 1)[0] < 10


class Told(Callback):
    """Sends SIGTERM to one rank at a hook."""

    def __init__(self, hook, is_told):
        setattr(self, hook, lambda trainer, *args: sigterm(trainer) if is_told else None)


OUTSIDE = [("validate", "on_validation_batch_start"), ("predict", "on_predict_batch_start"), ("fit", "on_validation_batch_end")]


def told_run(rank, size, what, hook, folder=None):
    """Send SIGTERM to the last rank; return how this one ended, and after how many steps."""
    saver = [] if folder is None else [ModelCheckpoint(str(folder), "at_stop", save_on_exception=True, every_n_epochs=100)]
    options = {"max_epochs": 2, "limit_val_batches": 1.0, "num_sanity_val_steps": 1, "enable_checkpointing": bool(saver)}
    trainer = make_trainer(size, callbacks=[Told(hook, rank == size - 1), *saver], **options)
    try:
        getattr(trainer, what)(ppo(), datamodule=rollouts(val_prompts=prompt_rows))
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "code", None), trainer.global_step
    return None


@pytest.mark.parametrize(("what", "hook"), OUTSIDE)
def test_sigterm_outside_of_training_ends_all_ranks(what, hook):
    other, told = run_distributed(told_run, 2, what, hook, init_process_group=False)
    assert told == ("Terminated", "SIGTERM", 143, 0)
    assert other[0] == "PeerFailedError"
    assert "Rank 1 failed" in other[1]
    assert "Terminated: SIGTERM" in other[1]


def test_sigterm_outside_of_training_ends_a_single_process():
    found = run_distributed(lambda rank, size: [told_run(rank, size, *case) for case in OUTSIDE], 1, init_process_group=False)
    assert found == [[("Terminated", "SIGTERM", 143, 0)] * 3]


def test_sigterm_in_training_after_a_sanity_check_stops_all_ranks_together(tmp_path):
    ended = run_distributed(told_run, 2, "fit", "on_train_batch_start", tmp_path, init_process_group=False)
    assert ended == [("SIGTERMException", "", None, 1)] * 2
    assert (tmp_path / "at_stop.ckpt").is_file()
