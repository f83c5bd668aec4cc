"""Whichever rank fails in whichever phase: every rank ends within seconds, and says what happened where."""

import os
import signal
import tempfile
import time
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.functional import GRPO
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed
from tests.helpers import ToyTokenizer, length_reward, make_trainer, tiny_llama
from tests.strategies.runs import adamw, ppo, prompt_rows, rollouts, sft, sft_data

PHASES = ("data setup", "reward", "generation", "loss", "backward", "optimizer step", "validation", "callback")


class BoomError(Exception):
    """An error that no library raises."""


class Fault:
    """Does something bad in one phase on one rank, in the second iteration where there is one."""

    def __init__(self, phase, rank, action, own_rank):
        self.phase, self.active, self.action = phase, rank == own_rank, action

    def __call__(self, phase):
        if self.active and phase == self.phase:
            self.action()


def raise_boom():
    raise BoomError("the cause")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyModule(PPOModule):
    def __init__(self, fault, **options):
        super().__init__(tiny_llama, [length_reward], advantage=GRPO(), optimizer=adamw, **options)
        self.fault = fault

    def compute_rewards(self, **arguments):
        if self.trainer.validating:
            self.fault("validation")
        if self.global_step >= 2:
            self.fault("reward")
        return super().compute_rewards(**arguments)

    def sampling(self, prompts, **options):
        params = super().sampling(prompts, **options)
        if self.global_step >= 2 and self.trainer.training:
            original, fault = self.rollout_engine.generate, self.fault

            def generate(*args, **kwargs):
                fault("generation")
                return original(*args, **kwargs)

            self.rollout_engine.generate = generate
        return params

    def micro_batch_step(self, micro_batch, denominators):
        output = super().micro_batch_step(micro_batch, denominators)
        if self.global_step >= 3:
            self.fault("loss")
            if self.fault.active and self.fault.phase == "backward":
                output.loss.register_hook(lambda gradient: self.fault("backward"))
        return output

    def on_before_optimizer_step(self, optimizer):
        if self.global_step >= 3:
            self.fault("optimizer step")
        super().on_before_optimizer_step(optimizer)


class FaultyData(RolloutDataModule):
    def __init__(self, fault):
        super().__init__(
            prompt_rows,
            ToyTokenizer(),
            val_prompts=prompt_rows,
            train_batch_size=4,
            mini_batch_size=2,
            rollouts_per_prompt=2,
            max_tokens_per_rank=40,
            max_prompt_length=8,
            max_response_length=8,
        )
        self.fault = fault

    def setup(self, stage):
        self.fault("data setup")
        super().setup(stage)


class FaultyCallback(Callback):
    def __init__(self, fault):
        self.fault = fault

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            self.fault("callback")


def faulty_run(rank, size, phase, bad_rank, action, callbacks=(), **strategy_options):
    """Return the error of this rank as (type name, text), and the seconds from the start; None if it ended well."""
    fault = Fault(phase, bad_rank, action, rank)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            size,
            RLBatchFSDPStrategy(**strategy_options),
            max_epochs=3,
            limit_val_batches=1.0,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=2,
            callbacks=[FaultyCallback(fault), *callbacks],
            enable_checkpointing=bool(callbacks),
        )
        try:
            trainer.fit(FaultyModule(fault), datamodule=FaultyData(fault))
        except BaseException as error:
            said = [str(warning.message) for warning in caught]
            return type(error).__name__, str(error), time.monotonic() - start, said
    return None, trainer.global_step, time.monotonic() - start, []


def on_ranks(world_size, *args, expect_dead=(), **kwargs):
    """Run faulty_run on forked ranks; return results per rank, with None for ranks that were to be killed."""

    def main(rank, size):
        return faulty_run(rank, size, *args, **kwargs)

    if not expect_dead:
        return run_distributed(main, world_size, init_process_group=False, timeout=60)
    reports = {}

    def main_reporting(rank, size, folder):
        result = main(rank, size)
        torch.save(result, f"{folder}/{rank}")
        return result

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(AssertionError, match="died without a result"):
            run_distributed(main_reporting, world_size, folder, init_process_group=False, timeout=60)
        for name in os.listdir(folder):
            reports[int(name)] = torch.load(f"{folder}/{name}")
    assert reports.keys() == set(range(world_size)) - set(expect_dead)
    return reports


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_on_one_rank_ends_all_ranks_naming_it(phase, bad_rank):
    results = on_ranks(2, phase, bad_rank, raise_boom)
    assert results[bad_rank][:2] == ("BoomError", "the cause")
    name, text, seconds, _ = results[1 - bad_rank]
    assert name == "PeerFailedError"
    assert f"Rank {bad_rank} failed" in text
    assert "BoomError: the cause" in text
    assert seconds < 30


