"""Whole PPO runs, rollouts to validation, on several ranks: same collectives, same numbers (R02, R03, R06, R09, R10, R17)."""

import contextlib
import math
import types
import warnings

import pytest
import torch
from hand_made import ScriptedPPO, prompts, varied_reward
from helpers import (
    CollectiveRecorder,
    StepRecorder,
    ToyTokenizer,
    make_trainer,
    relative_difference,
    sgd,
    tiny_llama,
    whole_parameters,
)

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.functional import GAE, GRPO, OTB, AdaptiveKL
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

TRAIN = "gabgcdegfbag"  # 'a' is answered by 1 token ... 'g' by 7
SIZES = {"train_batch_size": 6, "mini_batch_size": 3, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 7}


def some_verdicts(prompts, completion_ids):
    """No verdict on some rollouts: they leave their group's statistics and training."""
    return [None if sum(ids) % 5 == 0 else float(sum(ids) % 3) for ids in completion_ids]


def scripted(**options):
    defaults = {
        "reward_functions": [varied_reward],
        "critic": lambda: tiny_llama(1, dtype=torch.get_default_dtype()),
        "advantage": GAE(),
        "kl_coefficient": 0.1,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    }
    return ScriptedPPO(lambda: tiny_llama(dtype=torch.get_default_dtype()), **defaults | options)


def data_module(train=TRAIN, val=None, **options):
    sources = {"train_prompts": lambda: prompts(train), "val_prompts": None if val is None else lambda: prompts(val)}
    return RolloutDataModule(tokenizer=ToyTokenizer(), **sources, **{"max_tokens_per_rank": 8, **SIZES, **options})


def fit(module, data, world_size, strategy="rlbatch_fsdp", **kwargs):
    """Return what the run did, without the objects that cannot leave their process."""
    recorder = StepRecorder()
    has_val = data.val_source is not None
    trainer = make_trainer(
        world_size, strategy, callbacks=[recorder], limit_val_batches=1.0 if has_val else 0, **{"max_epochs": 2, **kwargs}
    )
    trainer.fit(module, datamodule=data)
    validation = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return types.SimpleNamespace(
        metrics=recorder.metrics, parameters=whole_parameters(module), validation=validation, global_step=trainer.global_step
    )


def comparable(metrics):
    """Metrics that must not depend on the layout: all but times and what the plan says of itself."""
    return {name: value for name, value in metrics.items() if name.split("/")[0] not in ("balance", "time", "perf") and value == value}


# -- same collectives ------------------------------------------------------------------------------------------------------------------


def test_ranks_call_the_same_collectives_from_rollouts_to_validation():
    def fn(rank, world_size):
        with CollectiveRecorder() as collectives:
            # Contiguous blocks: one rank has long samples only, the other short ones.
            fit(scripted(), data_module("gggab", "gab", balance=False, train_batch_size=5, mini_batch_size=5), world_size, max_epochs=1)
        return collectives.calls

    first, second = run_distributed(fn, 2, init_process_group=False)
    assert first == second
    assert len(first) > 50
    kinds = set(first)
    assert any("alltoall" in name for name in kinds)
    assert any("allgather" in name for name in kinds)
    assert any("reduce_scatter" in name for name in kinds)


def test_single_sample_on_two_ranks_trains_beside_a_filler():
    options = {"train_batch_size": 1, "mini_batch_size": 1, "rollouts_per_prompt": 1}
    tolerances = {"32-true": 1e-5, "bf16-mixed": 1e-2}

    def fn(rank, world_size):
        found = []
        for precision in tolerances:
            module = scripted(advantage=GAE(whiten=False))
            with CollectiveRecorder() as collectives:
                run = fit(module, data_module("g", "g", **options), world_size, max_epochs=1, precision=precision)
            found.append((collectives.calls, run))
        return found

    (alone,) = run_distributed(fn, 1, init_process_group=False)
    for tolerance, (_, single), *pair in zip(tolerances.values(), alone, *run_distributed(fn, 2, init_process_group=False), strict=True):
        (calls, run), (other_calls, other) = pair
        assert calls == other_calls
        assert comparable(run.metrics[0]) == comparable(other.metrics[0])
        assert run.metrics[0]["train/num_sequences"] == 1
        assert run.metrics[0]["train/num_tokens"] == 7
        assert relative_difference(comparable(run.metrics[0]), comparable(single.metrics[0])) < tolerance


# -- same numbers ------------------------------------------------------------------------------------------------------------------------

RUNS = {  # options of module, data and Trainer; an iteration has two mini-batches
    "ppo": ({}, {"ppo_epochs": 2}, {}),
    "missing verdicts": ({"reward_functions": [some_verdicts], "critic": None, "advantage": GRPO()}, {}, {"max_epochs": 1}),
    "two rewards": (
        {"reward_functions": [varied_reward, some_verdicts], "reward_weights": [1.0, 0.5], "advantage": OTB()},
        {"planner": "per_rank", "critic_max_tokens_per_rank": 20},
        {"max_epochs": 1},
    ),
    "static": ({"critic": "shared"}, {"max_tokens_per_rank": None, "micro_batch_size": 2}, {"max_epochs": 1}),
}
LAYOUTS = [(1, "auto", 1), (2, "fsdp", 1), (2, "ddp", 1), (4, "fsdp", 1), (4, "fsdp", 2)]


