from pathlib import Path

import pytest

from examples.hanoi.plots import read_curve, reward_curve

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
