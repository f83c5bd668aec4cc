"""Losses, metrics and counts worked out by hand, whatever the cut (R01, R06, R20) and whatever is masked (R08)."""

import pytest
from hand_made import ConstantLossModule, HandMadeDataModule, Step, constant_sample
from helpers import StepRecorder, make_trainer, sgd, whole_parameters

from lightning_rlbatch.data import BatchingOptions, SFTDataModule
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.testing import run_distributed

COUNTS, CONSTANTS = [1, 9, 2, 8], [1.0, 2.0, 3.0, 4.0]
LAYOUTS = [(1, "auto"), (2, "rlbatch_fsdp"), (2, "ddp"), (4, "rlbatch_fsdp")]
CUTS = [BatchingOptions(micro_batch_size=size) for size in (4, 2, 1)] + [BatchingOptions(max_tokens_per_rank=10)]
CASES = [  # aggregation, samples without response token, the loss worked out by hand
    ("token-mean", (), 57 / 20),
    ("token-mean", (1,), 39 / 11),
    ("seq-mean-token-mean", (), 10 / 4),
    ("seq-mean-token-mean", (1,), 8 / 3),
    ("seq-mean-token-sum", (), 57 / 4),
    ("token-sum", (1, 3), 7.0),
]


def four_samples(masked=()):
    rows = [constant_sample(count, constant) for count, constant in zip(COUNTS, CONSTANTS)]
    for index in masked:
        rows[index]["response_mask"] = [False] * (COUNTS[index] + 1)
    return PackedBatch.from_samples([{name: value for name, value in row.items() if name != "sample_id"} for row in rows])


def fit(module, data, world_size, strategy):
    recorder = StepRecorder()
    make_trainer(world_size, strategy, max_epochs=1, callbacks=[recorder]).fit(module, datamodule=data)
    return recorder


def run_layout(rank, world_size, strategy):
    """All that this file needs of a layout, in one group of ranks."""
    steps = [
        Step(options, {"loss_aggregation": aggregation}, samples=four_samples(masked))
        for aggregation, masked, _ in CASES
        for options in CUTS
    ]
    recorder = fit(ConstantLossModule(), HandMadeDataModule(four_samples(), steps), world_size, strategy)
    by_hand = [(float(gradients["model.weight"]), row) for gradients, row in zip(recorder.gradients, recorder.metrics, strict=True)]
    module = ConstantLossModule(optimizer=sgd)
    fit(module, HandMadeDataModule(four_samples(), [Step(BatchingOptions(micro_batch_size=1))]), world_size, strategy)
    rows = [constant_sample(count, constant) for count, constant in zip([*COUNTS, 5], [*CONSTANTS, 7.0])]
    short = fit(ConstantLossModule(), SFTDataModule(rows, mini_batch_size=4, max_tokens_per_rank=10), world_size, strategy)
    return {"by hand": by_hand, "weight": float(whole_parameters(module)["model.weight"]), "short": short.metrics}


@pytest.fixture(scope="module")
def every_rank():
    """What every rank of every layout did."""
    return [result for size, strategy in LAYOUTS for result in run_distributed(run_layout, size, strategy, init_process_group=False)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: f"{CASES[case][0]}-masked{CASES[case][1]}")
def test_loss_gradient_and_metric_are_the_mean_worked_out_by_hand(case, every_rank):
    _, masked, expected = CASES[case]
    tokens = sum(count for index, count in enumerate(COUNTS) if index not in masked)
    total = sum(count * CONSTANTS[index] for index, count in enumerate(COUNTS) if index not in masked)
    for results in every_rank:
        for gradient, metrics in results["by hand"][case * len(CUTS) : (case + 1) * len(CUTS)]:
            assert gradient == pytest.approx(expected, rel=1e-6)
            assert metrics["train/loss"] == pytest.approx(expected, rel=1e-6)
            assert metrics["train/grad_norm/policy"] == pytest.approx(expected, rel=1e-6)
            assert metrics["mine"] == pytest.approx(total / tokens, rel=1e-6)
            assert metrics["train/num_tokens"] == tokens
            assert metrics["train/num_sequences"] == 4 - len(masked)


def test_weights_after_an_sgd_step_are_those_of_one_process(every_rank):
    assert [results["weight"] for results in every_rank] == pytest.approx([1 - 2.85] * len(every_rank), rel=1e-6)


def test_short_last_mini_batch_is_divided_by_its_own_counts(every_rank):
    for results in every_rank:
        first, last = results["short"]
        assert (first["train/num_sequences"], last["train/num_sequences"]) == (4, 1)
        # The five samples are shuffled, so which one stands alone is the sampler's choice; its loss is its own constant.
        assert last["train/loss"] in [pytest.approx(constant, rel=1e-6) for constant in (1, 2, 3, 4, 7)]
        rest = (57 + 35 - last["train/loss"] * last["train/num_tokens"]) / (25 - last["train/num_tokens"])
        assert first["train/loss"] == pytest.approx(rest, rel=1e-6)


NUMBERS = (1, 3, 7, 206)


@pytest.fixture(scope="module")
def on_four_ranks():
    def fn(rank, world_size):
        outcome = {}
        for number in NUMBERS:
            rows = [constant_sample(1 + index % 5, float(index), index) for index in range(number)]
            for options in [{}, {"balance": False}, {"planner": "per_rank"}, {"equal_size": True}]:
                module = ConstantLossModule()
                data = SFTDataModule(rows, mini_batch_size=number, max_tokens_per_rank=16, **options)
                recorder = fit(module, data, world_size, "rlbatch_fsdp")
                outcome.setdefault(number, []).append((module.seen[0], module.num_micro_batches, recorder.metrics[0]))
        return outcome

    return run_distributed(fn, 4, init_process_group=False)


@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_of_samples_trains_each_exactly_once_on_four_ranks(number, on_four_ranks):
    tokens = sum(1 + index % 5 for index in range(number))
    expected = sum(index * (1 + index % 5) for index in range(number)) / tokens
    for ranks in zip(*(rank[number] for rank in on_four_ranks)):
        assert sorted(index for seen, _, _ in ranks for index in seen) == list(range(number))
        assert len({num_micro_batches for _, num_micro_batches, _ in ranks}) == 1
        for _, _, metrics in ranks:
            assert metrics["train/num_sequences"] == number
            assert metrics["train/num_tokens"] == tokens
            assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
