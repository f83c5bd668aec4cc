import copy
import pickle

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_rlbatch.functional.packing import PackedBatch


def samples():
    return [
        {"input_ids": [5, 6, 7], "response_mask": [0, 1, 1], "log_probs": [0.0, -1.0, -2.0], "group": 3, "reward": 1.0},
        {"input_ids": [8], "response_mask": [0], "log_probs": [0.0], "group": 3, "reward": 0.5},
        {"input_ids": [1, 2, 3, 4], "response_mask": [0, 0, 0, 1], "log_probs": [0.0, 0.0, 0.0, -3.0], "group": 9, "reward": -1.0},
    ]


def assert_same(left, right):
    assert left.seq_lens == right.seq_lens
    assert left.schema == right.schema
    torch.testing.assert_close(left.cu_seqlens, right.cu_seqlens)
    for name in left.schema:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0)


def test_samples_lie_end_to_end_and_fields_find_their_kind():
    batch = PackedBatch.from_samples(samples())
    assert batch["input_ids"].tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert batch.cu_seqlens.dtype == torch.int32
    assert sorted(batch.per_token) == ["input_ids", "log_probs", "response_mask"]
    assert sorted(batch.per_sample) == ["group", "reward"]
    assert batch["response_mask"].dtype == torch.bool
    assert batch["group"].dtype == torch.int64
    assert (batch.num_samples, batch.num_tokens, batch.max_seqlen, batch.seq_lens) == (3, 8, 4, (3, 1, 4))
    assert batch.lengths.tolist() == [3, 1, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.sample_ids_per_token.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert [piece.tolist() for piece in batch.split_per_sample("input_ids")] == [[5, 6, 7], [8], [1, 2, 3, 4]]


def test_a_field_named_per_sample_stays_so_even_where_its_size_equals_the_length():
    one = [{"input_ids": [1, 2], "scores": np.array([0.5, 0.25])}]
    assert PackedBatch.from_samples(one).schema["scores"].per_token
    batch = PackedBatch.from_samples(one, per_sample=["scores"])
    assert batch["scores"].tolist() == [[0.5, 0.25]]
    assert batch["scores"].dtype == torch.float64


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_round_trips(side):
    batch = PackedBatch.from_samples(samples())
    padded = batch.to_padded(pad_id=0, padding_side=side)
    assert padded["input_ids"].shape == (3, 4)
    expected = {"left": [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]], "right": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]}
    assert padded["attention_mask"].tolist() == expected[side]
    assert_same(PackedBatch.from_padded(**padded), batch)


def test_a_left_padded_prompt_with_a_right_padded_response_is_one_run():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    batch = PackedBatch.from_padded(torch.arange(8).view(2, 4), mask, values=torch.arange(8.0).view(2, 4), reward=torch.tensor([1.0, 2.0]))
    assert batch["values"].tolist() == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    assert batch["reward"].tolist() == [1.0, 2.0]


def test_pad_tokens_that_equal_real_tokens_do_not_matter():
    padded = PackedBatch.from_samples(samples()).to_padded(pad_id=8)
    assert_same(PackedBatch.from_padded(**padded), PackedBatch.from_samples(samples()))


def test_a_rectangular_batch_may_be_lists_or_arrays_and_its_masks_any_numbers():
    ids, ones, mask, rewards = [[0, 7, 8], [5, 6, 0]], [[0, 1, 1], [1, 1, 0]], [[0, 0, 1], [0, 1, 0]], [0.5, 1.0]
    expected = PackedBatch.from_padded(torch.tensor(ids), torch.tensor(ones), torch.tensor(mask), reward=torch.tensor(rewards).double())
    given = [np.array(x, dtype=dtype) for x, dtype in ((ids, "i4"), (ones, "f4"), (mask, "f4"), (rewards, "f8"))]
    assert_same(PackedBatch.from_padded(*given[:3], reward=given[3]), expected)
    assert_same(PackedBatch.from_padded(ids, ones, mask, reward=given[3]), expected)


