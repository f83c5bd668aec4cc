"""Prompts: where they come from, what becomes of them, what reward functions get."""

import builtins
import json
import sys
from pathlib import Path

import jsonargparse
import pytest
import torch
import transformers
from helpers import ToyTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_rlbatch.data import RolloutDataModule, RolloutDump
from lightning_rlbatch.data.chat import encode_reply
from lightning_rlbatch.data.prompt_reading import read_prompts, read_rows
from lightning_rlbatch.data.prompts import contiguous_share
from lightning_rlbatch.functional.sizes import share_sizes
from lightning_rlbatch.testing import run_distributed

ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "c", "answer": 2}, {"prompt": "abc", "answer": 3}]
TEMPLATE = (
    "{% for t in tools or [] %}tool {{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% if not loop.last or m.role != 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", "tool", ".", "add", "hello", "there", "well", "fine", "?"]


def some_rows():
    return ROWS


def chat_tokenizer(template=TEMPLATE):
    """A transformers tokenizer of one token per word."""
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


def read(source, tokenizer=None, **options):
    defaults = {"name": "train_prompts", "rollouts_per_prompt": 2, "max_prompt_length": 20, "max_response_length": 5, "seed": 0}
    return read_prompts(source, tokenizer or ToyTokenizer(), **defaults | options)


def words(ids):
    return " ".join(WORDS[index] for index in ids)


# -- sources ---------------------------------------------------------------------------------------------------------------------------


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_kind_of_source_gives_the_same_rows(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl")
    sources = [file, Path(file), [Path(file)], some_rows, ROWS, tuple(ROWS), f"{__name__}.some_rows", lambda: iter(ROWS), lambda: file]
    sys.modules.setdefault(__name__, sys.modules[some_rows.__module__])
    for source in sources:
        assert read_rows(source, "train_prompts") == ROWS, source
    assert read_rows([file, file], "train_prompts") == ROWS + ROWS


def test_parquet_files_and_datasets_hold_columns_of_any_shape(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "hello"}], "reward_model": {"ground_truth": "7"}, "tags": ["x", "y"]},
        {"prompt": [{"role": "system", "content": "."}, {"role": "user", "content": "there"}], "reward_model": None, "tags": []},
    ]

    class Chat(ToyTokenizer):
        def apply_chat_template(self, messages, **options):
            return "".join(message["content"] for message in messages)

    def fn(rank, world_size):  # in a process of its own: a parent with Arrow's threads should not fork ranks
        import datasets
        import pandas
        import pyarrow.parquet

        path = str(tmp_path / "rows.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        assert read_rows(path, "train_prompts") == rows
        assert read_rows(datasets.Dataset.from_list(rows), "train_prompts") == rows
        assert read_rows(lambda: datasets.Dataset.from_list(rows).to_iterable_dataset(), "train_prompts") == rows
        for kind in ("pandas", "numpy", "arrow"):  # whatever it was used for before
            assert read_rows(datasets.Dataset.from_list(rows).with_format(kind), "train_prompts") == rows
        assert read_rows(pandas.read_parquet(path), "train_prompts") == rows  # with arrays where lists were
        # The logged completions of TRL: conversations, a column per reward function, NaN where one had no verdict.
        answers = [[{"role": "assistant", "content": text}] for text in ("x", "yy")]
        table = {"step": [7] * 2, "prompt": [rows[0]["prompt"]] * 2, "completion": answers, "accuracy": [1.0, float("nan")]}
        pandas.DataFrame({**table, "advantage": [0.5, -0.5]}).to_parquet(path)
        dump = RolloutDump(path, Chat(), reward_columns=["accuracy"])
        assert (dump.iterations, dump.rollouts_per_prompt(7)) == ([7], 2)
        samples = dump.read(7, 0, 1)
        assert samples["reward"].nan_to_num(nan=-1).tolist() == [1.0, -1.0]
        assert samples.lengths.tolist() == [len("hello") + 1 + 1, len("hello") + 2 + 1]
        (tmp_path / "rows.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:100])
        with pytest.raises(ValueError, match=r"train_prompts: .*rows.parquet is no whole Parquet file"):
            read_rows(path, "train_prompts")

    run_distributed(fn, 1, init_process_group=False)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"")
    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ImportError, match=r"train_prompts: reading .*rows.parquet needs pyarrow: pip install pyarrow"):
        read_rows(str(tmp_path / "rows.parquet"), "train_prompts")