def run_all(rank, world_size, strategy, sp_size):
    torch.set_default_dtype(torch.float64)
    results = {}
    for name, (module_options, data_options, trainer_options) in RUNS.items():
        made = RLBatchFSDPStrategy(sp_size) if strategy == "fsdp" else strategy
        results[name] = fit(scripted(**module_options), data_module(val="gac", **data_options), world_size, made, **trainer_options)
    return results


@pytest.fixture(scope="module")
def runs():
    """All ranks of all layouts."""
    return {layout: run_distributed(run_all, *layout, timeout=240.0, init_process_group=False) for layout in LAYOUTS}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]} x {layout[1]}, sp {layout[2]}")
def test_whole_run_does_not_depend_on_the_layout(layout, name, runs):
    expected = runs[LAYOUTS[0]][0][name]
    assert len(expected.metrics) == {"ppo": 8, "missing verdicts": 2, "two rewards": 2, "static": 2}[name]
    for rank in runs[layout]:
        run = rank[name]
        assert run.global_step == len(run.metrics) == len(expected.metrics)
        for step, (metrics, reference) in enumerate(zip(run.metrics, expected.metrics)):
            assert relative_difference(comparable(metrics), comparable(reference)) < 1e-9, step
        assert relative_difference(run.parameters, expected.parameters) < 1e-9


def test_passes_over_the_prompts_are_logged_as_a_fraction(runs):
    metrics = runs[LAYOUTS[0]][0]["ppo"].metrics
    assert [row["train/prompt_epoch"] for row in metrics[::4]] == [0.0, 6 / len(TRAIN)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]} x {layout[1]}, sp {layout[2]}")
def test_three_validation_prompts_give_the_same_metric_on_any_number_of_ranks(layout, runs):
    expected = runs[LAYOUTS[0]][0]["ppo"].validation
    assert expected["val/length/mean"] == pytest.approx((7 + 1 + 3) / 3)
    functions = [value for name, value in expected.items() if name.startswith("val/reward/") and name != "val/reward/mean"]
    assert expected["val/reward/mean"] == pytest.approx(sum(functions))
    for rank in runs[layout]:
        assert rank["ppo"].validation == pytest.approx(expected, rel=1e-12)


def test_rollouts_without_a_verdict_are_not_trained_on(runs):
    run = runs[LAYOUTS[0]][0]["missing verdicts"]
    trained = sum(row["train/num_sequences"] for row in run.metrics)
    assert 0 < trained < 6 * 2
    assert all(math.isfinite(row["train/loss"]) for row in run.metrics)


def no_verdict(prompts, completions):
    return [None] * len(completions)


def test_iteration_without_any_verdict_is_a_run_of_skipped_steps():
    def fn(rank, world_size):
        with pytest.warns(UserWarning, match="no token to train on") if rank == 0 else contextlib.nullcontext():
            module = scripted(reward_functions=[no_verdict], kl_reward=AdaptiveKL(0.5))
            return fit(module, data_module(), world_size, max_epochs=1), module.kl_reward_coefficient

    for run, coefficient in run_distributed(fn, 2, init_process_group=False):
        assert coefficient == 0.5  # there is no divergence to steer by
        for name in ("reward/mean", "reward/no_verdict", "kl/reward", "kl/rollout_mismatch"):
            assert math.isnan(run.metrics[0][name]), name
        assert run.global_step == 2
        assert [row["train/skipped_steps"] for row in run.metrics] == [1, 1]
        assert [row["train/num_tokens"] for row in run.metrics] == [0, 0]


# -- the first ratio -----------------------------------------------------------------------------------------------------------------------


FIRST_RATIOS = [  # ranks, strategy, options of the module, precision
    (1, "auto", {}, "32-true"),
    (1, "auto", {}, "bf16-mixed"),  # autocast, which rollouts have to enter by themselves
    (2, "rlbatch_fsdp", {}, "32-true"),
    (2, "rlbatch_fsdp", {"remove_padding": False}, "32-true"),
    (2, "rlbatch_fsdp", {}, "bf16-mixed"),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_first_ratio_is_one_and_nothing_is_clipped_although_the_config_has_dropout(world_size):
    def fn(rank, size):
        found = []
        for strategy, options, precision in [case[1:] for case in FIRST_RATIOS if case[0] == world_size]:
            module = PPOModule(lambda: tiny_llama(dropout=0.3), [varied_reward], kl_coefficient=0.1, optimizer=sgd, **options)
            data = data_module(log_prob_max_tokens_per_rank=40, mini_batch_size=6)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = fit(module, data, size, strategy, max_epochs=1, precision=precision)
            found.append((run.metrics[0], [str(warning.message) for warning in caught]))
        return found

    for rank, cases in enumerate(run_distributed(fn, world_size, init_process_group=False)):
        for metrics, said in cases:
            assert metrics["train/ratio"] == pytest.approx(1, abs=1e-5)
            assert metrics["train/approx_kl"] == pytest.approx(0, abs=1e-5)
            assert metrics["kl/reference"] == pytest.approx(0, abs=1e-5)
            assert [metrics[f"train/clip_fraction_{side}"] for side in ("low", "high")] == [0, 0]
            assert any("Dropout of the policy was set to 0" in text for text in said) == (rank == 0)