def test_select_keeps_the_given_order_and_may_repeat():
    batch = PackedBatch.from_samples(samples())
    chosen = batch.select(torch.tensor([2, 0, 2]))
    assert_same(chosen, PackedBatch.from_samples([samples()[2], samples()[0], samples()[2]]))
    assert batch.select([]).num_samples == 0
    assert batch.select([]).schema == batch.schema
    with pytest.raises(IndexError, match="Sample 3 does not exist"):
        batch.select([3])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.int8, torch.bfloat16, torch.float8_e5m2, torch.complex64], ids=str)
def test_select_takes_fields_of_any_dtype_and_lets_gradients_through_others(dtype):
    numbers = torch.arange(6, dtype=torch.float64 if dtype.is_floating_point or dtype.is_complex else torch.int64)
    batch = PackedBatch([0, 1, 3, 6], {"input_ids": torch.arange(6), "odd": numbers.to(dtype)}, {"one": numbers[:3].to(dtype)})
    chosen = batch.select([2, 0])
    assert chosen["odd"].tolist() == [3, 4, 5, 0]
    assert chosen["one"].tolist() == [2, 0]
    leaf = torch.ones(6, requires_grad=True)
    batch.with_fields({"leaf": leaf}).select([1, 1])["leaf"].sum().backward()
    assert leaf.grad.tolist() == [0, 2, 2, 0, 0, 0]


def test_select_by_a_mask_keeps_what_is_true_and_fractions_are_refused():
    batch = PackedBatch([0, 1, 3, 6], {"input_ids": torch.arange(6)})
    for mask in (torch.tensor([True, False, True]), np.array([True, False, True]), [True, False, True]):
        assert_same(batch.select(mask), batch.select([0, 2]))
    assert_same(batch.select(np.array([2, 0])), batch.select([2, 0]))
    assert batch.select(torch.zeros(3, dtype=torch.bool)).num_samples == 0
    with pytest.raises(IndexError, match="A mask of 2 bools does not fit the batch's 3 samples"):
        batch.select([True, False])
    with pytest.raises(TypeError):
        batch.select([0.5])


def test_concat_of_selections_is_the_selection():
    batch = PackedBatch.from_samples(samples())
    parts = [batch.select([1]), PackedBatch.empty(batch.schema), batch.select([0, 2])]
    assert_same(PackedBatch.concat(parts), batch.select([1, 0, 2]))


def test_concat_names_the_batch_and_the_field_that_differ():
    batch = PackedBatch.from_samples(samples())
    with pytest.raises(ValueError, match="Batch 1 cannot be joined to batch 0: field 'reward' is missing"):
        PackedBatch.concat([batch, batch.without_fields(["reward"])])
    with pytest.raises(ValueError, match=r"field 'group' is per sample \[N\] torch.float32, expected per sample \[N\] torch.int64"):
        PackedBatch.concat([batch, batch.with_fields(per_sample={"group": batch["group"].float()})])


def test_a_filler_has_the_schema_valid_tokens_and_no_response():
    schema = PackedBatch.from_samples(samples()).schema
    filler = PackedBatch.filler(schema, 3)
    assert filler.schema == schema
    assert (filler.num_samples, filler.num_tokens) == (1, 3)
    assert not filler["response_mask"].any()
    assert filler["input_ids"].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="num_tokens=0"):
        PackedBatch.filler(schema, 0)


def test_an_empty_batch_answers_every_question():
    schema = PackedBatch.from_samples(samples()).schema
    empty = PackedBatch.empty(schema)
    assert empty.schema == schema
    assert (empty.num_samples, empty.num_tokens, empty.max_seqlen) == (0, 0, 0)
    assert empty.position_ids.tolist() == empty.sample_ids_per_token.tolist() == []
    assert empty.split_per_sample("input_ids") == ()
    assert empty.to_padded(0)["input_ids"].shape == (0, 0)
    assert_same(pickle.loads(pickle.dumps(empty)), empty)