def test_lines_may_hold_characters_that_python_takes_for_line_ends(tmp_path):
    rows = [{"prompt": "one\u2028two\x85three"}]
    assert read_rows(write_jsonl(tmp_path / "rows.jsonl", rows), "train_prompts") == rows


def test_data_frames_are_read_by_rows():
    class Pandas:
        columns = ("prompt", "answer")

        def __iter__(self):
            return iter(self.columns)

        def to_dict(self, orient):
            return {"records": ROWS}[orient]

    class Polars(Pandas):
        def to_dict(self):
            return {"prompt": []}

        def to_dicts(self):
            return ROWS

    for frame in (Pandas(), Polars()):
        assert read_rows(frame, "train_prompts") == ROWS


def test_a_dataset_of_torch_is_read_by_its_length():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            return ROWS[index % len(ROWS)]  # knows no end

    assert read_rows(Rows(), "train_prompts") == ROWS
    assert read_rows(torch.utils.data.Subset(Rows(), [2, 0]), "train_prompts") == [ROWS[2], ROWS[0]]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (lambda: [], ValueError, "val_prompts has no rows"),
        (lambda: [{"question": "a"}], ValueError, "val_prompts: row 0 must be an object with a 'prompt' but is {'question': 'a'}"),
        ("no/such/file.jsonl", ValueError, "neither an existing file nor the import path of a function"),
        (["no/such/file.jsonl"], ValueError, "no such file: 'no/such/file.jsonl'"),
        ({"train": ROWS, "test": ROWS}, TypeError, "several splits, 'train', 'test'. Pass one of them"),
        (7, TypeError, "must be a file, a function or rows, but is of type int"),
    ],
)
def test_unusable_sources_are_refused_with_their_option(source, error, message):
    with pytest.raises(error, match="val_prompts") as raised:
        read_rows(source, "val_prompts")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "train_prompts: line 2 of {file} is not JSON (Expecting value: line 2 column 1 (char 12))."),
        (b'{"prompt": "a"}\n\n{"prompt": "b', "train_prompts: line 3 of {file} is not JSON (Unterminated string"),  # prompts are not cut
        (b'{"prompt": "a"}\n["a"]\n', "train_prompts: line 2 of {file} must be a JSON object but is ['a']. Write one object per line."),
        (b'[\n{"prompt": "a"}\n]\n', "train_prompts: line 1 of {file} is not JSON"),
        (
            b'{"prompt": "a"}\n{"text": "b"}\n',
            "train_prompts: line 2 of {file} must be an object with a 'prompt' but is {{'text': 'b'}}.",
        ),
        (b'{"prompt": "\xe4"}\n', "train_prompts: line 1 of {file} is not UTF-8 (invalid continuation byte at byte 12). Convert the file."),
        (
            b'{"prompt": "a", "completions": []}\n',
            "train_prompts: line 1 of {file} has a column 'completions', which would hide what reward",
        ),
        (b'{"prompt": [[{"role": "user"}]]}\n', "train_prompts: line 1 of {file}: a prompt must be text, or a list of messages"),
        (b'{"prompt": "a\\ud800"}\n', "train_prompts: line 1 of {file} has a prompt that cannot be tokenized ("),
        (b"\xef\xbb\xbf\n \n", "train_prompts has no rows: {file} is empty."),
        (b"", "train_prompts has no rows: {file} is empty."),
    ],
)
def test_every_fault_of_a_file_is_named_with_its_line(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="train_prompts") as raised:
        read(str(file), chat_tokenizer())
    assert str(raised.value).startswith(message.format(file=file))


