import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlbatch.callbacks.recorder import RolloutRecorder
from lightning_rlbatch.callbacks.rollout_logger import RolloutLogger
from lightning_rlbatch.data.dumps import RolloutDump
from lightning_rlbatch.data.recording import RecordedRollouts, gather_recorded_table
from lightning_rlbatch.data.replay import ReplayDataModule
from lightning_rlbatch.data.rollout import RolloutDataModule
from lightning_rlbatch.distributed.mesh import single_process_meshes
from lightning_rlbatch.functional import GAE
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules.ppo import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

VOCABULARY = 20
NAMES = ("train/loss", "train/num_tokens", "train/grad_norm/policy", "train/skipped_steps")


class Letters:
    eos_token_id = 1
    pad_token_id = 0

    def encode(self, text):
        return [2 + ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token - 2) for token in token_ids if token > 1)


def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def prompts():
    return [{"prompt": text} for text in ("abc", "de", "fgab", "c", "bad", "ce")]


def count_a_and_b(prompts, completions, **columns):
    """Some completions get no verdict."""
    return [None if completion.startswith("c") else float(len(set(completion) & set("abdefgh"))) for completion in completions]


class Losses(Callback):
    """Keeps what every optimizer step reports; may save a checkpoint after one of them."""

    def __init__(self, save_after=None, path=None):
        self.steps = []
        self.save_after = save_after
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append([float(trainer.callback_metrics[name]) for name in NAMES])
        if len(self.steps) == self.save_after:
            trainer.save_checkpoint(self.path)


def module(**options):
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731 - one expression
    return PPOModule(policy, [count_a_and_b], optimizer=optimizer, **options)


def fit(
    data, *callbacks, iterations=2, save=(None, None), resume=None, sequence_parallel_size=1, world_size=1, trainer_options=None, **options
):
    losses = Losses(*save)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=RLBatchFSDPStrategy(sequence_parallel_size=sequence_parallel_size),
        max_epochs=iterations,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[losses, *callbacks],
        **(trainer_options or {}),
    )
    trainer.fit(module(**options), datamodule=data, ckpt_path=resume)
    return losses.steps


def rollout_data(**options):
    defaults = {"train_batch_size": 4, "mini_batch_size": 2, "rollouts_per_prompt": 4, "ppo_epochs": 2, "max_tokens_per_rank": 24}
    return RolloutDataModule(prompts, Letters, max_prompt_length=4, max_response_length=10, seed=3, **{**defaults, **options})


def replay_data(folder, **options):
    return ReplayDataModule(str(folder), **{"mini_batch_size": 2, "ppo_epochs": 2, "max_tokens_per_rank": 24, **options})


def record(folder, world_size=2, **options):
    def run(rank, size):
        return fit(rollout_data(), RolloutRecorder(str(folder)), world_size=size, **options)

    return run_distributed(run, world_size, init_process_group=False)[0]


def replay(folder, world_size=1, data_options=None, **options):
    def run(rank, size):
        return fit(replay_data(folder, **(data_options or {})), world_size=size, **options)

    return run_distributed(run, world_size, init_process_group=False)[0]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    return folder, record(folder)


def assert_same(steps, others, tolerance=1e-6):
    """Losses and counts agree; gradient norms too, though AdamW magnifies rounding from step to step."""
    actual, expected = torch.tensor(steps, dtype=torch.float64), torch.tensor(others, dtype=torch.float64)
    norms = torch.tensor([name == "train/grad_norm/policy" for name in NAMES])
    torch.testing.assert_close(actual[:, ~norms], expected[:, ~norms], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual[:, norms], expected[:, norms], rtol=20 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (1, {}), (2, {"max_tokens_per_rank": 14}), (1, {"max_tokens_per_rank": None, "micro_batch_size": 3})],
    ids=["same", "1 rank", "other budget", "static"],
)
def test_replaying_a_run_gives_its_losses_on_other_ranks_and_budgets_too(recording, world_size, options):
    folder, steps = recording
    assert len(steps) == 8
    assert all(step[0] != 0 and step[3] == 0 for step in steps)
    assert_same(replay(folder, world_size, options), steps)


def test_replaying_with_sequence_parallelism_gives_the_recorded_losses(recording):
    folder, steps = recording
    assert_same(replay(folder, 2, sequence_parallel_size=2), steps)


def test_recomputed_log_probs_and_advantages_give_the_recorded_losses(recording):
    folder, steps = recording
    assert_same(replay(folder, 2, {"rescore": True}), steps)


def test_another_seed_is_another_run(recording):
    folder, steps = recording
    others = replay(folder, 1, {"seed": 4})
    assert not torch.allclose(torch.tensor(others), torch.tensor(steps), rtol=1e-4)


def test_after_the_last_recorded_iteration_the_first_comes_again_in_another_order(recording):
    folder, steps = recording
    more = replay(folder, 1, iterations=3)
    assert_same(more[:8], steps)
    assert len(more) == 12
    tokens = [[step[1] for step in part] for part in (more[:4], more[8:])]
    assert sum(tokens[0]) == sum(tokens[1])
    assert tokens[0] != tokens[1]


