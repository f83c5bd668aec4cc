import random
from pathlib import Path

import pytest

from examples.hanoi.plots import batch_plan_picture, read_curve, reward_curve
from lightning_rlbatch.functional import plan_mini_batch

PNG = b"\x89PNG\r\n\x1a\n"


def write_log(path: Path) -> Path:
    """A log as CSVLogger writes it: validation rows and training rows leave each other's columns empty."""
    rows = ["epoch,step,reward/hanoi_reward,length/mean,length/p95,train/entropy,val/reward/hanoi_reward"]
    for epoch in range(4):
        rows += [f"{epoch},{4 * epoch},{0.4 + 0.1 * epoch},20,63,0.3,", f"{epoch},{4 * epoch + 1},,,,0.1,"]
        rows += [f"{epoch},{4 * epoch + 3},,,,,{0.5 + 0.1 * epoch}"] if epoch % 2 else []
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_curve_averages_rows_of_the_same_iteration_and_skips_empty_cells(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.csv")
    assert read_curve(log, "train/entropy") == ([0, 1, 2, 3], [pytest.approx(0.2)] * 4)
    assert read_curve(log, "val/reward/hanoi_reward") == ([1, 3], [pytest.approx(0.6), pytest.approx(0.8)])
    with pytest.raises(ValueError, match="has no column 'rewards'"):
        read_curve(log, "rewards")


@pytest.mark.parametrize("initial_accuracy", [None, 0.3])
def test_the_reward_curve_is_drawn(tmp_path: Path, initial_accuracy: float | None) -> None:
    reward_curve(write_log(tmp_path / "metrics.csv"), tmp_path / "curve.png", initial_accuracy=initial_accuracy)
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_the_reward_curve_does_without_validation(tmp_path: Path) -> None:
    reward_curve(write_log(tmp_path / "metrics.csv"), tmp_path / "curve.png", accuracy="val/absent")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("options", [{"max_tokens_per_rank": 512}, {"micro_batch_size": 5}, {"max_tokens_per_rank": 128, "sp_size": 2}])
def test_a_plan_is_drawn_beside_the_given_order(tmp_path: Path, options: dict[str, int]) -> None:
    lengths = [random.Random(index).choice([10, 14, 22, 38, 70]) for index in range(33)]
    plan = plan_mini_batch(lengths, dp_size=2, **options)  # type: ignore[arg-type]  # a dict of keyword arguments
    batch_plan_picture(plan, lengths, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


def test_a_plan_with_fillers_is_drawn(tmp_path: Path) -> None:
    plan = plan_mini_batch([60], dp_size=4, max_tokens_per_rank=64)
    assert plan.num_fillers == 3
    batch_plan_picture(plan, [60], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
