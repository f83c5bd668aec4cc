import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CharacterCodes
from lightning.pytorch.loggers import WandbLogger

from lightning_rlbatch.callbacks import rollout_logger
from lightning_rlbatch.callbacks.logger_outputs import markdown_table
from lightning_rlbatch.callbacks.rollout_hooks import Rollouts
from lightning_rlbatch.callbacks.rollout_logger import RolloutLogger, rollout_histograms, rollout_quantiles
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.dumps import RolloutDump
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.store import RolloutStore, RolloutTable, gather_table
from lightning_rlbatch.distributed.mesh import build_meshes, data_parallel_meshes, single_process_meshes
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.rollout.dispatch import contiguous_share
from lightning_rlbatch.testing import run_distributed

PROMPTS = ["ab", "[bold]c"]
COMPLETIONS = [["x", "xyx"], ["[red]y", "z" * 40]]
REWARDS = [[1.0, 0.0], [float("nan"), 0.25]]


def make_rollouts(meshes, iteration=3, extra_of=()):
    letters = CharacterCodes()
    rows = []
    for index in contiguous_share(4, meshes.world_size, meshes.rank):
        prompt, completion = letters.encode(PROMPTS[index // 2]), [*letters.encode(COMPLETIONS[index // 2][index % 2]), 1]
        mask = torch.tensor([False] * len(prompt) + [True] * len(completion))
        rows.append(
            {
                "input_ids": torch.tensor([*prompt, *completion]),
                "response_mask": mask,
                "advantages": torch.where(mask, index - 1.5, torch.nan),
                "reward": torch.tensor(REWARDS[index // 2][index % 2], dtype=torch.float64),
                "truncated": torch.tensor(False),
                "sample_id": torch.tensor(index),
            }
        )
    samples = PackedBatch.from_samples(rows)
    table = gather_table(samples, torch.tensor([5, 5, 2, 2]), 2, meshes)
    store = RolloutStore(samples, table, [table.ids_of_prompts([0, 1])], BatchingOptions(max_tokens_per_rank=64), meshes)
    store.extra = {index: {"found": f"<{index}>"} for index in contiguous_share(4, meshes.world_size, meshes.rank) if index in extra_of}
    prompts = PromptBatch(PROMPTS, [letters.encode(text) for text in PROMPTS], [{}, {}], [5, 2], 2, 50, letters, 0)
    return Rollouts(store, prompts, iteration)


class Numbers:
    """A logger that takes numbers only."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step):
        self.logged.append((step, metrics))


class Tables(Numbers):
    """A logger that takes tables too."""

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.table = (key, columns, data, step)


class Texts(Numbers):
    """A logger that takes texts in columns."""

    def log_text(self, key, columns=None, data=None, dataframe=None, step=None):
        self.table = (key, columns, data, step)


class SummaryWriterStandIn:
    """What TensorBoard's writer is asked to do, with the arguments that it has."""

    def __init__(self):
        self.texts, self.histograms = {}, {}

    def add_text(self, tag, text_string, global_step=None, walltime=None):
        self.texts[tag, global_step] = text_string

    def add_histogram(self, tag, values, global_step=None, bins="tensorflow", walltime=None, max_bins=None):
        self.histograms[tag, global_step] = np.histogram(values, bins=3)[0].tolist()


class TensorBoardStandIn(Numbers):
    def __init__(self):
        super().__init__()
        self.experiment = SummaryWriterStandIn()


class WandbStandIn(WandbLogger):
    """Lightning's own logger, its run replaced by a list."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def wandb_stand_in():
    module = ModuleType("wandb")
    module.Table = lambda columns, data, dataframe: ("table", columns, data)
    module.Histogram = lambda sequence: ("histogram", sequence)
    return module


def trainer_of(meshes, *loggers):
    return SimpleNamespace(
        strategy=None, world_size=meshes.world_size, is_global_zero=meshes.rank == 0, loggers=list(loggers), global_step=12
    )


def log(*loggers, meshes=None, iteration=3, extra_of=(), **options):
    meshes = meshes or single_process_meshes()
    rollouts = make_rollouts(meshes, iteration, extra_of)
    RolloutLogger(**options).on_rollout_end(trainer_of(meshes, *loggers), None, rollouts)


def test_the_table_shows_texts_as_they_are_with_rewards_and_advantages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    log(max_rows=2, max_text_length=10)
    printed = capsys.readouterr().out
    assert "Rollouts of iteration 3" in printed
    assert all(text in printed for text in ("ab", "xyx", "1.000", "-1.500", "-0.500"))
    assert "[bold]c" not in printed  # two rows are both of the first prompt
    log(max_rows=9, max_text_length=10)
    printed = capsys.readouterr().out
    assert "[bold]c" in printed
    assert "z" * 10 + "..." in printed
    assert "z" * 11 not in printed
    assert "[red]y" not in printed  # no reward, so nothing is trained on it
    assert "length: 2..6: 2, 7..11: 1, 37..41: 1\n" in printed  # whole tokens
    assert "reward: 0..0.125: 1, " in printed


def test_no_rows_print_nothing(capsys):
    log(max_rows=0)
    assert capsys.readouterr().out == ""


def test_other_iterations_than_every_nth_are_passed_over(tmp_path, capsys):
    logger = Numbers()
    for iteration in range(4):
        log(logger, iteration=iteration, every_n_iterations=3, dirpath=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_000000", "iteration_000003"]
    assert len(logger.logged) == 2
    capsys.readouterr()


@pytest.mark.parametrize("world_size", [1, 2])
def test_json_lines_hold_every_rewarded_rollout_of_all_ranks(tmp_path, world_size):
    run_distributed(lambda rank, world: log(meshes=data_parallel_meshes(), dirpath=str(tmp_path), max_rows=0), world_size)
    files = sorted((tmp_path / "iteration_000003").glob("*.jsonl"))
    assert [file.name for file in files] == [f"rank_0000{rank}.jsonl" for rank in range(world_size)]
    rows = sorted((json.loads(line) for file in files for line in file.read_text().splitlines()), key=lambda row: row["sample_id"])
    assert [(row["prompt"], row["completion"]) for row in rows] == [(PROMPTS[1], COMPLETIONS[1][1]), ("ab", "x"), ("ab", "xyx")]
    assert [row["reward"] for row in rows] == [0.25, 1.0, 0.0]
    assert [row["advantage"] for row in rows] == [1.5, -1.5, -0.5]
    assert [row["num_response_tokens"] for row in rows] == [41, 2, 4]
    assert [(row["group_id"], row["sample_id"], row["iteration"]) for row in rows] == [(2, 5, 3), (5, 10, 3), (5, 11, 3)]


def test_the_json_lines_can_be_replayed(tmp_path):
    log(dirpath=str(tmp_path), max_rows=0)
    dump = RolloutDump(tmp_path, CharacterCodes())
    assert (dump.iterations, dump.num_prompts, dump.rollouts_per_prompt(3)) == ([3], 2, 2)
    assert sorted(dump.read(3, 0, 1)["reward"].tolist()) == [0.0, 0.25, 1.0]


def test_sequence_parallel_peers_write_their_rollouts_once(tmp_path):
    def write(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=2)
        rollout_logger.meshes_of = lambda trainer: meshes  # in this forked process only: there is no strategy to ask
        log(meshes=meshes, dirpath=str(tmp_path), max_rows=0)

    run_distributed(write, 2)
    assert sorted(path.name for path in (tmp_path / "iteration_000003").iterdir()) == ["histograms.json", "rank_00000.jsonl"]


def test_histograms_count_the_rollouts_of_all_ranks(tmp_path):
    run_distributed(lambda rank, world: log(meshes=data_parallel_meshes(), dirpath=str(tmp_path), max_rows=0, num_bins=3), 2)
    histograms = json.loads((tmp_path / "iteration_000003" / "histograms.json").read_text())
    # Responses of 2, 4, 7 and 41 tokens, end token included; rewards 0, 0.25 and 1.
    assert histograms["length"] == {"edges": [2.0, 15.0, 28.0, 41.0], "counts": [3, 0, 1]}
    assert histograms["reward"]["counts"] == [2, 0, 1]
    assert histograms["reward"]["edges"] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_parquet_files_hold_what_json_lines_hold_with_the_same_types_on_every_rank(tmp_path):
    def write_and_read(rank, world_size):  # in processes of their own: a parent with Arrow's threads should not fork ranks
        import pyarrow.parquet

        for file_format in ("jsonl", "parquet"):
            log(meshes=data_parallel_meshes(), dirpath=str(tmp_path / file_format), file_format=file_format, max_rows=0)
        torch.distributed.barrier()
        tables = [pyarrow.parquet.read_table(file) for file in sorted((tmp_path / "parquet" / "iteration_000003").glob("*.parquet"))]
        rewards = sorted(RolloutDump(tmp_path / "parquet", CharacterCodes()).read(3, 0, 1)["reward"].tolist())
        for file_format in ("jsonl", "parquet"):  # what was logged of a rollout is where the rollout is trained on
            options = {"file_format": file_format, "max_rows": 0, "extra_of": (1, 3)}
            log(meshes=data_parallel_meshes(), dirpath=str(tmp_path / "extra"), **options)
        torch.distributed.barrier()
        files = sorted((tmp_path / "extra" / "iteration_000003").glob("*.parquet"))
        extra = {row["sample_id"]: row["extra"] for file in files for row in pyarrow.parquet.read_table(file).to_pylist()}
        return [table.to_pylist() for table in tables], {str(table.schema) for table in tables}, rewards, extra

    parts, schemas, rewards, extra = run_distributed(write_and_read, 2)[0]
    lines = [file.read_text().splitlines() for file in sorted((tmp_path / "jsonl" / "iteration_000003").glob("*.jsonl"))]
    assert parts == [[json.loads(line) for line in part] for part in lines]
    assert len(parts) == 2
    assert len(schemas) == 1
    assert rewards == [0.0, 0.25, 1.0]
    assert extra == {10: "{}", 11: '{"found": "<1>"}', 5: '{"found": "<3>"}'}
    rows = [json.loads(line) for file in (tmp_path / "extra").rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert {row["sample_id"]: row["extra"] for row in rows} == {10: {}, 11: {"found": "<1>"}, 5: {"found": "<3>"}}
    assert sorted(path.name for path in (tmp_path / "parquet" / "iteration_000003").iterdir())[0] == "histograms.json"


def test_parquet_without_pyarrow_is_refused_where_the_callback_is_made(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"file_format='parquet' needs pyarrow: pip install 'lightning-rlbatch\[parquet\]'"):
        RolloutLogger("folder", file_format="parquet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dirpath": "x", "file_format": "csv"}, "Expected file_format to be 'jsonl' or 'parquet' but got 'csv'"),
        ({"file_format": "parquet"}, "file_format='parquet' has no effect without dirpath"),
    ],
)
def test_formats_that_are_unknown_or_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutLogger(**options)


def test_texts_that_have_no_utf8_are_written_all_the_same(tmp_path):
    rollout_logger.write_text(tmp_path / "folder" / "x.txt", "a\ud800b\n")
    assert (tmp_path / "folder" / "x.txt").read_text(encoding="utf-8") == "a?b\n"


def test_tensorboard_gets_the_table_as_text_and_histograms_of_all_rollouts(capsys):
    logger = TensorBoardStandIn()
    log(logger, max_rows=9)
    writer = logger.experiment
    assert writer.histograms == {("rollouts/length", 12): [3, 0, 1], ("rollouts/reward", 12): [2, 0, 1]}
    lines = writer.texts["rollouts", 12].splitlines()
    assert lines[0] == "| prompt | completion | reward | advantage | num_response_tokens |"
    assert len(lines) == 2 + 3
    assert "| ab | x | 1 | -1.5 | 2 |" in lines
    assert "extra" not in capsys.readouterr().out
    log(logger, max_rows=9, extra_of=(0,))
    assert logger.experiment.texts["rollouts", 12].splitlines()[0].endswith("num_response_tokens | extra |")
    printed = capsys.readouterr().out
    assert "extra" in printed
    assert "<0>" in printed


def test_markdown_shows_texts_to_the_letter():
    table = markdown_table(["text", "reward"], [["a|*b*\n<think>_1. x", None], ["naïve café", 0.123456]])
    cells = table.splitlines()[2:]
    assert cells[0] == "| a&#124;&#42;b&#42;<br>&#60;think&#62;&#95;1&#46; x | - |"
    assert cells[1] == "| naïve café | 0.1235 |"


def test_weights_and_biases_gets_the_table_and_histograms_with_the_step(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", wandb_stand_in())
    logger = WandbStandIn()
    log(logger, max_rows=1)
    assert [step for step, _ in logger.logged] == [12] * 4
    logged = {key: value for _, metrics in logger.logged for key, value in metrics.items()}
    assert logged["rollouts"][2] == [["ab", "x", 1.0, -1.5, 2]]
    assert logged["rollouts/length"] == ("histogram", [2.0, 4.0, 7.0, 41.0])
    assert logged["rollouts/reward"] == ("histogram", [1.0, 0.0, 0.25])
    capsys.readouterr()


@pytest.mark.parametrize("kind", [Tables, Texts])
def test_loggers_get_quantiles_and_those_with_tables_the_table(capsys, kind):
    numbers, tables = Numbers(), kind()
    log(numbers, tables, max_rows=2)
    ((step, metrics),) = numbers.logged
    assert step == 12
    assert metrics["rollouts/length_min"] == 2
    assert metrics["rollouts/length_p50"] == 5.5
    assert metrics["rollouts/length_max"] == 41
    assert metrics["rollouts/reward_p50"] == 0.25
    assert tables.logged == numbers.logged
    key, columns, data, step = tables.table
    assert (key, columns[0], len(data), data[0][:4], step) == ("rollouts", "prompt", 2, ["ab", "x", 1.0, -1.5], 12)
    capsys.readouterr()


def test_an_iteration_without_any_reward_has_no_reward_numbers():
    table = RolloutTable([4, 5], [2, 3], torch.full((2,), torch.nan, dtype=torch.float64), torch.zeros(2) > 0, torch.tensor([0, 0]), 2)
    assert rollout_histograms(table, 4)["reward"] == {"edges": [], "counts": []}
    table.rewards.fill_(0.5)
    assert rollout_histograms(table, 4)["reward"] == {"edges": [0.5, 0.5], "counts": [2]}
    table.rewards.fill_(torch.nan)
    assert {name for name in rollout_quantiles(table) if "reward" in name} == set()


def test_a_disk_that_fails_on_one_rank_ends_all_ranks(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def write(rank, world_size):
        meshes = data_parallel_meshes()
        log(meshes=meshes, max_rows=0, dirpath=str(tmp_path / "file" if rank == 1 else tmp_path / "fine"))

    with pytest.raises(AssertionError, match="Rank 1 failed in phase 'logging rollouts': NotADirectoryError"):
        run_distributed(write, 2)


@pytest.mark.parametrize(("name", "value"), [("every_n_iterations", 0), ("max_rows", -1), ("max_text_length", 0), ("num_bins", 0)])
def test_numbers_out_of_range_are_errors_that_name_them(name, value):
    with pytest.raises(ValueError, match=f"Expected {name} to be at least .* but got {value}"):
        RolloutLogger(**{name: value})
