"""PPO runs with one fault: something bad in one phase on one rank."""

import os
import signal
import sys
import time
import warnings

from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.functional import GRPO
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from tests.helpers import ToyTokenizer, length_reward, make_trainer, sgd, tiny_llama
from tests.strategies.runs import prompt_rows

TOGETHER = ("reward", "generation", "validation")  # what a rank runs alone: an error there is raised on all ranks, in step
SETUP = ("data setup", "model loading")  # before the first step
APART = (*SETUP, "log-probs", "loss", "backward", "optimizer step", "checkpoint", "callback")
RANKS = (0, 1)


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


def interrupt():
    raise KeyboardInterrupt


def leave():
    sys.exit(3)


def exit_early():
    os._exit(0)


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyModule(PPOModule):
    def __init__(self, fault, **options):
        super().__init__(tiny_llama, [length_reward], advantage=GRPO(), optimizer=sgd, **options)
        self.fault = fault

    def build_models(self):
        self.fault("model loading")
        super().build_models()

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

    def scoring_passes(self):
        passes = super().scoring_passes()
        compute = passes["old_log_probs"]

        def faulty(micro_batch):
            if self.global_step >= 2:
                self.fault("log-probs")
            return compute(micro_batch)

        return {**passes, "old_log_probs": faulty}

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

    def on_train_epoch_start(self, trainer, *args):
        if trainer.global_step >= 2:
            self.fault("epoch start")

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            self.fault("callback")

    def on_save_checkpoint(self, trainer, *args):
        if trainer.global_step >= 4:
            self.fault("checkpoint")


def faulty_run(rank, size, phase, bad_rank, action, callbacks=(), *, with_step=False, strategy=None, **strategy_options):
    """Return the error of this rank as (type name, text), and the seconds from the start; None if it ended well."""
    fault = Fault(phase, bad_rank, action, rank)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            size,
            strategy or RLBatchFSDPStrategy(**strategy_options),
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
            if with_step:
                return type(error).__name__, trainer.global_step, time.monotonic() - start
            said = [str(warning.message) for warning in caught]
            return type(error).__name__, str(error), time.monotonic() - start, said
    return None, trainer.global_step, time.monotonic() - start, []
