import pytest
from hand_made import HandMadeDataModule, Step, make_samples
from helpers import length_reward, make_trainer, tiny_llama

from lightning_rlbatch.callbacks import BalanceMonitor
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import plan_mini_batch
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

SHAPES = [(1, 30), (2, 28), (3, 25), (1, 3), (2, 2), (1, 1)]  # contiguous halves are far from balanced
LENGTHS = [prompt + response for prompt, response in SHAPES]


def run(world_size, callback, num_steps=3, budget=64):
    """Return the rows that rank zero of a forked run logged."""

    def fn(rank, world_size):
        options = BatchingOptions(max_tokens_per_rank=budget)
        trainer = make_trainer(world_size, max_epochs=1, callbacks=[callback])
        module = PPOModule(lambda: tiny_llama(), [length_reward])
        trainer.fit(module, datamodule=HandMadeDataModule(make_samples(SHAPES), [Step(options)] * num_steps))
        return trainer.logger.rows

    return run_distributed(fn, world_size, init_process_group=False)[0]


def test_pictures_appear_every_n_steps_and_the_gain_over_contiguous_blocks_is_logged_at_every_step(tmp_path):
    rows = run(2, BalanceMonitor(str(tmp_path / "plans"), every_n_steps=2))
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == ["step_000000.png", "step_000002.png"]
    before = plan_mini_batch(LENGTHS, dp_size=2, max_tokens_per_rank=64, balance=False)
    after = plan_mini_batch(LENGTHS, dp_size=2, max_tokens_per_rank=64)
    logged = [row for row in rows if "balance/speedup" in row]
    assert len(logged) == 3
    for row in logged:
        assert row["balance/before/efficiency"] == pytest.approx(before.efficiency())
        assert row["balance/speedup"] == pytest.approx(before.step_workload() / after.step_workload())
        assert row["balance/speedup"] > 1.2


def test_missing_matplotlib_stops_the_run_before_it_trains_and_only_where_pictures_are_asked_for(monkeypatch):
    def missing():
        raise ModuleNotFoundError("Pictures are drawn with matplotlib, which is not installed.")

    monkeypatch.setattr("lightning_rlbatch.callbacks.balance_monitor.require_matplotlib", missing)
    assert run(1, BalanceMonitor(), num_steps=1)
    with pytest.raises(AssertionError, match="ModuleNotFoundError: Pictures are drawn with matplotlib"):  # the ranks' own error
        run(1, BalanceMonitor("anywhere"))


def test_every_n_steps_below_1_is_refused():
    with pytest.raises(ValueError, match="every_n_steps to be at least 1 but got 0"):
        BalanceMonitor(every_n_steps=0)
