"""Text dumps of other trainers and of RolloutLogger are read as the rollouts that they were."""

import json
from pathlib import Path

import pytest
from replaying import Letters, assert_same, fit, replay, replay_data, rollout_data

from lightning_rlbatch.callbacks.rollout_logger import RolloutLogger
from lightning_rlbatch.data.dumps import RolloutDump
from lightning_rlbatch.data.recording import RecordedRollouts
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.testing import run_distributed


def write_lines(path: Path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def verl_rows(step):
    texts = [("abc", "bad", 1.0), ("de", "c", 0.0), ("abc", "ab", 0.0), ("de", "gag", 1.0), ("abc", "cab", None)]
    return [{"input": p, "output": o, "gts": "x", "score": s, "step": step, "acc": s} for p, o, s in texts]


def test_dumps_of_text_without_a_tokenizer_are_told_apart_from_recordings(tmp_path):
    write_lines(tmp_path / "1.jsonl", verl_rows(1))
    for path in (tmp_path, tmp_path / "1.jsonl"):
        with pytest.raises(ValueError, match=r"expected folders such as iteration_000000, but it .*Dumps of text need .*tokenizer"):
            RecordedRollouts(path)
    with pytest.raises(ValueError, match="Recorded rollouts are no prompts to validate on"):
        replay_data(tmp_path).setup("validate")


def test_verls_dump_is_read_by_step_with_groups_by_prompt(tmp_path):
    for step in (10, 9):
        write_lines(tmp_path / f"{step}.jsonl", verl_rows(step))
    dump = RolloutDump(tmp_path, Letters())
    assert (dump.iterations, dump.num_prompts, dump.rollouts_per_prompt(9)) == ([9, 10], 2, 3)
    shares = [dump.read(10, rank, 2) for rank in range(2)]
    samples = PackedBatch.concat(shares)
    assert samples["sample_id"].tolist() == [0, 1, 2, 3, 4]  # three of "abc", then two of "de"
    assert samples["reward"].nan_to_num(nan=-1).tolist() == [1.0, 0.0, -1.0, 0.0, 1.0]
    letters = Letters()
    for ids, mask, (prompt, completion) in zip(
        samples.split_per_sample("input_ids"),
        samples.split_per_sample("response_mask"),
        [("abc", "bad"), ("abc", "ab"), ("abc", "cab"), ("de", "c"), ("de", "gag")],
    ):
        assert ids[~mask].tolist() == letters.encode(prompt)
        assert ids[mask].tolist() == [*letters.encode(completion), letters.eos_token_id]
    many = [dump.read(9, rank, 6)["sample_id"].tolist() for rank in range(6)]
    assert [index for share in many for index in share] == [0, 1, 2, 3, 4]
    assert [] in many


def test_trls_completions_have_their_rewards_summed_from_named_columns(tmp_path):
    rows = [{"step": "1", "prompt": "ab", "completion": "c", "fmt": 0.5, "acc": value, "advantage": 0.1} for value in (1.0, None, 2)]
    write_lines(tmp_path / "completions.jsonl", [*rows, {**rows[0], "step": "2"}])
    with pytest.raises(ValueError, match=r"Line 1 of .*: no reward under reward or score; keys: \['acc', 'advantage'.*reward_columns"):
        RolloutDump(tmp_path, Letters())
    dump = RolloutDump(tmp_path / "completions.jsonl", Letters(), reward_columns=["fmt", "acc"], append_eos=False)
    assert dump.iterations == [1, 2]
    samples = dump.read(1, 0, 1)
    assert samples["reward"].tolist() == [1.5, 0.5, 2.5]
    assert samples["input_ids"].tolist() == [2, 3, 4] * 3


def test_groups_of_verl_are_found_though_every_row_has_a_uid_of_its_own(tmp_path):
    """The v1 trainer writes {uid}_{rollout}_{output}; the old one has no uid, and may have a "reward" that is a part of the score."""
    rows = [
        {"input": "ab", "output": "c" * (1 + index), "score": float(index), "reward": 9.0, "step": 1, "uid": f"7f_{group}_{index}_0"}
        for group in (0, 1)
        for index in range(3)
    ]
    write_lines(tmp_path / "1.jsonl", rows)
    dump = RolloutDump(tmp_path, Letters())
    assert (dump.num_prompts, dump.rollouts_per_prompt(1)) == (2, 3)
    assert dump.read(1, 0, 1)["reward"].tolist() == [0.0, 1.0, 2.0] * 2
    write_lines(tmp_path / "1.jsonl", [{**row, "prompt": row.pop("input"), "uid": "a_1_2"} for row in rows])  # no row of verl's
    assert RolloutDump(tmp_path, Letters()).rollouts_per_prompt(1) == 6


def test_a_file_that_breaks_off_is_read_up_to_there(tmp_path):
    write_lines(tmp_path / "1.jsonl", verl_rows(1))
    whole = RolloutDump(tmp_path, Letters()).read(1, 0, 1)
    with (tmp_path / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"input": "abc", "outp')
    with pytest.warns(UserWarning, match=r"The end of .*1.jsonl breaks off: line 6 is left out"):
        dump = RolloutDump(tmp_path, Letters())
    assert dump.read(1, 0, 1)["input_ids"].tolist() == whole["input_ids"].tolist()


def test_conversations_go_through_the_chat_template(tmp_path):
    class Chat(Letters):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt, continue_final_message):
            return "".join(message["content"] for message in messages) + "h" * add_generation_prompt

    turn = {"role": "user", "content": "ab", "name": None}  # Parquet gives every message the keys of all
    rows = [
        {"step": 1, "prompt": [turn], "completion": [{"role": "assistant", "content": "c"}], "accuracy": 1.0, "advantage": 0.0},
        {"step": 1, "prompt": [turn], "completion": [{"role": "assistant", "content": [{"type": "text", "text": "d"}]}], "accuracy": None},
    ]
    write_lines(tmp_path / "0.jsonl", rows)
    dump = RolloutDump(tmp_path, Chat(), reward_columns=["accuracy"])
    assert (dump.num_prompts, dump.rollouts_per_prompt(1)) == (1, 2)
    letters = Letters()
    expected = [letters.encode("abh") + letters.encode(text) + [1] for text in "cd"]
    assert [ids.tolist() for ids in dump.read(1, 0, 1).split_per_sample("input_ids")] == expected
    with pytest.raises(ValueError, match=r"Line 1 of .* cannot be tokenized \(TypeError: .*need a tokenizer with apply_chat_template"):
        RolloutDump(tmp_path, Letters(), reward_columns=["accuracy"]).read(1, 0, 1)


def test_token_ids_are_taken_as_they_are(tmp_path):
    rows = [
        {"uid": "g", "prompt_ids": [2, 3], "completion_ids": [9, 1], "reward": 1.0},
        {"uid": "g", "prompt": "d", "completion_ids": [8], "reward": 0},
    ]
    write_lines(tmp_path / "0.jsonl", rows)
    dump = RolloutDump(tmp_path, Letters())
    assert (dump.num_prompts, dump.rollouts_per_prompt(0)) == (1, 2)
    assert [ids.tolist() for ids in dump.read(0, 0, 1).split_per_sample("input_ids")] == [[2, 3, 9, 1], [5, 8]]


def test_files_without_a_step_are_an_iteration_each_in_natural_order(tmp_path):
    for number in (10, 2):
        write_lines(tmp_path / f"{number}.jsonl", [{"prompt": "a", "completion": "b" * number, "reward": 1}])
    dump = RolloutDump(tmp_path, Letters())
    assert dump.iterations == [0, 1]
    assert [dump.read(iteration, 0, 1).num_tokens for iteration in (0, 1)] == [1 + 2 + 1, 1 + 10 + 1]


def test_completions_are_tokenized_without_special_tokens(tmp_path):
    class Framing(Letters):
        def encode(self, text, add_special_tokens=True):
            return [0] * add_special_tokens + super().encode(text)

    write_lines(tmp_path / "0.jsonl", [{"prompt": "a", "completion": "b", "reward": 1}])
    assert RolloutDump(tmp_path, Framing()).read(0, 0, 1)["input_ids"].tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "Line 1 of .* is not JSON"),
        ("[1]", "Line 1 of .* must be a JSON object"),
        ('{"completion": "b", "reward": 1}', "expected the prompt under prompt or input but got nothing"),
        ('{"prompt": 7, "completion": "b", "reward": 1}', "Line 1 of .*: a prompt must be text, or a list of messages .* but is 7"),
        ('{"prompt": "a", "completion": ["b"], "reward": 1}', "Line 1 of .*: the completion must be text, or one message .* but is "),
        ('{"prompt": "a", "completion": "b", "reward": 1, "step": "x"}', "Line 1 of .*: expected iteration or step to be an integer"),
        ('{"prompt": "a", "completion": "b", "reward": "good"}', r"finite number or null as reward but got \['good'\]"),
        ('{"prompt": "a", "completion": "b", "reward": Infinity}', "finite number or null"),
        ("", "has no rollouts"),
        ('{"prompt_ids": [2], "completion_ids": [3], "reward": 1}', "expected the prompt under prompt or input but got nothing"),
        ('{"prompt": "a", "completion_ids": "3", "reward": 1}', "expected completion_ids to be a list of token ids but got '3'"),
    ],
)
def test_bad_lines_are_errors_that_name_file_and_line(tmp_path, line, message):
    (tmp_path / "0.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        RolloutDump(tmp_path, Letters())


def test_completions_without_tokens_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": "a", "completion": text, "reward": 1} for text in ("b", "", "cd")]
    write_lines(tmp_path / "0.jsonl", [*rows, {**rows[0], "completion_ids": []}])
    with pytest.warns(UserWarning, match="2 of 4 rows of .* are left out: a completion without tokens teaches nothing"):
        dump = RolloutDump(tmp_path, Letters(), append_eos=False)
    assert [ids.tolist() for ids in dump.read(0, 0, 1).split_per_sample("input_ids")] == [[2, 3], [2, 4, 5]]
    with pytest.warns(UserWarning, match="1 of 4 rows"):
        assert RolloutDump(tmp_path, Letters()).rollouts_per_prompt(0) == 3


def test_a_folder_without_dumps_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"neither a .jsonl or .parquet file nor a folder with such files"):
        RolloutDump(tmp_path, Letters())


