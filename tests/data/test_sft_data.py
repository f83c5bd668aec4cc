"""Samples of supervised fine-tuning: what is wrong with one is said before training, with its number."""

import pytest

from lightning_rlbatch.data import SFTDataModule

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