def test_odd_rows_are_read(tmp_path):
    """A byte order mark, Windows line ends, blank lines, twice the same prompt, columns of other rows, any kind of value."""
    file = tmp_path / "rows.jsonl"
    lines = ['\ufeff{"prompt": "ab", "a": {"b": [1, null]}}', "", '  {"prompt": "ab", "c": 2.5, "a": null}  ', '{"c": true, "prompt": "c"}']
    file.write_bytes("\r\n".join(lines).encode())
    batch = read(file)
    assert batch.prompts == ["ab", "ab", "c"]
    # Reward functions get every column of every row, in every iteration.
    assert batch.columns == [{"a": {"b": [1, None]}, "c": None}, {"a": None, "c": 2.5}, {"a": None, "c": True}]


def test_one_prompt_fills_any_batch():
    data = RolloutDataModule(
        lambda: [{"prompt": "ab"}], ToyTokenizer(), train_batch_size=3, mini_batch_size=2, micro_batch_size=1, max_prompt_length=4
    )
    data.setup("fit")
    assert [data.iteration_prompts(iteration).prompts for iteration in (0, 1)] == [["ab"] * 3] * 2
    assert data.iteration_prompts(1).prompt_epoch == 3.0


def test_a_missing_file_is_not_taken_for_the_import_path_of_a_program(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("raise SystemExit('a training program was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"train_prompts is 'train.jsonl', which is neither an existing file"):
        read_rows("train.jsonl", "train_prompts")
    with pytest.raises(ValueError, match=r"train_prompts is '.*', a folder. Name the files in it."):
        read_rows(str(tmp_path), "train_prompts")


def test_configuration_files_take_paths_lists_of_paths_rows_and_functions():
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(RolloutDataModule, "data")
    common = ["--data.tokenizer=helpers.ToyTokenizer", "--data.train_batch_size=1", "--data.mini_batch_size=1", "--data.micro_batch_size=1"]
    for value, expected in [("a.jsonl", "a.jsonl"), ('["a.jsonl", "b.parquet"]', ["a.jsonl", "b.parquet"]), (json.dumps(ROWS), ROWS)]:
        assert parser.parse_args([*common, f"--data.train_prompts={value}"]).data.train_prompts == expected


# -- encoding --------------------------------------------------------------------------------------------------------------------------


def test_prompts_that_are_empty_or_too_long_are_left_out_and_counted():
    rows = [{"prompt": text} for text in ("abc", "", "ab", "abcd", "a")]
    with pytest.warns(UserWarning, match="2 of 5 rows of train_prompts are left out: empty, or more than max_prompt_length=3 tokens"):
        batch = read(rows, max_prompt_length=3)
    assert batch.prompts == ["abc", "ab", "a"]
    with (
        pytest.warns(UserWarning, match="2 of 2"),
        pytest.raises(ValueError, match="No row of train_prompts is left within max_prompt_length=1"),
    ):
        read(rows[:2], max_prompt_length=1)


def test_messages_go_through_the_chat_template():
    rows = [
        {"prompt": [{"role": "user", "content": "hello"}], "answer": 1},
        {"prompt": "well", "answer": 2},
        {"prompt": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}], "answer": 3},
        {"prompt": [{"role": "user", "content": "."}], "tools": [{"type": "function", "function": {"name": "add"}}]},
    ]
    batch = read(rows, chat_tokenizer())
    assert [words(ids) for ids in batch.prompt_ids] == [
        "<user> hello <end> <assistant>",
        "well",
        "<user> hello <end> <assistant> well",  # the policy goes on with the assistant's words
        "tool add <user> . <end> <assistant>",
    ]
    assert batch.conversation(0) == rows[0]["prompt"]
    assert batch.conversation(1) is None
    assert batch.columns[2] == {"answer": 3, "tools": None}