@pytest.mark.parametrize(("phase", "bad_rank"), [("generation", 1), ("loss", 0), ("validation", 1)])
def test_a_killed_rank_ends_all_ranks_naming_it(phase, bad_rank):
    results = on_ranks(2, phase, bad_rank, kill, expect_dead=(bad_rank,))
    name, text, seconds, _ = results[1 - bad_rank]
    assert name == "PeerFailedError"
    assert f"Rank {bad_rank} was lost" in text
    assert seconds < 30


def test_with_three_ranks_both_others_name_the_one_that_failed_and_the_one_that_was_killed():
    failed = on_ranks(3, "loss", 1, raise_boom)
    assert all("Rank 1 failed" in failed[rank][1] for rank in (0, 2))
    killed = on_ranks(3, "loss", 2, kill, expect_dead=(2,))
    assert all("Rank 2 was lost" in killed[rank][1] for rank in (0, 1))


def test_a_checkpoint_on_exception_neither_blocks_nor_hides_the_error(tmp_path):
    savers = [
        ModelCheckpoint(dirpath=str(tmp_path), save_on_exception=True, save_on_train_epoch_end=True),
        OnExceptionCheckpoint(str(tmp_path), "on_exception"),
    ]
    results = on_ranks(2, "loss", 1, raise_boom, callbacks=savers)
    assert results[1][:2] == ("BoomError", "the cause")
    assert "Rank 1 failed in" not in results[0][1]
    assert "BoomError: the cause" in results[0][1]
    assert all(seconds < 30 for _, _, seconds, _ in results)
    assert any("was not saved: a rank has failed" in text for text in results[1][3])
    # The iteration before the fault was saved whole.
    assert "state_dict" in torch.load(tmp_path / "epoch=0-step=2.ckpt", weights_only=True)


class StopOnOneRank(Callback):
    def __init__(self, own_rank, rank, how):
        self.active, self.how = own_rank == rank, how

    def on_train_batch_end(self, trainer, *args):
        if self.active and trainer.global_step == 3:
            if self.how == "should_stop":
                trainer.should_stop = True
            elif self.how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)

    def on_train_epoch_end(self, trainer, *args):
        if self.active and self.how == "epoch end":
            trainer.should_stop = True

    def on_validation_end(self, trainer, *args):
        if self.active and self.how == "validation end":
            trainer.should_stop = True


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(("how", "steps"), [("should_stop", 3), ("epoch end", 2), ("validation end", 2)])
def test_stop_on_one_rank_stops_all_ranks_after_the_same_step(how, steps, bad_rank):
    def main(rank, size):
        data = rollouts(val_prompts=prompt_rows)
        trainer = make_trainer(
            size, max_epochs=5, limit_val_batches=1.0, num_sanity_val_steps=0, callbacks=[StopOnOneRank(rank, bad_rank, how)]
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*val_dataloader.*does not have many workers")
            trainer.fit(ppo(), datamodule=data)
        return trainer.global_step

    assert run_distributed(main, 2, init_process_group=False) == [steps, steps]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_sigterm_on_one_rank_ends_all_ranks_together_and_may_save(bad_rank, tmp_path):
    def main(rank, size):
        saver = ModelCheckpoint(dirpath=str(tmp_path), save_on_exception=True, every_n_epochs=100, filename="at_sigterm")
        trainer = make_trainer(size, max_epochs=5, callbacks=[StopOnOneRank(rank, bad_rank, "SIGTERM"), saver], enable_checkpointing=True)
        start = time.monotonic()
        try:
            trainer.fit(ppo(), datamodule=rollouts())
        except BaseException as error:
            return type(error).__name__, trainer.global_step, time.monotonic() - start
        return None

    for name, step, seconds in run_distributed(main, 2, init_process_group=False):
        assert (name, step) == ("SIGTERMException", 3)
        assert seconds < 30
    assert torch.load(tmp_path / "at_sigterm.ckpt", weights_only=True)["global_step"] == 3


def test_check_collectives_names_the_first_difference_before_ranks_block():
    def main(rank, size):
        module = sft()
        if rank == 1:
            original = module.micro_batch_step
            module.backward_passes = lambda batch, denominators: [(batch.micro_batches * 2, original)]
        trainer = make_trainer(size, RLBatchFSDPStrategy(check_collectives=True), max_epochs=1)
        try:
            trainer.fit(module, datamodule=sft_data())
        except RuntimeError as error:
            return str(error)
        return None

    for text in run_distributed(main, 2, init_process_group=False):
        assert "about to do different things" in text
        assert "micro" in text
