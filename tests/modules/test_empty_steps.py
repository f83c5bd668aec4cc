"""Micro-batches, ranks and whole mini-batches without anything to train on, and gradients that are not finite (R08)."""

import functools
import math
import types
import warnings

import pytest
import torch
from hand_made import ConstantLossModule, HandMadeDataModule, Step, make_samples, with_policy_log_probs
from helpers import StepRecorder, length_reward, make_trainer, tiny_llama, whole, whole_parameters
from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.data import BatchingOptions
from lightning_rlbatch.modules import PPOModule, SFTModule
from lightning_rlbatch.strategies import FSDPMixedPrecision
from lightning_rlbatch.testing import run_distributed

SHAPES = [(2, 3), (1, 6), (3, 2)]
ONE_BY_ONE = BatchingOptions(micro_batch_size=1, balance=False)


def masked(samples, indices):
    keep = torch.tensor([index not in indices for index in samples.sample_ids_per_token.tolist()])
    return samples.with_fields(per_token={"response_mask": samples["response_mask"] & keep})


def alone(samples, indices):
    return samples.select([index for index in range(samples.num_samples) if index not in indices])


def adamw_state(trainer):
    state = trainer.optimizers[0].state_dict()["state"]
    return {f"{index} {name}": whole(value) for index, entries in state.items() for name, value in entries.items()}


class NotFiniteOnce(ConstantLossModule):
    """The loss of its second step is infinite."""

    def micro_batch_step(self, micro_batch, denominators):
        output = super().micro_batch_step(micro_batch, denominators)
        if len(self.seen) == 2:
            output.loss = output.loss * float("inf")
        return output