def test_texts_have_no_conversations_and_batches_carry_theirs_along():
    assert read(ROWS).conversations is None
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS[7:12]]
    pool = read(rows, chat_tokenizer())
    batch = pool.select([3, 1])
    assert [batch.conversation(index)[0]["content"] for index in range(2)] == ["well", "hello"]
    batch.pool = pool
    other = batch.replaced([0], stream=3, attempt=1)
    assert other.conversation(1) == batch.conversation(1)
    assert other.prompts[0].split()[1] == other.conversation(0)[0]["content"]
    assert other.positions == batch.positions


@pytest.mark.parametrize("prompt", [7, [], [{"content": "no role"}], None])
def test_prompt_that_is_neither_text_nor_messages_is_refused_with_its_row(prompt):
    with pytest.raises(ValueError, match="train_prompts: row 1: a prompt must be text, or a list of messages"):
        read([{"prompt": "a"}, {"prompt": prompt}])


def test_messages_need_a_tokenizer_with_a_template():
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}]
    with pytest.raises(ValueError, match=r"train_prompts: row 1 .*need a tokenizer with apply_chat_template, but ToyTokenizer has none"):
        read(rows)
    with pytest.raises(ValueError, match=r"train_prompts: row 1 has a prompt that cannot be tokenized \(ValueError: .*chat_template"):
        read(rows, chat_tokenizer(template=None))
    strict = chat_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"row 1 has a prompt that cannot be tokenized \(TemplateError: roles must alternate\)"):
        read(rows, strict)


def test_reply_holds_what_lies_between_the_turns_and_nothing_twice():
    tokenizer = chat_tokenizer()
    reply = encode_reply(tokenizer, [{"role": "tool", "content": "fine"}])
    assert words(reply) == "<tool> fine <end> <assistant>"  # the end of the policy's own turn was sampled
    whole = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}, {"role": "tool", "content": "fine"}]
    prompt = read([{"prompt": whole[:1]}], tokenizer).prompt_ids[0]
    sampled = tokenizer.encode("there <end>", add_special_tokens=False)
    assert prompt + sampled + reply == read([{"prompt": whole}], tokenizer).prompt_ids[0]


def test_template_that_forgets_earlier_turns_is_refused():
    forgetful = chat_tokenizer("<user> {{ messages[-1].content }} <end> <assistant>")
    with pytest.raises(ValueError, match="leaves out the assistant's turn"):
        encode_reply(forgetful, [{"role": "user", "content": "fine"}])


# -- shares ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_items", "num_parts"), [(0, 3), (1, 4), (7, 4), (8, 4), (206, 4), (5, 1)])
def test_shares_are_contiguous_and_as_large_as_the_sizes_of_an_iteration_say(num_items, num_parts):
    shares = [contiguous_share(num_items, num_parts, part) for part in range(num_parts)]
    assert [index for share in shares for index in share] == list(range(num_items))
    assert [len(share) for share in shares] == share_sizes(num_items, num_parts)


# -- the data module -------------------------------------------------------------------------------------------------------------------


def test_data_module_reads_train_and_validation_files(tmp_path):
    train, val = write_jsonl(tmp_path / "train.jsonl"), write_jsonl(tmp_path / "val.jsonl", ROWS[:2])
    data = RolloutDataModule(
        [train, train], ToyTokenizer(), val_prompts=val, val_batch_size=1, val_rollouts_per_prompt=3,
        train_batch_size=4, mini_batch_size=2, micro_batch_size=1, max_prompt_length=4, max_response_length=4,
    )  # fmt: skip
    data.setup("fit")
    first, second = data.iteration_prompts(0), data.iteration_prompts(1)
    assert sorted(first.prompts + second.prompts[:2]) == sorted(2 * ["ab", "c", "abc"])  # a pass holds every row once
    assert {(prompt, row["answer"]) for prompt, row in zip(first.prompts, first.columns)} <= {("ab", 1), ("c", 2), ("abc", 3)}
    batches = list(data.val_dataloader())
    assert [batch.prompts for batch in batches] == [["ab"], ["c"]]
    assert [batch.num_samples for batch in batches] == [3, 3]