def test_fields_can_be_added_replaced_moved_and_dropped_without_touching_the_original():
    batch = PackedBatch.from_samples(samples())
    more = batch.with_fields(per_token={"advantages": torch.ones(8)}, per_sample={"log_probs": torch.zeros(3, 2)})
    assert more.schema["log_probs"].shape == (2,)
    assert not more.schema["log_probs"].per_token
    assert "advantages" not in batch
    assert "advantages" not in more.without_fields(["advantages"])
    with pytest.raises(KeyError, match="No field 'nothing'"):
        batch.without_fields(["nothing"])
    with pytest.raises(ValueError, match="cannot be dropped"):
        batch.without_fields(["input_ids"])
    with pytest.raises(ValueError, match=r"'advantages' has shape \[7\] but the batch has 8 tokens"):
        batch.with_fields(per_token={"advantages": torch.ones(7)})


def test_a_batch_cannot_be_changed():
    batch = PackedBatch.from_samples(samples())
    with pytest.raises(AttributeError, match="cannot be changed"):
        batch.num_tokens = 3
    with pytest.raises(TypeError):
        batch.per_token["input_ids"] = torch.zeros(8)


def test_pickling_and_copying_keep_everything():
    batch = PackedBatch.from_samples(samples())
    for twin in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert_same(twin, batch)


def test_lightning_moves_a_batch_whole_and_never_casts_it():
    batch = PackedBatch.from_samples(samples())
    assert move_data_to_device({"rows": batch}, torch.device("cpu"))["rows"].schema == batch.schema
    cast = apply_to_collection([batch], torch.Tensor, lambda tensor: tensor.to(torch.bfloat16))
    assert cast[0]["log_probs"].dtype == torch.float32
    moved = batch.to("meta")
    assert moved.device.type == "meta"
    assert moved.position_ids.shape == (8,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": [0.0, 1.0]}, r"Field 'log_probs' of sample 0 has shape \[2\] but the sample has 3 tokens"),
        ({"group": [3, 4, 5]}, "Field 'group' of sample 1 has shape"),
        ({"input_ids": []}, r"input_ids of sample 0 to be \[L\] with L >= 1"),
        ({"extra": 1}, r"Samples 0 and 1 differ in the fields \['extra'\]"),
        ({"response_mask": [1, 1, 1]}, "response_mask is True at the first token of sample 0"),
        ({"group": "text"}, "Field 'group' of sample 0 is a str"),
        ({"reward": 1}, "Field 'reward' is torch.int64 in sample 0 but torch.float32 in sample 1"),
        ({"input_ids": [1.0, 2.0, 3.0]}, "'input_ids' is torch.float32 in sample 0"),
        ({"response_mask": [0.0, 1.0, 1.0]}, "'response_mask' is torch.float32"),
    ],
)
def test_an_unfit_sample_is_an_error_that_names_sample_and_field(change, message):
    rows = samples()
    rows[0] = rows[0] | change
    with pytest.raises((ValueError, TypeError), match=message):
        PackedBatch.from_samples(rows)


def test_unfit_masks_and_shapes_are_errors_that_name_the_row():
    ids = torch.arange(8).view(2, 4)
    ones = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="Row 1 of attention_mask has no real token"):
        PackedBatch.from_padded(ids, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    with pytest.raises(ValueError, match="Row 0 of attention_mask has 2 separate runs"):
        PackedBatch.from_padded(ids, torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]))
    with pytest.raises(ValueError, match=r"field 'values' to be \[N=2, L=4, ...\]"):
        PackedBatch.from_padded(ids, ones, values=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="field 'response_mask'"):
        PackedBatch.from_padded(ids, ones, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="Expected input_ids and attention_mask of one shape"):
        PackedBatch.from_padded(ids, ones[:, :3])
    with pytest.raises(ValueError, match="Expected cu_seqlens to start with 0"):
        PackedBatch([1, 2], {"input_ids": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="Sample 1 has 0 tokens"):
        PackedBatch([0, 2, 2], {"input_ids": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="at least one sample"):
        PackedBatch.from_samples([])