class Snapshots(StepRecorder):
    """Also keeps parameters, optimizer state and learning rate after every step."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        self.states.append((whole_parameters(pl_module), adamw_state(trainer), trainer.optimizers[0].param_groups[0]["lr"]))


def make_sft():
    return SFTModule(
        tiny_llama,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=20),
    )


def fit(module, steps, world_size, strategy="rlbatch_fsdp", samples=None):
    recorder = Snapshots()
    trainer = make_trainer(world_size, strategy, max_epochs=1, callbacks=[recorder])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=HandMadeDataModule(samples or make_samples(SHAPES), steps))
    said = [str(warning.message) for warning in caught if "step is skipped" in str(warning.message)]
    kept = {name: getattr(recorder, name) for name in ("gradients", "metrics", "global_steps", "states")}
    return types.SimpleNamespace(warnings=said, **kept)  # without the Trainer, which cannot leave its process


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


@pytest.fixture(scope="module", params=[(1, "auto"), (2, "rlbatch_fsdp"), (2, "ddp")], ids=lambda layout: f"{layout[0]} x {layout[1]}")
def ranks(request):
    samples = make_samples(SHAPES)

    def fn(rank, world_size, strategy):
        real, empty = Step(ONE_BY_ONE), Step(ONE_BY_ONE, samples=masked(samples, {0, 1, 2}))
        return {
            "second masked": fit(make_sft(), [Step(ONE_BY_ONE, samples=masked(samples, {1}))], world_size, strategy),
            "second left out": fit(make_sft(), [Step(ONE_BY_ONE, samples=alone(samples, {1}))], world_size, strategy),
            # contiguous blocks: the last rank of two holds samples 1 and 2
            "rank masked": fit(make_sft(), [Step(ONE_BY_ONE, samples=masked(samples, {1, 2}))], world_size, strategy),
            "rank left out": fit(make_sft(), [Step(ONE_BY_ONE, samples=alone(samples, {1, 2}))], world_size, strategy),
            "with empty steps": fit(make_sft(), [real, empty, empty, real], world_size, strategy),
            "without": fit(make_sft(), [real, real], world_size, strategy),
        }

    return run_distributed(fn, *request.param[:1], request.param[1], init_process_group=False)


@pytest.mark.parametrize(("masked_run", "shorter_run"), [("second masked", "second left out"), ("rank masked", "rank left out")])
def test_masked_samples_are_as_if_they_were_not_there(masked_run, shorter_run, ranks):
    for runs in ranks:
        left, right = runs[masked_run], runs[shorter_run]
        assert left.metrics[0]["train/loss"] > 0
        for name in ("train/loss", "train/num_tokens", "train/num_sequences", "train/grad_norm/policy"):
            assert left.metrics[0][name] == pytest.approx(right.metrics[0][name], rel=1e-5)
        for name, gradient in right.gradients[0].items():
            torch.testing.assert_close(left.gradients[0][name], gradient, rtol=1e-4, atol=1e-6)


def test_empty_mini_batch_changes_nothing_but_the_step_count(ranks):
    for runs in ranks:
        run = runs["with empty steps"]
        assert run.global_steps == [1, 2, 3, 4]
        assert [row["train/skipped_steps"] for row in run.metrics] == [0, 1, 1, 0]
        assert [row["train/num_tokens"] for row in run.metrics] == [11, 0, 0, 11]
        assert run.metrics[1]["train/loss"] == 0
        assert len(run.gradients) == 4  # the backward pass ran
        assert run.gradients[1]
        assert all(not gradient.any() for gradient in run.gradients[1].values())
        (first, moments, rate), (skipped, moments_after, rate_after) = run.states[0], run.states[2]
        assert moments
        assert same(skipped, first)
        assert same(moments_after, moments)
        assert rate_after == rate


def test_run_with_empty_steps_ends_where_the_run_without_them_ends(ranks):
    for runs in ranks:
        with_empty, without = runs["with empty steps"].states[3], runs["without"].states[1]
        assert same(with_empty[0], without[0])
        assert same(with_empty[1], without[1])
        assert with_empty[2] == without[2]


def test_empty_mini_batches_are_warned_about_once_on_rank_zero(ranks):
    assert [len(runs["with empty steps"].warnings) for runs in ranks] == [1] + [0] * (len(ranks) - 1)
    assert all(not runs["second masked"].warnings for runs in ranks)


def test_skipped_step_reports_no_metric_of_an_earlier_step():
    samples = make_samples(SHAPES)
    samples = samples.with_fields(per_token={"constant": torch.full((samples.num_tokens,), 5.0)})
    steps = [Step(ONE_BY_ONE), Step(ONE_BY_ONE, samples=masked(samples, {0, 1, 2}))]

    def fn(rank, world_size):
        return fit(ConstantLossModule(), steps, world_size, samples=samples).metrics

    for first, second in run_distributed(fn, 2, init_process_group=False):
        assert first["mine"] == 5
        assert math.isnan(second["mine"])


def test_gradient_that_is_infinite_on_one_rank_skips_the_step_on_all():
    rows = make_samples([(1, 3), (1, 3)]).with_fields(per_token={"constant": torch.ones(8)})

    def fn(rank, world_size):
        module = NotFiniteOnce() if rank == 1 else ConstantLossModule()
        module.optimizer_factory = functools.partial(torch.optim.AdamW, lr=0.1)
        run = fit(module, [Step(ONE_BY_ONE)] * 3, world_size, samples=rows)
        return [row["train/skipped_steps"] for row in run.metrics], [float(state[0]["model.weight"]) for state in run.states], run.warnings

    for skipped, weights, caught in run_distributed(fn, 2, init_process_group=False):
        assert skipped == [0, 1, 0]
        assert weights[1] == weights[0]
        assert weights[2] < weights[1]
        assert len(caught) <= 1


def test_half_precision_overflow_skips_the_step_on_all_ranks_and_halves_the_scale():
    def fn(rank, world_size):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # far above what fp16 gradients can hold
        scales = []

        class Scales(Callback):
            def on_train_batch_end(self, *args):
                scales.append(scaler.get_scale())

        recorder, module = Snapshots(), make_sft()
        trainer = make_trainer(
            world_size, max_epochs=1, callbacks=[recorder, Scales()], plugins=[FSDPMixedPrecision("16-mixed", "cpu", scaler)]
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, datamodule=HandMadeDataModule(make_samples(SHAPES), [Step(ONE_BY_ONE)] * 20))
        said = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
        rates = [state[2] for state in recorder.states]
        return [row["train/skipped_steps"] for row in recorder.metrics], scales, [state[0] for state in recorder.states], rates, said

    (skipped, scales, weights, rates, said), other = run_distributed(fn, 2, init_process_group=False)
    assert skipped == other[0]
    count = skipped.index(0)
    assert 2 < count < 18
    assert skipped == [1] * count + [0] * (20 - count)
    assert scales[: count + 1] == [2.0 ** (23 - step) for step in range(count)] + [2.0 ** (24 - count)]
    assert all(same(state, weights[0]) for state in weights[:count])
    assert not same(weights[count], weights[0])
    assert len(set(rates[:count])) == 1  # the schedule waits with the weights
    assert rates[count] > rates[0]
    assert len(said) == 1


def infinite_on_last_rank(samples):
    """The last sample's advantages are infinite; contiguous blocks put it on the last rank."""
    last = samples.sample_ids_per_token == samples.num_samples - 1
    return samples.with_fields(per_token={"advantages": torch.where(last, torch.inf, samples["advantages"])})


