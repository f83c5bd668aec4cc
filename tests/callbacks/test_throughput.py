import csv
import math
import time

import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples
from helpers import RecordingLogger, length_reward, make_trainer, tiny_llama
from lightning.pytorch.loggers import CSVLogger

from lightning_rlbatch.callbacks import ThroughputMonitor
from lightning_rlbatch.callbacks.throughput_monitor import flops_coefficients, step_flops
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import plan_mini_batch
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

SHAPES = [(1, 30), (2, 28), (3, 25), (1, 3), (2, 2), (1, 1)]
TOKENS = sum(prompt + response for prompt, response in SHAPES)


class SlowData(HandMadeDataModule):
    """Takes its time between steps, as rollouts do."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.1)
            yield batch


def run(world_size, callback, *, remove_padding=True, num_steps=4, data=HandMadeDataModule):
    """Return the rows that rank zero of a forked run logged."""

    def fn(rank, world_size):
        options = BatchingOptions(max_tokens_per_rank=64, padded=not remove_padding)
        trainer = make_trainer(world_size, max_epochs=1, callbacks=[callback])
        module = PPOModule(lambda: tiny_llama(), [length_reward], remove_padding=remove_padding)
        trainer.fit(module, datamodule=data(make_samples(SHAPES), [Step(options)] * num_steps))
        return [row for row in trainer.logger.rows if "time/update" in row]

    return run_distributed(fn, world_size, init_process_group=False)[0]


def test_tokens_per_second_are_real_tokens_of_all_ranks_over_the_time_of_the_update():
    rows = run(2, ThroughputMonitor())
    assert len(rows) == 4
    for row in rows:
        assert row["throughput/update/tokens_per_second"] * row["time/update"] == pytest.approx(TOKENS, rel=1e-4)
        assert row["throughput/update/padding_share"] == pytest.approx(0)
        assert 0 <= row["time/waiting_estimate"] < row["time/update"]
        assert 0.01 < row["memory/peak_gib"] < 100


def test_padding_that_is_computed_counts_as_computed_but_not_as_tokens():
    row = run(1, ThroughputMonitor(), remove_padding=False)[-1]
    plan = plan_mini_batch([p + r for p, r in SHAPES], dp_size=1, max_tokens_per_rank=64, padded=True)
    computed = sum(plan.padded_num_tokens(0, step) for step in range(plan.num_micro_steps))
    assert computed > TOKENS
    assert row["throughput/update/computed_tokens_per_second"] * row["time/update"] == pytest.approx(computed, rel=1e-4)
    assert row["throughput/update/padding_share"] == pytest.approx(1 - TOKENS / computed)


def test_time_between_updates_is_told_from_the_update_and_slows_the_whole_but_not_the_update():
    row = run(1, ThroughputMonitor(window_size=2), data=SlowData)[-1]
    assert not any("utilization" in name for name in row)  # the peak of a CPU is not known
    assert row["time/between_updates"] >= 0.1
    whole = TOKENS / (row["time/between_updates"] + row["time/update"])
    assert row["throughput/tokens_per_second"] == pytest.approx(whole, rel=1e-3)
    assert row["throughput/update/tokens_per_second"] > row["throughput/tokens_per_second"]


def test_utilisation_is_model_flops_over_the_peak_of_all_devices():
    row = run(1, ThroughputMonitor(available_flops=1e9, window_size=2))[-1]
    plan = plan_mini_batch([p + r for p, r in SHAPES], dp_size=1, max_tokens_per_rank=64)
    flops = step_flops(plan, *flops_coefficients(tiny_llama()))
    assert row["throughput/update/model_flops_utilization"] == pytest.approx(flops / row["time/update"] / 1e9, rel=1e-3)
    assert 0 < row["throughput/model_flops_utilization"] < row["throughput/update/model_flops_utilization"]


def test_flops_of_a_step_agree_with_torchs_own_counter():
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_llama()
    model.set_attn_implementation("eager")  # torch does not count the fused kernel of the CPU
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    plan = plan_mini_batch([64], dp_size=1, max_tokens_per_rank=64)
    parameters, attention = flops_coefficients(model)
    # torch counts the masked half of attention too, and no norms or embeddings
    expected = step_flops(plan, parameters, 2 * attention)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)


def test_a_tied_embedding_is_counted_once_as_the_head():
    tied, untied = flops_coefficients(tiny_llama(tied=True))[0], flops_coefficients(tiny_llama())[0]
    assert tied == untied


class SlowRank(PPOModule):
    """Rank 1 takes longer for every micro-batch."""

    def policy_step(self, micro_batch, denominators):
        time.sleep(SLEEP * self.meshes.rank)
        return super().policy_step(micro_batch, denominators)


SLEEP = 0.3


def test_waiting_is_measured_per_rank_and_micro_step_and_changes_no_number(tmp_path):
    def fit(strategy, every, folder):
        callback = ThroughputMonitor(waiting_every_n_steps=every)
        trainer = make_trainer(2, strategy, max_epochs=1, callbacks=[callback], logger=[RecordingLogger(), CSVLogger(folder, "", "")])
        data = HandMadeDataModule(make_samples(SHAPES), [Step(BatchingOptions(max_tokens_per_rank=32))] * 3)
        trainer.fit(SlowRank(lambda: tiny_llama(), [length_reward]), datamodule=data)
        return [row for row in trainer.loggers[0].rows if "time/update" in row]

    def fn(rank, world_size):
        return [fit("rlbatch_fsdp", 2, tmp_path / "fsdp"), fit("rlbatch_fsdp", None, tmp_path / "none"), fit("ddp", 1, tmp_path / "ddp")]

    fsdp, plain, ddp = run_distributed(fn, 2, init_process_group=False)[0]
    plan = plan_mini_batch([p + r for p, r in SHAPES], dp_size=2, max_tokens_per_rank=32)
    slept = SLEEP * plan.num_micro_steps
    assert plan.num_micro_steps > 1
    assert [row["train/loss"] for row in fsdp] == [row["train/loss"] for row in plain]
    assert [math.isfinite(row.get("time/waiting", math.nan)) for row in fsdp] == [False, True, False]
    assert [math.isfinite(row.get("time/waiting", math.nan)) for row in ddp] == [False, True, True]  # the first step warms up
    assert not any("time/waiting" in row for row in plain)
    assert not (tmp_path / "none" / "waiting.csv").exists()
    for row in (fsdp[1], *ddp[1:]):
        assert row["time/waiting_most"] > 0.8 * slept
        assert row["time/waiting_least"] < row["time/waiting_most"]
        assert row["time/waiting"] == pytest.approx((row["time/waiting_most"] + row["time/waiting_least"]) / 2)
    with (tmp_path / "fsdp" / "waiting.csv").open() as stream:
        cells = [row for row in csv.DictReader(stream) if row["step"] == "1"]
    places = [(int(row["rank"]), int(row["micro_step"])) for row in cells]
    assert places == [(rank, step) for rank in range(2) for step in range(plan.num_micro_steps)]
    quick, slow = ([float(row["seconds"]) for row in cells if row["rank"] == rank] for rank in "01")
    assert all(waited > 0.8 * SLEEP and waited > other for waited, other in zip(quick, slow))


def test_measuring_every_zeroth_step_is_refused():
    with pytest.raises(ValueError, match="waiting_every_n_steps to be at least 1 but got 0"):
        ThroughputMonitor(waiting_every_n_steps=0)


def test_a_window_of_one_step_is_refused():
    with pytest.raises(ValueError, match="window_size to be at least 2 but got 1"):
        ThroughputMonitor(window_size=1)
