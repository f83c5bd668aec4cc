"""Samples of supervised fine-tuning: what is wrong with one is said before training, with its number."""

import json

import jsonargparse
import pytest

from lightning_rlbatch.data import SFTDataModule
from lightning_rlbatch.data.sources import import_callable

GOOD = {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([], ValueError, "train_dataset has no samples."),
        (lambda: iter([GOOD]), TypeError, "train_dataset must be a map-style dataset .* but is list_iterator. Make a list"),
        (7, TypeError, "train_dataset must be a map-style dataset .* but is int"),
        ([GOOD, ([1], [0])], TypeError, "train_dataset: sample 1 must be a mapping with input_ids and response_mask but is tuple"),
        ([GOOD, {"input_ids": [1]}], ValueError, r"train_dataset: sample 1 has no 'response_mask'; it has \['input_ids'\]"),
        ([{"input_ids": [1], "labels": [1]}], ValueError, "sample 0 has no 'response_mask'.*response_mask = labels != -100"),
        ([GOOD, {**GOOD, "response_mask": [0, 1]}], ValueError, r"sample 1 has 3 input_ids and a response_mask of shape \[2\]"),
        ([{"input_ids": [], "response_mask": []}], ValueError, r"sample 0 has 0 input_ids .* at least one"),
        ([{**GOOD, "response_mask": [0, 1, None]}], ValueError, "sample 0: response_mask must hold 0 and 1, or booleans"),
        ([GOOD, {**GOOD, "response_mask": [1, 1, 1]}], ValueError, "sample 1: response_mask is 1 at the first token"),
    ],
)
def test_a_dataset_that_cannot_be_trained_on_is_refused_with_the_sample(source, error, message):
    with pytest.raises(error, match=message):
        SFTDataModule(source, mini_batch_size=1, micro_batch_size=1).setup("fit")


def test_a_dataset_or_a_function_that_makes_one_is_read():
    for source in ([GOOD], lambda: [GOOD], (GOOD,)):
        SFTDataModule(source, mini_batch_size=1, micro_batch_size=1).setup("fit")


def test_a_file_is_read_and_never_imported_and_a_function_may_be_named_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "demonstrations.py").write_text("raise SystemExit('imported')")
    (tmp_path / "demonstrations.jsonl").write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD) + "\n")
    (tmp_path / "samples_of_a_user.py").write_text(f"def make(): return [{GOOD}]")
    options = {"mini_batch_size": 1, "micro_batch_size": 1}
    SFTDataModule("demonstrations.jsonl", val_dataset="samples_of_a_user.make", **options).setup("fit")
    with pytest.raises(ValueError, match=r"train_dataset is 'demonstrations\.parquet', which is neither an existing file nor"):
        SFTDataModule("demonstrations.parquet", **options).setup("fit")
    (tmp_path / "demonstrations.jsonl").write_text(json.dumps({"input_ids": [1, 2]}))
    with pytest.raises(ValueError, match="train_dataset: sample 0 has no 'response_mask'"):
        SFTDataModule("demonstrations.jsonl", **options).setup("fit")
    (tmp_path / "demonstrations.model").mkdir()  # a folder, too, may be named like a part of a module
    assert import_callable("demonstrations.model") is None
    for file in ("demonstrations.json", "demonstrations.gguf"):  # that are not there
        assert import_callable(file) is None
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(SFTDataModule, "data")
    read = parser.parse_args(["--data=SFTDataModule", "--data.train_dataset=demonstrations.jsonl", "--data.mini_batch_size=1"])
    assert read.data.init_args.train_dataset == "demonstrations.jsonl"