def make_ppo():
    return PPOModule(
        tiny_llama,
        [length_reward],
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=20),
    )


@pytest.fixture(scope="module")
def after_infinity(tmp_path_factory):
    """Runs with a step that is infinite on one rank of two, and one that never had it."""
    path = str(tmp_path_factory.mktemp("infinite") / "skipped.ckpt")
    samples = with_policy_log_probs(make_samples(SHAPES), tiny_llama(), noise=0.1)
    good, bad = Step(ONE_BY_ONE), Step(ONE_BY_ONE, samples=infinite_on_last_rank(samples))
    other = Step(ONE_BY_ONE, order=[2, 0, 1])

    def train(world_size, steps, *, save_to=None, ckpt_path=None, max_epochs=1, plugins=None):
        recorder = Snapshots()
        trainer = make_trainer(world_size, max_epochs=max_epochs, callbacks=[recorder], plugins=plugins)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The gradient norm is not finite")
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
            trainer.fit(make_ppo(), datamodule=HandMadeDataModule(samples, steps), ckpt_path=ckpt_path)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
        return recorder.states, [row["train/skipped_steps"] for row in recorder.metrics], trainer.global_step

    def fn(rank, world_size):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        return {
            "interrupted": train(world_size, [good, bad], save_to=path),
            "resumed": train(world_size, [other, good], ckpt_path=path, max_epochs=2),
            "never": train(world_size, [good, other, good]),
            "half": (train(world_size, [good, bad, good], plugins=[FSDPMixedPrecision("16-mixed", "cpu", scaler)]), scaler.get_scale()),
        }

    return run_distributed(fn, 2, init_process_group=False)


def test_run_resumed_after_an_infinite_step_ends_where_the_run_without_that_step_ends(after_infinity):
    for runs in after_infinity:
        (_, skipped, _), (states, resumed, steps), (expected, never, fewer) = (runs[name] for name in ("interrupted", "resumed", "never"))
        assert (skipped, resumed, never) == ([0, 1], [0, 0], [0, 0, 0])
        assert (steps, fewer) == (4, 3)  # Lightning counts the step that was skipped
        assert not same(expected[2][0], expected[0][0])
        assert same(states[1][0], expected[2][0])
        assert same(states[1][1], expected[2][1])
        assert states[1][2] == expected[2][2]  # the learning rate


def test_infinity_on_one_rank_halves_the_loss_scale_on_all_and_nothing_else(after_infinity):
    for runs in after_infinity:
        (states, skipped, _), scale = runs["half"]
        assert skipped == [0, 1, 0]
        assert scale == 8.0
        first, second, third = states
        assert same(second[0], first[0])
        assert same(second[1], first[1])
        assert second[2] == first[2]
        assert not same(third[0], second[0])
        assert third[2] > second[2]
