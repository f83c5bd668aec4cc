import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import iteration, scale, startup, strategy, trainers, update, weight_sync
from benchmarks.gpu import draw_lengths
from benchmarks.workloads import FAMILIES, make_batch, make_workload
from examples.hanoi.model import build_policy
from lightning_rlbatch.testing import run_distributed

ROOT = Path(__file__).parents[2]


def run_script(*arguments):
    """Run a benchmark as a user would; Lightning's deprecation warnings would be errors in this process."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ)


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_of_a_family_are_the_same_at_every_call_and_within_the_cap(family):
    workload = make_workload(family, 32, 64, cap=200)
    assert workload == make_workload(family, 32, 64, cap=200) != make_workload(family, 32, 64, cap=200, seed=1)
    assert len(workload.lengths) == 32
    assert all(1 <= response <= 200 for response in workload.responses)


def test_lognormal_lengths_of_the_default_run_fill_a_third_of_their_padding():
    options = update.parser().parse_args([])
    assert 0.32 <= make_workload("lognormal", options.samples, 256, seed=options.seed, cap=options.cap).fill <= 0.39


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_lengths_keep_tokens_and_attention_within_rounding(family):
    workload = make_workload(family, 64, 64)
    equal = workload.equal_lengths()
    assert len(set(equal.lengths)) == 1
    assert equal.num_tokens == pytest.approx(workload.num_tokens, rel=0.03)
    squares = [sum(length**2 for length in made.lengths) for made in (workload, equal)]
    assert squares[1] == pytest.approx(squares[0], rel=0.05)
    assert sum(equal.responses) == pytest.approx(sum(workload.responses), rel=0.05)


def test_batch_marks_responses_and_gives_every_token_its_samples_advantage():
    workload = make_workload("hanoi", 4, 64)
    batch = make_batch(workload, old_log_probs=False)
    assert batch.seq_lens == workload.lengths
    assert [int(mask.sum()) for mask in batch.split_per_sample("response_mask")] == list(workload.responses)
    for advantages, own in zip(batch.split_per_sample("advantages"), batch["advantage"]):
        assert bool((advantages == own).all())


def test_rows_for_trl_hold_the_samples_with_prompts_left_and_completions_right():
    batch = make_batch(make_workload("lognormal", 6, 64, cap=30))
    for rank in range(2):
        rows = trainers._trl_rows(batch, rank, 2)
        own = batch.select(range(3 * rank, 3 * rank + 3))
        for row, (ids, old, mask) in enumerate(
            zip(own.split_per_sample("input_ids"), own.split_per_sample("old_log_probs"), own.split_per_sample("response_mask"))
        ):
            both = torch.cat([rows["prompt_ids"][row], rows["completion_ids"][row]])
            real = torch.cat([rows["prompt_mask"][row], rows["completion_mask"][row]]).bool()
            assert torch.equal(both[real], ids)
            assert torch.equal(rows["old_per_token_logps"][row][rows["completion_mask"][row].bool()], old[mask])
            assert bool(rows["prompt_mask"][row][-1])
            assert bool(rows["completion_mask"][row][0])
        assert int(rows["num_items_in_batch"]) == int(batch["response_mask"].sum())


@pytest.mark.parametrize("ranks", [1, 2])
def test_padded_and_packed_training_compute_the_same_loss_and_gradient_norm(ranks):
    job = trainers.Job(make_workload("hanoi", 4, 64), micro_batch_size=1, max_tokens_per_rank=100, repeats=1)
    found = {}
    for method in ("ours", "padded"):
        found[method] = [steps[-1] for steps in run_distributed(trainers.TRAINERS[method], ranks, job, init_process_group=False)]
    # a plain loop logs the share of its own rank
    assert sum(step.loss for step in found["padded"]) == pytest.approx(found["ours"][0].loss, rel=1e-5)
    assert found["padded"][0].grad_norm == pytest.approx(found["ours"][0].grad_norm, rel=1e-5)
    assert all(step.seconds > 0 for steps in found.values() for step in steps)


def test_update_prints_a_row_per_trainer_and_says_that_trl_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(update, "trl_missing", lambda: "TRL is left out: not here")
    update.main(["--family", "hanoi", "--vocabulary", "64", "--samples", "2", "--micro-batch-size", "1", "--max-tokens-per-rank", "100"])
    printed = capsys.readouterr()
    assert "TRL is left out" in printed.err
    rows = [line.split("|")[3].strip() for line in printed.out.splitlines() if line.startswith("| hanoi")]
    assert rows == ["ours", "padded", "ours, equal lengths"]


def test_iterations_are_followed_until_the_accuracy_or_the_limit_is_reached(tmp_path, monkeypatch):
    for name, value in (("PROMPTS", 2), ("ROLLOUTS", 2), ("STEPS", 1), ("MAX_TOKENS", 4)):
        monkeypatch.setattr(iteration, name, value)
    build_policy().save_pretrained(tmp_path)
    reached = iteration.measure("ours", iteration.Job(str(tmp_path), accuracy=0.0, limit=60.0, seed=0))
    assert reached.reached
    assert len(reached.accuracy) == iteration.WINDOW
    given_up = iteration.measure("ours", iteration.Job(str(tmp_path), accuracy=1.0, limit=0.0, seed=0))
    assert not given_up.reached
    assert len(given_up.seconds) == 1


def test_strategies_are_timed_on_two_ranks():
    for name in ("rlbatch_fsdp", "rlbatch_fsdp, RLBatchModule"):
        for seconds, calls in run_distributed(strategy.measure, 2, name, 3, init_process_group=False):
            assert seconds > 0
            assert calls > 100


def test_streams_of_weights_are_measured_on_two_ranks():
    for results in run_distributed(weight_sync.measure, 2, 64, 32, 1, 1):
        assert results.keys() == {"ours", "full_tensor"}
        assert all(seconds > 0 for _, seconds in results.values())


def test_growth_of_n_log_n_is_one_and_of_n_squared_is_about_two():
    sizes = [128, 1024, 8192]
    assert scale.growth(sizes, [1e-6 * n * math.log(n) for n in sizes]) == pytest.approx(1.0)
    assert 1.6 < scale.growth(sizes, [1e-9 * n**2 for n in sizes]) < 2.0


def test_scale_compares_planners_of_a_simulated_cluster(capsys):
    scale.main(["--ranks", "2", "4", "--samples-per-rank", "4", "--largest-two-layer", "2"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 2 |", "| 4 |"))]
    assert len(rows) == 2
    assert rows[1].rstrip(" |").endswith("-")


def test_start_up_takes_less_time_without_heavy_imports(capsys):
    startup.main(["--repeats", "1", "--command", "python (nothing)", "import lightning_rlbatch"])
    table = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    rows = {cells[1]: float(cells[3]) for cells in table if len(cells) > 4 and cells[1] in startup.COMMANDS}
    assert rows["import lightning_rlbatch"] < 0.5


@pytest.mark.parametrize(("total", "longest"), [(256, 64), (1000, 1000), (65536, 4096)])
def test_drawn_lengths_add_up(total, longest):
    lengths = draw_lengths(total, longest)
    assert sum(lengths) == total
    assert min(lengths) >= 2
    assert np.mean(lengths) < longest


def test_gpu_script_runs_all_parts_on_the_cpu_in_small():
    finished = run_script("benchmarks.gpu", "--small", "--device", "cpu")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for part in ("### attention", "### model", "### head", "### training", "Failed: nothing"):
        assert part in finished.stdout
