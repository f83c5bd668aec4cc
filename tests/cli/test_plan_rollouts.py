"""``rlbatch plan --from-rollouts``: what a run recorded is planned as the run planned it."""

import json

import pytest
import torch
from configs import config, write
from helpers import make_trainer, tiny_llama

from lightning_rlbatch.callbacks import RolloutLogger, RolloutRecorder
from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.rollout_lengths import read_iterations
from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.data.recording import RecordingHeader, folder_name, save_rollouts
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

NUMBERS = ("num_micro_steps", "efficiency", "fill")


class Letters:
    eos_token_id, pad_token_id = 1, 0

    def encode(self, text):
        return [2 + ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + int(token) - 2) for token in token_ids if 1 < int(token) < 28)


def some_verdicts(prompts, completion_ids):
    return [None if len(ids) % 5 == 0 else float(len(ids)) for ids in completion_ids]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two iterations of a real run: the folder of its recordings, and what it logged of the plan of every optimizer step."""
    folder = tmp_path_factory.mktemp("run")

    def fn(rank, world_size):
        callbacks = [RolloutRecorder(str(folder / "recorded")), RolloutLogger(str(folder / "logged"), max_rows=0)]
        trainer = make_trainer(1, max_epochs=2, callbacks=callbacks)
        prompts = [{"prompt": "abcdefghij"[: 1 + index % 7]} for index in range(9)]
        data = RolloutDataModule(
            prompts, Letters, train_batch_size=5, mini_batch_size=2, rollouts_per_prompt=3, ppo_epochs=2, max_tokens_per_rank=30,
            max_prompt_length=8, max_response_length=16, seed=4,
        )  # fmt: skip
        trainer.fit(PPOModule(tiny_llama, [some_verdicts]), datamodule=data)
        return [row for row in trainer.logger.rows if "balance/plan/efficiency" in row]

    return folder, run_distributed(fn, 1, init_process_group=False)[0]


def plan(capsys, *arguments):
    main(["plan", *map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


SETTINGS = ("--max-tokens-per-rank", 30, "--mini-batch-size", 2, "--ppo-epochs", 2)


def assert_as_logged(answer, rows):
    steps = [step for iteration in answer["iterations"] for step in iteration["mini_batches"]]
    assert len(steps) == len(rows) == 12
    for step, row in zip(steps, rows):
        logged = [row[f"balance/plan/{name}"] for name in NUMBERS]
        assert [step["micro_steps"], step["efficiency"], step["fill"]] == pytest.approx(logged, rel=1e-6)


def test_recorded_rollouts_are_planned_as_the_run_planned_them(recorded, capsys):
    folder, rows = recorded
    answer = plan(capsys, "--from-rollouts", folder / "recorded", *SETTINGS)
    assert_as_logged(answer, rows)
    assert [iteration["iteration"] for iteration in answer["iterations"]] == [0, 1]
    assert answer["num_samples"] == sum(iteration["num_samples"] for iteration in answer["iterations"])


def test_the_settings_of_a_runs_configuration_are_taken_and_the_command_line_wins(recorded, tmp_path, capsys):
    folder, rows = recorded
    sizes = {"train_batch_size": 5, "mini_batch_size": 2, "ppo_epochs": 2, "max_tokens_per_rank": 30}
    content = config(data=sizes)
    content["trainer"]["devices"] = 1
    arguments = ("--from-rollouts", folder / "recorded", "--config", write(tmp_path, content))
    assert_as_logged(plan(capsys, *arguments, "--data.seed=4"), rows)
    one = plan(capsys, *arguments, "--data.seed=4", "--dp", 2, "--iteration", 1)
    assert [iteration["iteration"] for iteration in one["iterations"]] == [1]
    assert one["methods"][2]["micro_steps"] < plan(capsys, *arguments, "--data.seed=4")["methods"][2]["micro_steps"]


def test_rollouts_logged_as_text_give_the_same_plan_with_the_tokenizer(recorded, capsys, tmp_path, monkeypatch):
    folder, rows = recorded
    (tmp_path / "my_tokenizers.py").write_text("from test_plan_rollouts import Letters\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ("--from-rollouts", folder / "logged", *SETTINGS, "--seed", 4)
    assert_as_logged(plan(capsys, *arguments, "--tokenizer", "my_tokenizers.Letters"), rows)
    with pytest.raises(SystemExit):
        plan(capsys, *arguments)
    assert "pass --tokenizer" in " ".join(capsys.readouterr().err.split())


def test_the_table_has_a_line_per_iteration_and_fits_eighty_columns(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", "--from-rollouts", str(recorded[0] / "recorded"), *map(str, SETTINGS)])
    out = capsys.readouterr().out
    assert "Iterations" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_a_part_collected_again_replaces_the_first_and_prompts_without_rollouts_keep_their_place(tmp_path, capsys):
    def save(part, lengths):
        rows = [
            {"input_ids": torch.zeros(length, dtype=torch.int64), "response_mask": torch.arange(length) > 0,
             "reward": torch.tensor(1.0), "sample_id": 2 * group + rollout, "group_id": group}
            for group, pair in lengths.items() for rollout, length in enumerate(pair)
        ]  # fmt: skip
        header = RecordingHeader(3, 0, 1, 4, tuple(lengths), 2, 7)
        folder = tmp_path / folder_name(3, part)
        folder.mkdir()
        save_rollouts(folder / header.name(), PackedBatch.from_samples(rows), header)

    save(0, {0: [2, 3], 1: [4, 5], 2: [6]})
    save(1, {1: [7, 8]})
    answer = plan(capsys, "--from-rollouts", tmp_path, "--max-tokens-per-rank", 30)
    (iteration,) = answer["iterations"]
    assert (iteration["iteration"], iteration["num_samples"], iteration["num_tokens"]) == (3, 5, 2 + 3 + 7 + 8 + 6)


def test_a_dump_that_counts_its_tokens_needs_no_tokenizer(tmp_path, capsys):
    scores = [1.0, None, *[0.5] * 6]
    rows = [
        {"prompt": "p", "num_prompt_tokens": 3, "num_response_tokens": n, "score": score, "step": n % 2, "uid": f"u{n // 4}"}
        for n, score in enumerate(scores, start=1)
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = plan(capsys, "--from-rollouts", tmp_path, "--max-tokens-per-rank", 30)
    assert [iteration["num_tokens"] for iteration in answer["iterations"]] == [7 + 9 + 11, 4 + 6 + 8 + 10]


def test_large_numbers_that_name_groups_are_not_taken_for_their_positions(tmp_path):
    row = {"num_prompt_tokens": 3, "num_response_tokens": 1, "reward": 1.0}
    rows = [{**row, "group_id": 2**53 + number // 2} for number in range(4)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (iteration,) = read_iterations(str(tmp_path))
    assert (iteration.groups, iteration.num_prompts) == ({0: [4, 4], 1: [4, 4]}, 2)


def test_dumps_are_read_as_replay_reads_them_files_in_natural_order_and_an_unfinished_line_left_out(tmp_path):
    messages = [{"role": "user", "content": "one\u2028two"}]
    row = json.dumps({"prompt": messages, "num_prompt_tokens": 3, "completion": "ab", "reward": 1.0}, ensure_ascii=False) + "\n"
    no_verdict = json.dumps({"prompt": messages, "reward": float("nan")}) + "\n"
    (tmp_path / "2.jsonl").write_text(row + row, encoding="utf-8")
    (tmp_path / "10.jsonl").write_text(no_verdict + row + row[:20], encoding="utf-8")
    with pytest.warns(UserWarning, match="breaks off"):
        found = read_iterations(str(tmp_path), Letters)
    assert [(iteration.number, iteration.groups) for iteration in found] == [(0, {0: [6, 6]}), (1, {0: [6]})]


def test_parquet_files_are_read_like_json_lines(tmp_path):
    rows = [{"prompt": "p", "num_prompt_tokens": 3, "num_response_tokens": n, "reward": 1.0, "iteration": n % 2, "group_id": n // 2,
             "sample_id": n} for n in range(1, 7)]  # fmt: skip
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fn(rank, world_size):  # in a process of its own: pyarrow starts threads
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        return read_iterations(str(tmp_path / "rows.parquet"))

    assert run_distributed(fn, 1, init_process_group=False) == [read_iterations(str(tmp_path / "lines.jsonl"))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens-per-rank", "30"], "exactly one"),
        (["lengths.txt", "--from-rollouts", "x"], "exactly one"),
        (["lengths.txt", "--ppo-epochs", "2"], "--ppo-epochs needs --from-rollouts"),
        (["--from-rollouts", "nowhere", "--max-tokens-per-rank", "30"], "nowhere has no rollouts"),
        (["--from-rollouts", "x", "--field", "n"], "Drop it with --from-rollouts"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_settings_that_make_the_same_micro_batches_appear_once_in_a_sweep(tmp_path, capsys):
    (tmp_path / "lengths").write_text("5 7 9 11 4 6")
    settings = plan(capsys, tmp_path / "lengths", "--dp", 2, "--max-tokens-per-rank", 40, "--sweep")["settings"]
    plans = [tuple(row[name] for name in ("sp", "micro_steps", "max_tokens", "step_workload")) for row in settings]
    assert len(set(plans)) == len(plans)
    assert min(row["max_tokens_per_rank"] for row in settings) <= 20