def test_training_on_a_text_dump_is_the_same_on_two_ranks(tmp_path):
    for step in (1, 2):
        write_lines(tmp_path / f"{step}.jsonl", verl_rows(step))
    options = {"tokenizer": Letters, "mini_batch_size": 1, "ppo_epochs": 1}
    one, two = (replay(tmp_path, world_size, options) for world_size in (1, 2))
    assert len(one) == 4
    assert sorted(step[1] for step in one[:2]) == [2 + 4, 3 + 4]  # tokens of "de" and of "abc" without the reward that is missing
    assert_same(two, one, tolerance=1e-5)


def test_the_logs_of_a_run_train_like_the_run_itself(tmp_path):
    def run(rank, world_size):
        data = rollout_data(ppo_epochs=1)
        return fit(data, RolloutLogger(str(tmp_path), max_rows=0), iterations=1, world_size=world_size)

    def run_logged(rank, world_size):
        data = replay_data(tmp_path, tokenizer=Letters, ppo_epochs=1, mini_batch_size=4)
        return fit(data, iterations=1, world_size=world_size)

    steps = run_distributed(run, 2, init_process_group=False)[0]
    logged = run_distributed(run_logged, 1, init_process_group=False)[0]
    # Completions that were cut off get an end token more; all else is there.
    assert 0 <= logged[0][1] - sum(step[1] for step in steps) <= 16
