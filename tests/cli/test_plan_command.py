import json
import random

import pytest
from configs import config, write

from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.lengths import read_lengths
from lightning_rlbatch.cli.plan_numbers import chosen
from lightning_rlbatch.functional import plan_mini_batch


def skewed(count=128, seed=0):
    source = random.Random(seed)
    return [min(4000, int(source.lognormvariate(6, 1)) + 2) for _ in range(count)]


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"length": length}) + "\n" for length in skewed()))
    return str(path)


def run(capsys, *arguments):
    main(["plan", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "5\n7\n9\n",
        "5 7, 9",
        "[5, 7, 9]",
        "[\n  5,\n  7,\n  9\n]\n",
        "[5, 7]\n[9]\n",
        "\ufeff5\n7\n9\n",  # a byte order mark
        '{"length": 5}\n{"length": 7}\n\n{"length": 9}\n',
        '{"num_prompt_tokens": 2, "num_response_tokens": 3}\n{"num_tokens": 7}\n{"input_ids": [1, 1, 1, 1, 1, 1, 1, 1, 1]}\n',
    ],
)
def test_lengths_are_read_from_numbers_objects_and_token_lists(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(str(tmp_path / "lengths")) == [5, 7, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"size": 3}\n', "line 1 .* none of the fields length"), ("5\nmany\n", "line 2 .* 'many'"), ("0\n", "at least 1"), ("", "no lengths"),
     ("{5\n", "line 1 .* not JSON"), ("2.5", "'2.5'"), ("[1, Infinity]", "item 2 .* inf"),
     ('{"num_prompt_tokens": null, "num_response_tokens": 3}', "none of the fields")],
)  # fmt: skip
def test_a_line_without_a_length_is_an_error_that_names_it(tmp_path, text, message):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lengths(str(tmp_path / "lengths"))


def test_a_named_field_is_read_instead_of_a_known_one(tmp_path):
    (tmp_path / "lengths").write_text('{"length": 5, "size": 3}\n')
    assert read_lengths(str(tmp_path / "lengths"), "size") == [3]


def test_the_plan_is_the_planners_own_and_is_compared_with_both_others(lengths_file, capsys):
    answer = json.loads(run(capsys, lengths_file, "--dp", "4", "--sp", "2", "--max-tokens-per-rank", "4096", "--json"))
    before, baseline, ours = answer["methods"]
    plan = plan_mini_batch(skewed(), dp_size=4, sp_size=2, max_tokens_per_rank=4096)
    assert ours["efficiency"] == pytest.approx(plan.efficiency())
    assert ours["micro_steps"] == plan.num_micro_steps
    assert ours["max_tokens"] <= 2 * 4096
    assert before["step_workload"] > ours["step_workload"]
    assert baseline["step_workload"] >= ours["step_workload"]
    assert before["method"].startswith("before")


def test_the_table_names_the_methods_and_the_picture_is_written(lengths_file, tmp_path, capsys):
    picture = tmp_path / "plan.png"
    out = run(capsys, lengths_file, "--dp", "4", "--max-tokens-per-rank", "4096", "--mini-batch-size", "64", "--picture", str(picture))
    assert all(name in out for name in ("before (contiguous)", "two-layer (per_rank)", "ours (global)"))
    assert "2 mini-batches" in " ".join(out.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "plan.html"
    run(capsys, lengths_file, "--dp", "4", "--max-tokens-per-rank", "4096", "--picture", str(page))
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert page.read_text(encoding="utf-8").count("<svg ") == 1


def test_the_sweep_keeps_the_number_of_gpus_and_puts_the_cheapest_first(lengths_file, capsys):
    answer = json.loads(run(capsys, lengths_file, "--dp", "4", "--sp", "2", "--max-tokens-per-rank", "4096", "--sweep", "--json"))
    settings = answer["settings"]
    assert {row["dp"] * row["sp"] for row in settings} == {8}
    times = [round(row["time"], 3) for row in settings]
    assert times == sorted(times)
    assert times[0] == 1.0
    assert {row["sp"] for row in settings} == {1, 2, 4, 8}
    assert all(row["max_tokens"] <= row["sp"] * row["max_tokens_per_rank"] for row in settings)
    (choice,) = [row for row in settings if row["choice"]]
    near = [row for row in settings if row["time"] <= 1.02]
    assert choice in near
    assert choice["max_tokens_per_rank"] == min(row["max_tokens_per_rank"] for row in near)


def test_half_the_memory_is_worth_two_per_cent_of_the_time_and_the_sweep_says_both(lengths_file, capsys):
    rows = [{"time": 1.0, "max_tokens_per_rank": 32768.0, "sp": 1.0}, {"time": 1.015, "max_tokens_per_rank": 16384.0, "sp": 1.0},
            {"time": 1.03, "max_tokens_per_rank": 8192.0, "sp": 1.0}]  # fmt: skip
    assert chosen(rows) is rows[1]
    out = " ".join(run(capsys, lengths_file, "--dp", "4", "--sp", "2", "--max-tokens-per-rank", "4096", "--sweep").split())
    assert "* Take max_tokens_per_rank=" in out
    assert "tokens on a GPU" in out


def test_a_file_of_lengths_is_cut_into_the_samples_of_the_runs_mini_batches(lengths_file, tmp_path, capsys):
    path = write(tmp_path, config(data={"max_tokens_per_rank": 9000}))
    shown = " ".join(run(capsys, lengths_file, "--config", path).split())
    assert "4 mini-batches" in shown  # 128 samples: 4 prompts x 8 rollouts each
    assert "2 mini-batches" in " ".join(run(capsys, lengths_file, "--config", path, "--mini-batch-size", "64").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens-per-rank", "100"], "may hold 100"),
        ([], "Exactly one"),
        (["--max-tokens-per-rank", "9000", "--micro-batch-size", "2"], "Exactly one"),
        (["--micro-batch-size", "2", "--sweep"], "pass --max-tokens-per-rank"),
        (["--max-tokens-per-rank", "9000", "--mini-batch-size", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_planned_exits_with_1_and_says_why(lengths_file, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", lengths_file, *arguments])
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_oversize_samples_are_planned_alone_when_isolated(lengths_file, capsys):
    out = run(capsys, lengths_file, "--max-tokens-per-rank", "1000", "--oversize", "isolate", "--json")
    assert json.loads(out)["methods"][2]["max_tokens"] == max(skewed())
