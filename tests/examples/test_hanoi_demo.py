"""The main job, shortened: the same command as ``make demo``, as a real process that starts two ranks twice."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from test_metric_names import undocumented

REPOSITORY = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def test_the_demo_runs_both_phases_on_two_ranks_and_leaves_what_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")  # outputs go to the current folder
    command = [sys.executable, "-m", "examples.hanoi", "--sft-steps=4", "--iterations=2", "--samples=1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Held-out sampled accuracy:" in done.stdout
    outputs = tmp_path / "outputs" / "hanoi"
    assert (outputs / "reward_curve.png").read_bytes().startswith(PNG)
    assert (outputs / "grpo" / "plans" / "step_000000.png").read_bytes().startswith(PNG)
    assert (outputs / "grpo" / "policy" / "model.safetensors").is_file()
    assert (outputs / "grpo" / "checkpoints" / "last.ckpt").exists()
    with (outputs / "grpo" / "metrics.csv").open() as file:
        table = csv.DictReader(file)
        rows = [row for row in table if row["train/loss"]]
    assert undocumented(set(table.fieldnames or ()) - {"epoch", "step"}) == []
    assert [int(row["step"]) for row in rows] == list(range(8)), "two iterations of four optimizer steps"
    assert abs(float(rows[0]["train/ratio"]) - 1) < 1e-5, "the first update is on-policy"