def test_a_trainer_that_limits_its_batches_goes_on_with_the_next_iteration(recording):
    folder, steps = recording
    limited = replay(folder, 1, trainer_options={"limit_train_batches": 3})
    assert len(limited) == 6
    assert_same(limited[:3], steps[:3])
    assert [step[1] for step in limited[3:]] == [step[1] for step in steps[4:7]]


def test_a_resumed_replay_equals_the_uninterrupted_one_between_epochs_and_inside_of_one(recording, tmp_path):
    folder, _ = recording

    def run(rank, world_size):
        whole = fit(replay_data(folder), iterations=2, world_size=world_size)
        path, resumed = str(tmp_path / "after_a_step.ckpt"), {}
        for step in (2, 3):
            fit(replay_data(folder), iterations=1, save=(step, path), world_size=world_size)
            resumed[step] = fit(replay_data(folder), iterations=2, resume=path, world_size=world_size)
        return whole, resumed

    whole, resumed = run_distributed(run, 2, init_process_group=False)[0]
    for step, steps in resumed.items():
        assert_same(steps, whole[step:], tolerance=0)


def test_a_critic_is_replayed_from_recorded_values(tmp_path):
    options = {"critic": policy, "advantage": GAE()}
    steps = record(tmp_path, 1, **options)
    assert_same(replay(tmp_path, 2, **options), steps)


def test_what_was_not_recorded_is_an_error_that_says_to_rescore(recording):
    folder, _ = recording
    with pytest.raises(AssertionError, match=r"2 of 2 ranks failed(.|\n)*needs ref_log_probs but iteration 0 .*rescore=True"):
        replay(folder, 2, kl_coefficient=0.1)


def test_a_folder_that_only_one_rank_cannot_read_ends_all_ranks(recording, tmp_path):
    folder, _ = recording

    def run(rank, world_size):
        fit(replay_data(folder if rank == 0 else tmp_path), world_size=world_size)

    with pytest.raises(AssertionError, match=r"Rank 1 failed in phase 'opening recorded rollouts'") as error:
        run_distributed(run, 2, init_process_group=False)
    assert "No recorded rollouts in" in str(error.value)


def test_ranks_that_see_different_recordings_are_told_so(recording, tmp_path):
    folder, _ = recording
    (tmp_path / "iteration_000000").symlink_to(folder / "iteration_000000")

    def run(rank, world_size):
        fit(replay_data(folder if rank == 0 else tmp_path), world_size=world_size)

    with pytest.raises(AssertionError, match="the length of `iterations` is 2 on rank 0 and 1 on rank 1"):
        run_distributed(run, 2, init_process_group=False)


def test_options_without_effect_or_out_of_range_are_errors():
    with pytest.raises(ValueError, match="mini_batch_size to be at least 1 but got 0"):
        replay_data("x", mini_batch_size=0)
    with pytest.raises(ValueError, match="rescore=False is impossible"):
        replay_data("x", tokenizer=Letters, rescore=False)
    with pytest.raises(ValueError, match="effect on text dumps only"):
        replay_data("x", reward_columns=["length"])
    with pytest.raises(ValueError, match="exactly one of max_tokens_per_rank and micro_batch_size"):
        replay_data("x", micro_batch_size=1)


def test_a_mini_batch_larger_than_the_recorded_iteration_is_an_error(recording):
    folder, _ = recording
    with pytest.raises(
        AssertionError, match=r"2 of 2 ranks failed(.|\n)*mini_batch_size=5 prompts per optimizer step exceed the 4 prompts"
    ):
        replay(folder, 2, {"mini_batch_size": 5})


def test_dumps_of_text_without_a_tokenizer_are_told_apart_from_recordings(tmp_path):
    write_lines(tmp_path / "1.jsonl", verl_rows(1))
    for path in (tmp_path, tmp_path / "1.jsonl"):
        with pytest.raises(ValueError, match=r"expected folders such as iteration_000000, but it .*Dumps of text need .*tokenizer"):
            RecordedRollouts(path)
    with pytest.raises(ValueError, match="Recorded rollouts are no prompts to validate on"):
        replay_data(tmp_path).setup("validate")


def test_ids_that_occur_twice_are_an_error():
    samples = PackedBatch.from_samples([{"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0, "sample_id": 3}] * 2)
    with pytest.raises(ValueError, match="different ids from 0 to 7"):
        gather_recorded_table(samples, 2, 4, single_process_meshes())


# -- text dumps ----------------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def verl_rows(step):
    texts = [("abc", "bad", 1.0), ("de", "c", 0.0), ("abc", "ab", 0.0), ("de", "gag", 1.0), ("abc", "cab", None)]
    return [{"input": p, "output": o, "gts": "x", "score": s, "step": step, "acc": s} for p, o, s in texts]


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
        ('{"prompt": 7, "completion": "b", "reward": 1}', "Line 1 of .*: a prompt must be text, or a list of messages .* but is '7'"),
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
